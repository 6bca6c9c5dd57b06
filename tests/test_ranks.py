"""Cases that share ranks answer for themselves, and only those that were selected run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.spawn

CASES = """
import os
import pytest

def run(mesh, case, directory):
    (directory / f"{case} {mesh.rank} {os.getpid()}").touch()
    if case == "raises" and mesh.rank == 1:
        raise ValueError("rank 1 alone")
    if case == "ends" and mesh.rank == 0:
        os._exit(3)
    return case

@pytest.mark.spawn
@pytest.mark.parametrize("case", ["first", "raises", "second", "ends", "wrong", "third"])
@pytest.mark.parametrize("layout", ["tp1", "tp2"])
def test_case(on_ranks, layout, case, tmp_path_factory):
    (directory := tmp_path_factory.getbasetemp().parent / "runs").mkdir(exist_ok=True)
    assert on_ranks(run, directory=directory) == [case] * int(layout[2:])
    assert case != "wrong"
"""


def run_tests(directory, *options, cases=CASES):
    """The outcomes of CASES by id, and which processes ran which of them."""
    root = Path(__file__).parents[1]
    (directory / "conftest.py").write_text("from tests.conftest import *\n")
    (directory / "test_cases.py").write_text(cases)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(root / "src"), str(root), str(directory)])}
    command = [sys.executable, "-m", "pytest", "-q", "-c", str(root / "pyproject.toml"), "--rootdir", str(directory)]
    command += ["--confcutdir", str(directory), "-p", "no:cacheprovider", "--basetemp", str(directory / "base"), "-rA"]
    run = subprocess.run(
        [*command, *options, str(directory)], cwd=directory, env=env, capture_output=True, text=True, check=False
    )
    lines = [line.split() for line in run.stdout.splitlines() if "::test_case[" in line]
    found = {words[1].split("[")[1].rstrip("]"): words[0] for words in lines if words[0] in ("PASSED", "FAILED")}
    assert found, run.stdout + run.stderr
    return found, [path.name.split() for path in (directory / "runs").iterdir()]


def test_one_failure_hides_no_other_case(tmp_path):
    outcomes, _ = run_tests(tmp_path)
    failed = {case for case, outcome in outcomes.items() if outcome == "FAILED"}
    assert failed == {"tp1-ends", "tp1-wrong", "tp2-raises", "tp2-ends", "tp2-wrong"}
    assert len(outcomes) == 12


def test_only_selected_cases_run_and_those_of_a_layout_share_their_ranks(tmp_path):
    outcomes, runs = run_tests(tmp_path, "-k", "tp2 and (first or second or third)")
    assert outcomes == dict.fromkeys(("tp2-first", "tp2-second", "tp2-third"), "PASSED")
    assert {case for case, _, _ in runs} == {"first", "second", "third"}
    assert len({pid for _, _, pid in runs}) == 2
