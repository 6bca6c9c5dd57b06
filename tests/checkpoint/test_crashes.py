"""Killed at any moment, a save leaves the last good checkpoint, or the new one, and nothing that stays."""

from __future__ import annotations

import itertools
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
from peft import LoraConfig, get_peft_model

import shardwise
from shardwise.errors import LoadError, RankError
from shardwise.ranks.spawn import spawn
from shardwise.weights import staging
from tests.checkpoint.training import Training, differing
from tests.families import tiny_model

NUM_KILLS = 200 if "SHARDWISE_DRILL" in os.environ else 3
MOST_KILLS = 50  # of one test
WRITING = {"os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.truncate", "os.chmod", "os.link"}
ALLOWED = {".lock", "latest"}


class KilledError(BaseException):
    """What stands for SIGKILL: nothing more reaches the disk after it."""


class Reaper:
    """Ends a save at the disk operation of that number; those that come after it fail, too."""

    def __init__(self) -> None:
        self.left: int | None = None
        sys.addaudithook(self._hook)

    def _hook(self, event: str, args: tuple) -> None:
        if self.left is None:
            return
        is_writing = event in WRITING or (event == "open" and isinstance(args[2], int) and args[2] & os.O_CREAT)
        if is_writing:
            self.left -= 1
            if self.left < 0:
                raise KilledError

    def survives(self, moment: int, work) -> bool:
        """Whether `work` ends before the operation `moment`."""
        self.left = moment
        try:
            work()
        except KilledError:
            return False
        finally:
            self.left = None
        return True


@pytest.fixture(scope="module")
def reaper():
    return Reaper()


def is_clean(root: Path, tags: set[str]) -> bool:
    return {path.name for path in root.iterdir()} == {*tags, *ALLOWED}


@pytest.mark.single
@pytest.mark.parametrize("replaced", [False, True], ids=["new tag, old ones deleted", "tag replaced"])
def test_a_save_killed_at_any_operation(tmp_path, reaper, replaced):
    """Every operation on the disk in turn."""
    training = Training(shardwise.Mesh.open("tp1"), "llama")
    steps = []
    for step in (1, 2):
        training.steps(1)
        training.save(tmp_path / "start", extra={"step": step})
        steps.append(training.whole())
    training.steps(1)
    steps.append(training.whole())
    newest = "step-2" if replaced else "step-3"
    for moment in itertools.count():
        training.load(shutil.copytree(tmp_path / "start", root := tmp_path / f"{moment}"))
        training.load(root, "step-2")
        training.steps(1)

        def save(root=root):
            training.save(root, tag=newest, extra={"step": 3}, keep_last=2)

        survived = reaper.survives(moment, save)
        found = training.load(root)["step"]
        assert not differing(training.whole(), steps[found - 1])
        assert found == 3 if survived else found in (2, 3)
        training.save(root, extra={"step": 4}, keep_last=1)
        assert is_clean(root, {"step-4"}), f"killed at operation {moment}"
        shutil.rmtree(root)
        if survived:
            assert moment > 12, "otherwise nothing was tried"
            return


def save_until_killed(root, seed, async_save):
    """Saves step after step; both ranks, or one, end at a random moment."""
    with shardwise.Mesh.open("ddp2") as mesh:
        training = Training(mesh, "llama")
        if any(root.glob("step-*")):
            training.load(root)
        chance = random.Random(seed)
        moment, victims = chance.uniform(0.0, 0.4), chance.choice([(0,), (1,), (0, 1)])
        first = int(training.load(root)["step"]) if any(root.glob("step-*")) else 0

        def kill():
            time.sleep(moment)
            os.kill(os.getpid(), signal.SIGKILL)

        for step in range(first + 1, first + 1000):
            training.steps(1)
            training.save(root, extra={"step": step}, keep_last=2, async_save=async_save)
            if step == first + 2 and mesh.rank in victims:
                threading.Thread(target=kill, daemon=True).start()


@pytest.mark.spawn
@pytest.mark.timeout(60 + 20 * MOST_KILLS)
@pytest.mark.parametrize("first", range(0, NUM_KILLS, MOST_KILLS))
@pytest.mark.parametrize("async_save", [False, True])
def test_jobs_killed_at_random_moments(tmp_path, async_save, first):
    alike, last = Training(shardwise.Mesh.open("tp1"), "llama"), 0
    for seed in range(first, min(first + MOST_KILLS, NUM_KILLS)):
        with pytest.raises((RankError, LoadError, RuntimeError)):
            spawn(save_until_killed, 2, tmp_path, seed, async_save, timeout=60.0)
        step = shardwise.load_checkpoint(tmp_path)["step"]
        assert step >= last + (1 if async_save else 2), "at most the save under way is lost"
        training = Training(shardwise.Mesh.open("tp1"), "llama", lost=True)
        training.load(tmp_path)
        alike.steps(step - last)
        found, expected = training.whole(), alike.whole()
        worst = max(float((found[name] - value).abs().max()) for name, value in expected.items() if name.endswith("t"))
        assert worst < 1e-4
        last = step
    training.save(tmp_path, extra={"step": 10**6}, keep_last=1)
    assert is_clean(tmp_path, {"step-1000000"})


def save_where_it_fails(root, small, frozen):
    """Rank 1's disk is full, a rank does not see the directory, the place cannot be made, the file system is full, and
    it is read-only.
    """
    with shardwise.Mesh.open("tp2") as mesh:
        training = Training(mesh, "llama")
        training.steps(1)
        training.save(root, extra={"step": 1})
        before, found = training.whole(), []

        def fails(where=root, **options):
            try:
                training.save(where, extra={"step": 2}, **options).wait()
            except LoadError as error:
                found.append(str(error))

        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        for options in ({}, {"async_save": True}):
            if mesh.rank == 1:
                resource.setrlimit(resource.RLIMIT_FSIZE, (5_000, hard))
            fails(**options)
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        is_dir = Path.is_dir
        if mesh.rank == 1:
            Path.is_dir = lambda path, **options: not path.name.endswith(".partial") and is_dir(path, **options)
        fails()
        Path.is_dir = is_dir
        fails(root / "latest" / "below")
        fails(small)
        fails(frozen)
        training.steps(1)
        training.load(root)
        return found, not differing(training.whole(), before)


@pytest.mark.spawn
def test_a_rank_that_cannot_write_is_one_error_on_all_and_takes_nothing(tmp_path):
    places = {"small": "size=100k", "frozen": "ro"}
    for name, options in places.items():
        (tmp_path / name).mkdir()
        mount = ["mount", "-t", "tmpfs", "-o", options, "none", str(tmp_path / name)]
        is_mounted = subprocess.run(mount, check=False, capture_output=True).returncode == 0  # by root alone
    small, frozen = (tmp_path / name if is_mounted else tmp_path / "root" / "latest" for name in places)
    try:
        (first, same), (second, also_same) = spawn(save_where_it_fails, 2, tmp_path / "root", small, frozen)
        left = [path.name for path in small.iterdir()] if is_mounted else [".lock"]
    finally:
        for name in places if is_mounted else ():
            subprocess.run(["umount", str(tmp_path / name)], check=True)
    assert first == second
    says = (*["cannot be written"] * 2, "rank 1 does not see", *["cannot be written"] * 3)
    assert len(first) == len(says)
    assert all(words in error for words, error in zip(says, first, strict=True)), first
    assert not is_mounted or ("No space left" in first[-2] and "Read-only file system" in first[-1])
    assert same
    assert also_same
    assert left == [".lock"]
    assert is_clean(tmp_path / "root", {"step-1"})


@contextmanager
def full_disk(num_bytes):
    """A limit on the size of files stands for a disk that takes no more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    former = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, former)


@pytest.mark.single
def test_a_full_disk_is_an_error_and_takes_nothing(tmp_path):
    training = Training(shardwise.Mesh.open("tp1"), "llama")
    training.steps(1)
    training.save(tmp_path, extra={"step": 1})
    before = training.whole()
    with full_disk(50_000):
        with pytest.raises(LoadError, match="the checkpoint cannot be written"):
            training.save(tmp_path, extra={"step": 2})
        with pytest.raises(LoadError, match="the checkpoint cannot be written"):
            training.save(tmp_path, extra={"step": 1})
    assert is_clean(tmp_path, {"step-1"})
    assert training.load(tmp_path) == {"step": 1}
    assert not differing(training.whole(), before)


@pytest.mark.single
def test_a_save_whose_pointer_cannot_be_written_is_one(tmp_path, monkeypatch, caplog):
    """The checkpoint is complete, and older ones make room: `latest` decides nothing."""
    training = Training(shardwise.Mesh.open("tp1"), "llama")
    training.save(tmp_path, extra={"step": 1})

    own = Path.write_text

    def refuse(path, *args, **options):
        if path.name.startswith(".latest"):
            raise OSError(28, "No space left on device", str(path))
        return own(path, *args, **options)

    monkeypatch.setattr(Path, "write_text", refuse)
    training.save(tmp_path, extra={"step": 2}, keep_last=1)
    assert "step-2 is complete, and latest could not be written" in caplog.text
    assert is_clean(tmp_path, {"step-2"})
    assert training.load(tmp_path) == {"step": 2}


@pytest.mark.single
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
def test_an_adapter_is_written_anew_whole_and_flushed_or_not_at_all(tmp_path, monkeypatch):
    flushed = []
    monkeypatch.setattr(staging, "flush_path", lambda path: flushed.append(path.name))
    model = get_peft_model(tiny_model("llama"), LoraConfig(r=4, target_modules=["q_proj"]))
    shardwise.parallelize(model, shardwise.Mesh.open("tp1"))
    shardwise.export_pretrained(model, tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    for name in before:
        assert any(each.startswith(f".{name}") for each in flushed)
    for parameter in model.parameters():
        parameter.data.add_(1)
    with full_disk(1_000), pytest.raises(LoadError, match="cannot write to"):
        shardwise.export_pretrained(model, tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
