"""Saves in the background: of the step that was asked for, one at a time, and never failing without a word."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import threading
from pathlib import Path

import psutil
import pytest

import shardwise
from shardwise.checkpoint.writer import SaveJob
from shardwise.errors import LoadError
from shardwise.ranks.rank import warm
from shardwise.ranks.spawn import spawn
from tests.checkpoint.training import Training, differing

pytestmark = pytest.mark.spawn

NUM_SAVES = 200 if "SHARDWISE_DRILL" in os.environ else 30


@pytest.fixture
def held_back(monkeypatch):
    """Saves wait before they write until the event is set."""
    go = threading.Event()
    run = SaveJob.run

    def wait(job, *arguments):
        assert go.wait(60)
        return run(job, *arguments)

    monkeypatch.setattr(SaveJob, "run", wait)
    return go


def test_the_step_that_was_asked_for_is_saved(tmp_path, held_back):
    training = Training(shardwise.Mesh.open("tp1"), "llama")
    training.steps(2)
    extra = {"step": 2, "list": [1]}
    expected = training.whole()
    pending = training.save(tmp_path, extra=extra, async_save=True)
    training.steps(2)
    extra["list"].append(2)
    held_back.set()
    assert pending.wait() == "step-2"
    assert training.load(tmp_path) == {"step": 2, "list": [1]}
    assert not differing(training.whole(), expected)


def test_a_load_and_the_next_save_wait_for_the_one_before(tmp_path, held_back):
    training = Training(shardwise.Mesh.open("tp1"), "llama")
    training.save(tmp_path, tag="a", async_save=True)
    threading.Timer(0.2, held_back.set).start()
    training.save(tmp_path, tag="b", async_save=True)
    training.load(tmp_path, "b")
    assert (tmp_path / "a" / "manifest.json").exists()


def test_an_error_is_raised_by_the_next_call_once(tmp_path):
    training = Training(shardwise.Mesh.open("tp1"), "llama")
    (tmp_path / "file").write_text("")
    pending = training.save(tmp_path / "file", async_save=True)
    with pytest.raises(LoadError, match="the checkpoint cannot be written"):
        training.save(tmp_path / "good")
    assert not (tmp_path / "good").exists()
    training.save(tmp_path / "good", tag="a")
    with pytest.raises(LoadError):
        pending.wait()


def test_copies_that_cannot_be_made_are_an_error_and_leave_nothing(tmp_path, monkeypatch):
    training = Training(shardwise.Mesh.open("tp1"), "llama")

    def fails(*_, **__):
        raise RuntimeError("cannot allocate memory")

    with monkeypatch.context() as patch:
        patch.setattr(SaveJob, "take_copies", fails)
        with pytest.raises(RuntimeError, match="cannot allocate memory"):
            training.save(tmp_path, tag="a", async_save=True)
    assert not any(tmp_path.iterdir())
    assert training.save(tmp_path, tag="a", async_save=True).wait() == "a"


def save_and_exit(place, said):
    """In a process of its own, which finds everything imported."""
    os.dup2(os.open(said, os.O_WRONLY | os.O_CREAT), 2)
    training = Training(shardwise.Mesh.open("tp1"), "llama")
    training.save(place, tag="a", async_save=True)
    ctypes.pythonapi.Py_Exit(0)  # as the end of a script; a process of multiprocessing's would not wait for anything


def test_a_process_that_exits_finishes_its_save_or_fails(tmp_path):
    (tmp_path / "file").write_text("")
    warm()
    codes, said = [], {}
    for name in ("good", "file"):
        arguments = tmp_path / name, tmp_path / f"said {name}"
        process = multiprocessing.get_context("forkserver").Process(target=save_and_exit, args=arguments)
        process.start()
        process.join(100)
        codes.append(process.exitcode)
        said[name] = arguments[1].read_text()
    assert codes == [0, 1], said
    assert (tmp_path / "good" / "a" / "manifest.json").exists()
    assert said["file"].count("error: the last checkpoint was not saved: the checkpoint cannot be written") == 1


def save_each_step(root, number):
    with shardwise.Mesh.open("fsdp2") as mesh:
        training = Training(mesh, "llama")
        grown = []
        for step in range(number):
            training.steps(1)
            training.save(root, extra={"step": step}, async_save=True, keep_last=1)
            grown.append(psutil.Process().memory_info().rss)
        training.load(root)
        return grown[-1] - grown[number // 3], training.steps(1)


@pytest.mark.timeout(650)
def test_a_save_each_step_neither_hangs_nor_grows(tmp_path):
    (growth, losses), (_, same) = spawn(save_each_step, 2, tmp_path, NUM_SAVES, timeout=600.0)
    assert losses == same
    assert growth < 2**25
    assert [path.name for path in Path(tmp_path).iterdir() if "step" in path.name] == [f"step-{NUM_SAVES - 1}"]


def wait_on_one_rank(root):
    """What the next save says where rank 0 alone has waited for one that failed."""
    with shardwise.Mesh.open("tp2", timeout_seconds=20) as mesh:
        training = Training(mesh, "llama")
        pending = training.save(root / "file", async_save=True)
        if mesh.rank == 0:
            with pytest.raises(LoadError):
                pending.wait()
        with pytest.raises(LoadError) as raised:
            training.save(root / "good", tag="a")
        training.save(root / "good", tag="a")
        return raised.value.summary


def test_an_error_that_one_rank_has_waited_for_is_raised_on_all(tmp_path):
    (tmp_path / "file").write_text("")
    first, second = spawn(wait_on_one_rank, 2, tmp_path)
    assert first == second == "the checkpoint cannot be written"
