"""The measurements in bench/ still run; what they measure at this size means nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.spawn

ROOT = Path(__file__).resolve().parents[2]


def run(script, tmp_path, *options):
    file = tmp_path / "record.json"
    command = [sys.executable, str(ROOT / "bench" / script), "--quick", *options, "--json", str(file)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(file.read_text())


def test_steps_are_compared_and_counted(tmp_path):
    (record,) = run("tp.py", tmp_path, "--rounds", "2", "--device", "cpu")["records"]
    minimum = 4 * record["size"]["layers"] + 2
    assert record["minimum"]["calls"] == minimum
    contenders = record["contenders"]
    assert contenders["shardwise"]["calls"] == minimum + 2, "the loss takes two small ones"
    assert contenders["transformers"]["calls"] > minimum + 2
    assert contenders["one process"]["calls"] == 0
    assert contenders["shardwise"]["to_transformers"]["median"] > 0


def test_data_parallel_steps_are_compared_and_counted(tmp_path):
    (record,) = run("fsdp.py", tmp_path, "--rounds", "2", "--layouts", "fsdp2")["records"]
    ours, by_hand = record["contenders"]["shardwise"], record["contenders"]["FSDP2 by hand"]
    assert ours["calls"] == {**by_hand["calls"], "all_reduce": 2}
    assert ours["held_bytes"] == pytest.approx(ours["expected_bytes"], rel=0.05)
    assert ours["busy_to_by_hand"]["median"] > 0


def test_loads_are_compared(tmp_path):
    ours = run("load.py", tmp_path, "--rounds", "2")["contenders"]["shardwise"]
    assert ours["requested_to_owned"] == pytest.approx(1.0, abs=0.05)
    assert ours["time_to_transformers"]["median"] > 0
