"""A collective that a rank never joins: who it is, in which step and where, and not only that time is up."""

from __future__ import annotations

import logging
import os
import signal
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

import shardwise
import shardwise.checkpoint.background
import shardwise.job.processes
from shardwise.checkpoint.writer import SaveJob
from shardwise.comm.agree import run_on_local_rank_0
from shardwise.errors import RankError
from shardwise.job import processes
from shardwise.job.processes import Beat, diagnose
from shardwise.ranks.spawn import spawn
from tests.families import FULL_PRODUCT, rows_of, tiny_batch, tiny_model
from tests.job.test_rendezvous import Kept

pytestmark = pytest.mark.spawn

SECONDS = 4.0
LATE = 50.0  # on a busy machine; otherwise one waits for minutes, or for ever


def take_steps(mesh, stop, rank):
    """Steps of which `rank` calls `stop` before the third."""
    model = shardwise.parallelize(tiny_model("llama", num_hidden_layers=1), mesh)
    batch = rows_of(tiny_batch(model), mesh)
    step = shardwise.TrainStep(model, mesh)
    for number in range(1, 9):
        if number == 3 and mesh.rank == rank:
            stop()
        step(batch)


def outcome_of_steps(layout, stop, rank=1):
    """How a run in which one rank does not come to step 3 ends on this one, what was said, and when."""
    processes.BEAT_SECONDS, processes.ANSWER_SECONDS = 0.2, 1.0
    kept = Kept()
    logging.getLogger("shardwise.job").addHandler(kept)
    start = time.monotonic()
    try:
        with shardwise.Mesh.open(layout, timeout_seconds=SECONDS) as mesh:
            take_steps(mesh, stop, rank)
    except (RankError, ValueError, SystemExit) as error:
        return type(error).__name__, str(error), kept.texts, time.monotonic() - start
    return "no error", "", kept.texts, time.monotonic() - start


def be_stopped(seconds=SECONDS + 2):
    time.sleep(0.5)  # so that it has said where it is
    pid = os.getpid()
    if os.fork() == 0:  # somebody has to wake it up again
        time.sleep(seconds)
        os.kill(pid, signal.SIGCONT)
        os._exit(0)
    os.kill(pid, signal.SIGSTOP)


def be_stopped_for_long():
    be_stopped(SECONDS + 4)


def read_data_slowly():
    time.sleep(SECONDS + 2)


def find_a_fault():
    raise ValueError("row 7 has no target")


def be_told_to_end():
    raise SystemExit(128 + signal.SIGTERM)  # as the command line answers it


def check_missing(outcome, *parts):
    kind, text, _, seconds = outcome
    assert kind == "RankError", text
    assert all(part in text for part in ("rank 1 did not come to", "of step 3", "test_heartbeat.py", *parts)), text
    assert seconds < LATE


def test_a_rank_that_is_stopped_is_named_in_a_warning_and_then_in_the_error():
    first, _ = spawn(outcome_of_steps, 2, "tp2", be_stopped)
    check_missing(first, "rank 1 was last in step 2", "no longer sends heartbeats")
    assert any("has taken" in text and "rank 1 was last in" in text for text in first[2])


def test_the_rank_that_keeps_the_store_may_be_the_one_that_is_stopped():
    _, (kind, text, _, seconds) = spawn(outcome_of_steps, 2, "tp2", be_stopped_for_long, 0)
    assert kind == "RankError" and "rank 0 or its launcher did not come to" in text
    assert "no longer answers" in text and seconds < LATE


def test_a_rank_that_is_elsewhere_is_named_with_the_place():
    first, _ = spawn(outcome_of_steps, 2, "fsdp2", read_data_slowly)
    check_missing(first, "rank 1 is in step 2", "in read_data_slowly", "raise timeout_seconds")
    assert any("has taken" in text and "in read_data_slowly" in text for text in first[2])


@pytest.mark.parametrize(
    ("stop", "own", "quoted"),
    [
        (find_a_fault, ("ValueError", "row 7 has no target"), "ValueError: row 7 has no target"),
        (be_told_to_end, ("SystemExit", "143"), "it was ended by SIGTERM"),
    ],
)
def test_a_rank_that_fails_is_quoted(stop, own, quoted):
    first, second = spawn(outcome_of_steps, 2, "tp2", stop)
    assert second[:2] == own
    assert first[0] == "RankError" and "rank 1 failed in step 2" in first[1]
    assert quoted in first[1] and "step 3" in first[1]


def leave_early(layout):
    processes.BEAT_SECONDS = 0.2
    try:
        with shardwise.Mesh.open(layout, timeout_seconds=SECONDS) as mesh:
            model = shardwise.parallelize(tiny_model("llama", num_hidden_layers=1), mesh)
            step = shardwise.TrainStep(model, mesh)
            for _ in range(3 - mesh.rank):
                step(rows_of(tiny_batch(model), mesh))
    except RankError as error:
        return str(error)
    shardwise.job.processes.end_processes()  # as at the end of its script
    return "no error"


def test_a_rank_whose_data_ends_early_is_named():
    first, second = spawn(leave_early, 2, "fsdp2")
    assert second == "no error"
    assert "rank 1 left after step 2, and did not come to" in first and "of step 3" in first
    assert "data may have ended" in first


def call_otherwise(first=0.0):
    """Rank 1 clips once more than rank 0, which goes on to the next forward and gives up `first` seconds before it."""
    rank = int(os.environ["RANK"])
    processes.BEAT_SECONDS = 0.5 if first and rank == 0 else 0.2  # then rank 0 also takes longer to end
    kept = Kept()
    logging.getLogger("shardwise.job").addHandler(kept)
    try:
        with shardwise.Mesh.open("tp2", timeout_seconds=SECONDS - first * (rank == 0)) as mesh:
            model = shardwise.parallelize(tiny_model("llama", num_hidden_layers=1), mesh)
            batch = tiny_batch(model)
            model(**batch).loss.backward()
            for _ in range(1 + mesh.rank):
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            model(**batch)
    except RankError as error:
        return str(error), kept.texts
    return "no error", kept.texts


@pytest.mark.parametrize("first", [0.0, 2.0])
def test_ranks_in_different_collectives_are_told_apart(first):
    for text, warned in spawn(call_otherwise, 2, first, timeout=LATE):
        assert "rank" in text and "no error" not in text
        assert all(f"rank {rank} is in " in "".join(warned) + text for rank in (0, 1)), (text, warned)


def save_slowly(directory):
    """Every rank is inside of torch.distributed for much longer than a beat, and computes nothing."""
    processes.BEAT_SECONDS = 0.2
    os.fsync = eval("lambda *_: sleep(4.0)", {"__name__": "os", "sleep": time.sleep})  # in stacks a frame of os
    with shardwise.Mesh.open("fsdp2") as mesh:
        dcp.save({"x": torch.ones(2)}, storage_writer=dcp.FileSystemWriter(directory))
        return mesh.rank


def test_ranks_that_all_wait_for_a_slow_disk_are_left_alone(tmp_path):
    assert spawn(save_slowly, 2, str(tmp_path / "saved")) == [0, 1]


def wait_patiently(directory):
    """A rank works for much longer than the timeout: in the second mesh of a process, and behind the last one."""
    processes.BEAT_SECONDS = 0.1
    rank = int(os.environ["RANK"])
    with shardwise.Mesh.open("tp2", timeout_seconds=1.0):
        pass
    with shardwise.Mesh.open("fsdp2", timeout_seconds=1.0) as mesh:
        run_on_local_rank_0(lambda: time.sleep(3.0), local_rank=rank)
        model = shardwise.parallelize(tiny_model("llama", num_hidden_layers=1), mesh)
        if rank:
            os.fsync = lambda *_: time.sleep(1.5)
        saved = shardwise.save_checkpoint(directory, model=model, async_save=True, step=1)
    saved.wait()
    return [path.name for path in Path(directory).iterdir()]


def test_a_rank_that_works_for_long_is_waited_for_without_a_mesh(tmp_path):
    assert all("step-1" in found for found in spawn(wait_patiently, 2, str(tmp_path)))


HERE = Beat(step=3, collective="all_reduce", where="run.py:7 in train", heard_at=100.0)


@pytest.mark.parametrize(
    ("beats", "is_late", "parts"),
    [
        ([HERE, HERE], False, None),
        ([HERE, Beat(step=2, where="data.py:1 in read", heard_at=100.0)], False, ["rank 1 did not come to all_reduce"]),
        ([HERE, replace(HERE, heard_at=90.0)], False, ["rank 1 was last in step 3", "no longer sends heartbeats"]),
        ([HERE, replace(HERE, ended="left", step=2)], False, ["rank 1 left after step 2", "as many batches"]),
        (
            [HERE, replace(HERE, ended="failed", order=2, text="b"), replace(HERE, ended="failed", order=1, text="a")],
            False,
            ["rank 2 failed in step 3", "why: a"],
        ),
        ([HERE, replace(HERE, collective="broadcast")], True, ["every rank is in a collective", "rank 1 is in step 3"]),
    ],
)
def test_diagnosis(beats, is_late, parts):
    error = diagnose(beats, 101.0, rank=0, quiet_seconds=6.0, is_late=is_late)
    assert error is None if parts is None else all(part in str(error) for part in parts), error


@pytest.mark.parametrize(
    ("code", "words"), [(143, "it was ended by SIGTERM"), (255, "SystemExit: 255"), (1, "SystemExit: 1")]
)
def test_an_exit_code_is_a_signal_only_where_there_is_such_a_signal(code, words):
    assert processes._in_words(SystemExit(code)) == words


def save(mesh, directory, *, background):
    """Rank 1 stops when it writes its part."""
    write = SaveJob._write
    SaveJob._write = lambda job, place: (job.mesh.rank and be_stopped(3 * SECONDS), write(job, place))
    model = shardwise.parallelize(tiny_model("llama", num_hidden_layers=1), mesh)
    shardwise.save_checkpoint(directory, model=model, async_save=background)
    shardwise.checkpoint.background.join_saves(mesh)


def save_in_the_background(mesh, directory):
    save(mesh, directory, background=True)


def save_at_once(mesh, directory):
    save(mesh, directory, background=False)


def wait_for_a_machine(mesh, directory):
    run_on_local_rank_0(lambda: be_stopped(3 * SECONDS), local_rank=1 - mesh.rank)


def outcome_of_long_work(work, directory):
    processes.BEAT_SECONDS, processes.ANSWER_SECONDS = 0.2, 1.0
    try:
        with shardwise.Mesh.open("fsdp2", timeout_seconds=SECONDS) as mesh:
            work(mesh, directory)
    except RankError as error:
        return str(error), time.monotonic()
    return "no error", time.monotonic()


@pytest.mark.parametrize("work", [save_in_the_background, wait_for_a_machine, *[save_at_once] * FULL_PRODUCT])
def test_a_rank_that_stops_in_work_that_may_take_long_is_not_waited_for_until_it_goes_on(work, tmp_path):
    (error, first), (_, second) = spawn(outcome_of_long_work, 2, work, tmp_path / "saved")
    assert "rank 1 did not come to" in error and "no longer sends heartbeats" in error and first < second, error


def work_for_long():
    """Rank 0 works for longer than the timeout, and sends heartbeats."""
    processes.BEAT_SECONDS = 0.2
    with shardwise.Mesh.open("fsdp2", timeout_seconds=1.0) as mesh:
        run_on_local_rank_0(lambda: time.sleep(SECONDS), local_rank=mesh.rank)
        return mesh.rank


def test_long_work_of_a_rank_is_waited_for():
    assert spawn(work_for_long, 2) == [0, 1]


def wait_for_the_store():
    """Rank 0, which keeps the store, stops as soon as the other waits for it."""
    processes.BEAT_SECONDS, processes.ANSWER_SECONDS = 0.2, 1.0
    start = time.monotonic()
    with suppress(RankError, RuntimeError), shardwise.Mesh.open("fsdp2", timeout_seconds=SECONDS) as mesh:
        run_on_local_rank_0(lambda: be_stopped(4 * SECONDS), local_rank=mesh.rank)
    return time.monotonic() - start


def test_the_rank_that_keeps_the_store_is_not_waited_for_until_it_goes_on():
    assert spawn(wait_for_the_store, 2)[1] < 3.5 * SECONDS
