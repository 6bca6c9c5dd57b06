"""Runs that somebody or something ends: no rank stays behind, and the message names who was first."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import yaml

from tests.cli.forked import ranks_of, run_forked  # noqa: F401 - a fixture
from tests.cli.test_train import STARTED, losses_of, nothing_runs_on, start, tree  # noqa: F401 - fixtures

pytestmark = pytest.mark.spawn

TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", "1", "--monitor-interval", "0.2")


@pytest.fixture
def path(tree, tmp_path):  # noqa: F811
    """A run that goes on until somebody ends it."""
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(tree | {"steps": 100_000, "layout": "tp2"}))
    return path


def start_under_torchrun(path, *overrides):
    command = [sys.executable, *TORCHRUN, "-m", "shardwise", "train", str(path), *overrides]
    run = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    STARTED.append(run)
    return run


def log_of(tree):  # noqa: F811
    return Path(tree["log"]["dir"]) / "train.jsonl"


def await_step(run, number=r"\d+", *, find_ranks=ranks_of):
    """Reads on until the run has taken a step, or that one; returns its ranks."""
    while not re.match(rf"step +{number}/", line := run.stdout.readline()):
        assert run.poll() is None and line, run.stderr.read()
    return find_ranks(run)


def ranks_of_torchrun(run):
    """The processes of its ranks, in order."""
    ranks = [each for each in psutil.Process(run.pid).children() if "RANK" in each.environ()]
    return sorted(ranks, key=lambda each: int(each.environ()["RANK"]))


def check_ended(ranks):
    gone, alive = psutil.wait_procs(ranks, timeout=20)
    for each in alive:
        each.kill()
    assert len(gone) == 2, "ranks train on"


def test_ranks_end_with_a_launcher_that_was_killed(path):
    run = start(path)
    ranks = await_step(run)
    run.kill()
    check_ended(ranks)


def test_a_run_ends_in_order_when_its_whole_process_group_is_told_to(path, tree, tmp_path):  # noqa: F811
    """As a terminal that is closed and schedulers do: the process that ranks are forked from is told, too."""
    path.write_text(
        yaml.safe_dump({**yaml.safe_load(path.read_text()), "checkpoint": {"dir": str(tmp_path / "saved")}})
    )
    run = start(path, in_own_group=True)
    await_step(run)
    os.killpg(run.pid, signal.SIGHUP)
    out, err = run.communicate(timeout=60)
    assert run.returncode == 128 + signal.SIGHUP, err
    assert re.search(r"saved after step \d+", out) and list((tmp_path / "saved").glob("step-*"))


@pytest.mark.skipif("SHARDWISE_DRILL" not in os.environ, reason="make drill")
def test_a_run_under_torchrun_starts_again_when_a_rank_was_killed_and_ends_with_its_launcher(path, tree):  # noqa: F811
    run = start_under_torchrun(path)
    first = await_step(run, 1, find_ranks=ranks_of_torchrun)
    first[1].kill()
    ranks = await_step(run, 1, find_ranks=ranks_of_torchrun)
    assert {each.pid for each in first}.isdisjoint(each.pid for each in ranks)
    assert losses_of(tree), "every line is whole JSON"
    run.kill()
    check_ended(ranks)


def test_an_error_of_ours_in_a_script_under_torchrun_is_in_its_summary_alone(tmp_path):
    (tmp_path / "script.py").write_text('import shardwise\nshardwise.Mesh.open("tp3")\n')
    command = [sys.executable, *TORCHRUN, "--max-restarts", "0", str(tmp_path / "script.py")]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env={**os.environ, "TORCH_CPP_LOG_LEVEL": "ERROR"}
    )
    assert done.returncode and done.stderr.count("Traceback (most recent call last)") == 1, "torchrun's own"
    assert "error: the layout tp3 needs 3 ranks, but 2 are running" in done.stderr.partition("Root Cause")[2]


def test_the_rank_that_was_told_to_end_is_named(path, tree, run_forked, capfd):  # noqa: F811
    def tell(ranks):
        ranks[1].terminate()
        time.sleep(0.1)
        if ranks[1].is_running():
            ranks[1].terminate()

    assert run_forked(path, log=log_of(tree), at_first_step=tell) == 1
    err = capfd.readouterr().err
    assert err.startswith("error: rank 1 was ended by SIGTERM") and "Traceback" not in err


def test_a_rank_that_is_stopped_is_named_when_the_time_is_up(path, tree, run_forked, capfd):  # noqa: F811
    stopped = []

    def stop(ranks):
        ranks[1].suspend()
        stopped.extend(ranks)

    assert run_forked(path, "timeout_seconds=3", log=log_of(tree), at_first_step=stop) == 1
    err = capfd.readouterr().err  # it is woken to end
    assert re.search(r"error: rank 1 did not come to \w+ of step \d+\n", err) and "Traceback" not in err, err
    assert len(stopped) == 2 and not any(each.is_running() for each in stopped)


def test_a_rank_that_is_killed_is_named(path, tree, run_forked, capfd):  # noqa: F811
    assert run_forked(path, log=log_of(tree), at_first_step=lambda ranks: ranks[1].kill()) == 1
    err = capfd.readouterr().err
    assert err.startswith("error: rank 1 was ended by SIGKILL") and "out of memory" in err and "Traceback" not in err
