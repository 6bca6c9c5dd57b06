"""Every recipe reaches what docs/recipes.md says. Most take ten seconds or more: `make recipes` runs them."""

from __future__ import annotations

import json
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.forked import run_forked  # noqa: F401 - a fixture
from tests.families import FULL_PRODUCT
from tests.guards.sources import ROOT

RECIPES = ROOT / "examples/recipes"
SECTIONS = {
    name.lower(): re.search(r"`(\w+)`[^`]*?\sends\s(below|above)\s([\d.]*\d)", text)
    for name, text in re.findall(r"^## (\w+)\n(.*?)(?=^## |\Z)", (ROOT / "docs/recipes.md").read_text(), re.M | re.S)
}
pytestmark = [pytest.mark.spawn, pytest.mark.skipif(not FULL_PRODUCT, reason="make recipes runs them")]


def check(recipe, value):
    metric, side, bound = SECTIONS[recipe].groups()
    print(f"{recipe}: {metric} {value}, to be {side} {bound}")
    assert value < float(bound) if side == "below" else value > float(bound)


@pytest.mark.parametrize("path", sorted(RECIPES.glob("*.yaml")), ids=lambda path: path.stem)
def test_runs_reach_what_the_page_says(path, tmp_path, monkeypatch, run_forked):  # noqa: F811
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(RECIPES / "inputs.py"))["RECIPES"][path.stem](Path())
    assert run_forked(path) == 0
    log = (tmp_path / "runs" / path.stem / "train.jsonl").read_text().splitlines()
    check(path.stem, json.loads(log[-1])[SECTIONS[path.stem][1]])


@pytest.mark.parametrize("path", [RECIPES / "distillation.py", RECIPES / "dpo.py"], ids=lambda path: path.stem)
def test_loops_reach_what_the_page_says(path, tmp_path):
    ranks = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    run = subprocess.run([*ranks, path], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=200)
    assert run.returncode == 0, run.stderr[-4000:]
    check(path.stem, float(re.search(rf"held out: {SECTIONS[path.stem][1]} ([\d.]+)", run.stdout)[1]))
