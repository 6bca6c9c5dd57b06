"""`shardwise train` ended by force or by a signal, again and again: what it writes in the end is the uninterrupted
run's, loss for loss.
"""

from __future__ import annotations

import itertools
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import yaml

from shardwise.cli import launch
from shardwise.cli.main import main
from shardwise.cli.training import train
from shardwise.errors import RankError
from shardwise.ranks.spawn import spawn
from shardwise.train.step import TrainStep
from tests.cli.forked import ranks_of
from tests.cli.test_resume import lines_of, run, train_rank, with_values  # noqa: F401 - a fixture
from tests.cli.test_train import config_of, tree  # noqa: F401 - a fixture

pytestmark = pytest.mark.spawn

SECONDS = 120.0  # for one run on ranks, beside whatever else the machine does
drill = pytest.mark.skipif("SHARDWISE_DRILL" not in os.environ, reason="minutes long: make drill")


def num_lines(log):
    return log.read_text().count("\n") if log.exists() else 0


def train_until(run, step, number, victims):  # noqa: F811
    """Trains; `number` reaches those ranks when they begin their `step`-th step. Returns the exit code."""
    own, steps = TrainStep.__call__, itertools.count(1)

    def counted(self, batch):
        if next(steps) == step and int(os.environ["RANK"]) in victims:
            os.kill(os.getpid(), number)
        return own(self, batch)

    TrainStep.__call__ = counted
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a suite in the background inherits that it is ignored
    try:
        train(config_of(run))
    except SystemExit as end:
        return end.code
    return 0


def is_clean(directory, tags):
    return {path.name for path in Path(directory).iterdir()} == {*tags, ".lock", "latest"}


@pytest.mark.timeout(500)  # four runs on ranks
def test_a_run_that_ctrl_c_and_a_kill_have_ended_goes_on_loss_for_loss(run, tmp_path):  # noqa: F811
    run["steps"], run["checkpoint"]["every"], run["evaluation"] = 8, 1, {}
    whole, ended = with_values(run, tmp_path / "whole"), with_values(run, tmp_path / "ended")
    spawn(train_rank, 2, whole, timeout=SECONDS)
    first, second = spawn(train_until, 2, ended, 2, signal.SIGINT, (1,), timeout=SECONDS)
    assert first == second == 128 + signal.SIGINT, "both have seen it after the same step, and saved"
    assert 2 <= len(lines_of(ended)) < 6
    with pytest.raises((RankError, RuntimeError)):
        spawn(train_until, 2, ended, 2, signal.SIGKILL, (1,), timeout=SECONDS)
    assert len(lines_of(ended)) < 8
    spawn(train_rank, 2, ended, timeout=SECONDS)
    assert lines_of(ended) == lines_of(whole)
    assert is_clean(ended["checkpoint"]["dir"], {"step-7", "step-8"})


def test_a_run_is_saved_when_minutes_have_passed(run, tmp_path, monkeypatch):  # noqa: F811
    alone = {"layout": "tp1", "sequence_parallel": False, "steps": 4, "export": None}
    clocked = with_values({**run, **alone}, tmp_path / "clocked", export=None)
    clocked["checkpoint"] = {**clocked["checkpoint"], "every": None, "minutes": 10.0, "keep_last": None}
    now = [0.0]

    def advance():
        now[0] += 200.0  # is looked at when the run begins, after each step, and when one is saved
        return now[0]

    monkeypatch.setattr("shardwise.cli.run_checkpoints.time.monotonic", advance)
    train(config_of(clocked))
    assert is_clean(clocked["checkpoint"]["dir"], {"step-3", "step-4"})


def test_ranks_are_started_again_as_often_as_was_asked_for(monkeypatch, capsys, run, tmp_path):  # noqa: F811
    errors = ["error: a", "error: b", None]
    monkeypatch.setattr(launch, "_launch_once", lambda *words, **options: errors.pop(0))
    assert launch.launch(["train"], num_ranks=2, show_traceback=False, max_restarts=5) == 0
    lines = ["error: a", "restarting the ranks (1 of 5)", "error: b", "restarting the ranks (2 of 5)"]
    assert capsys.readouterr().err.splitlines() == lines
    errors = ["error: a", "error: b"]
    assert launch.launch(["train"], num_ranks=2, show_traceback=False, max_restarts=1) == 1
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(with_values(run, tmp_path)))
    assert main(["train", str(path), "--max-restarts", "2", "checkpoint.resume=never"]) != 0
    assert "start again from step 0" in capsys.readouterr().err


def start_command(path, *words):
    command = [sys.executable, "-m", "shardwise", "train", str(path), *words]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


@drill
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("restarts", [0, 10], ids=["started again by hand", "--max-restarts"])
def test_the_command_killed_at_ten_random_steps(run, tmp_path, restarts):  # noqa: F811
    """SIGKILL of a rank, of all, and, where somebody starts it again by hand, of the launcher."""
    run["steps"], run["checkpoint"]["every"] = 300, 3  # ranks look for their launcher once a second, and train on
    whole, ended = with_values(run, tmp_path / "whole"), with_values(run, tmp_path / "ended")
    spawn(train_rank, 2, whole, timeout=600.0)
    path, log, chance = tmp_path / "run.yaml", Path(ended["log"]["dir"]) / "train.jsonl", random.Random(restarts)
    path.write_text(yaml.safe_dump(ended))
    words = ("--max-restarts", str(restarts)) if restarts else ()
    process, num_kills = start_command(path, *words), 0
    for _ in range(10):
        before, wanted = num_lines(log), chance.randint(1, 5)
        while process.poll() is None and num_lines(log) < before + wanted:
            time.sleep(0.002)
        time.sleep(chance.uniform(0.0, 0.05))
        if process.poll() is not None:
            break
        ranks = ranks_of(process)
        victims = chance.choice([[0], [1], [0, 1]] + [["launcher"]] * (not restarts))
        for victim in victims:
            (process if victim == "launcher" else ranks[victim]).kill()
        num_kills += 1
        if restarts:
            psutil.wait_procs(ranks, timeout=60)
            continue
        assert process.wait(timeout=60) != 0
        process.stdout.close()
        process = start_command(path, *words)
    out, _ = process.communicate(timeout=300)
    assert process.returncode == 0, out
    assert num_kills == 10
    assert lines_of(ended) == lines_of(whole)
    assert is_clean(ended["checkpoint"]["dir"], {"step-297", "step-300"})


@drill
@pytest.mark.timeout(300)
def test_ctrl_c_reaches_the_launcher_and_every_rank(run, tmp_path):  # noqa: F811
    """As a terminal does it: the whole foreground group is told; ranks are in sessions of their own."""
    ended = with_values({**run, "steps": 1000}, tmp_path / "ended")
    path, log = tmp_path / "run.yaml", Path(ended["log"]["dir"]) / "train.jsonl"
    path.write_text(yaml.safe_dump(ended))
    process = start_command(path)
    while num_lines(log) < 3:
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=100)
    assert process.returncode == 128 + signal.SIGINT, out
    assert "continues from there" in out
    tags = [path.name for path in Path(ended["checkpoint"]["dir"]).iterdir() if path.name.startswith("step-")]
    assert f"step-{len(lines_of(ended))}" in tags
