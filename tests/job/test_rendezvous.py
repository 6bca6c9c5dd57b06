"""Ranks that cannot meet say so: impossible numbers at once, and who is missing long before the time is up."""

from __future__ import annotations

import logging
import os
import re
import socket
import time

import pytest
import torch.distributed as dist

import shardwise
from shardwise.errors import MeshError
from shardwise.job import rendezvous
from shardwise.ranks.spawn import spawn

pytestmark = pytest.mark.spawn

SECONDS = 3.0
LATE = 40.0  # on a busy machine; otherwise one waits for minutes, or for ever


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"RANK": "5"}, ["RANK is '5'", "WORLD_SIZE is '2'"]),
        ({"RANK": "-1"}, ["RANK is '-1'"]),
        ({"RANK": "a"}, ["RANK is 'a'"]),
        ({"WORLD_SIZE": "two"}, ["WORLD_SIZE is 'two'"]),
        ({"WORLD_SIZE": "0"}, ["WORLD_SIZE is '0'"]),
        ({"MASTER_PORT": "99999"}, ["MASTER_PORT is '99999'"]),
        ({"RANK": "2", "MASTER_PORT": "http"}, ["RANK is '2'", "MASTER_PORT is 'http'"]),
        ({"RANK": ""}, ["RANK is ''", "torchrun"]),
    ],
)
def test_impossible_numbers_are_refused_at_once(changes, parts, monkeypatch):
    usual = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "LOCAL_RANK": "0"}
    for name, value in (usual | changes).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(MeshError) as raised:
        shardwise.Mesh.open("tp2")
    assert all(part in str(raised.value) for part in parts), str(raised.value)


class Kept(logging.Handler):
    """Keeps what is logged."""

    def __init__(self):
        super().__init__()
        self.texts = []

    def emit(self, record):
        self.texts.append(record.getMessage())


def outcome_of_opening(env, *, port_taken=False):
    """What opening a mesh of as many ranks as `env` says ends in, what was said meanwhile, and how long it took."""
    os.environ.update(env)
    rendezvous.FIRST_NOTICE_SECONDS = 1.0
    kept = Kept()
    logging.getLogger("shardwise.job").addHandler(kept)
    with socket.socket() as taken:
        if port_taken:
            taken.bind(("127.0.0.1", int(os.environ["MASTER_PORT"])))
            taken.listen()
        start = time.monotonic()
        try:
            shardwise.Mesh.open(f"tp{os.environ['WORLD_SIZE']}", timeout_seconds=SECONDS)
        except MeshError as error:
            return str(error), kept.texts, time.monotonic() - start
        return "no error", kept.texts, time.monotonic() - start


def test_a_rank_that_never_comes_is_named_and_waited_for_no_longer_than_asked():
    ((error, said, seconds),) = spawn(outcome_of_opening, 1, {"WORLD_SIZE": "2"})
    assert re.match(r"waiting for 1 of 2 ranks at 127.0.0.1:\d+: rank 1 to come \(1 of 3 seconds\)", said[0])
    assert "1 of 2 ranks never came" in error and "rank 1" in error and "timeout_seconds" in error
    assert SECONDS <= seconds < SECONDS + LATE


def test_the_first_rank_may_be_the_one_that_never_comes():
    ((error, _, seconds),) = spawn(outcome_of_opening, 1, {"WORLD_SIZE": "2", "RANK": "1"})
    assert "rank 1 cannot reach the store of rank 0" in error and "timed out" in error
    assert SECONDS <= seconds < SECONDS + LATE


def test_a_host_that_does_not_exist():
    env = {"WORLD_SIZE": "2", "RANK": "1", "MASTER_ADDR": "no.such.host.invalid"}
    ((error, _, _),) = spawn(outcome_of_opening, 1, env)
    assert "no.such.host.invalid" in error and "MASTER_ADDR" in error


@pytest.mark.parametrize("rank", ["0", "1"])
def test_a_port_that_something_else_listens_on(rank):
    ((error, _, seconds),) = spawn(outcome_of_opening, 1, {"WORLD_SIZE": "2", "RANK": rank}, port_taken=True)
    if rank == "0":
        assert "EADDRINUSE" in error and "MASTER_PORT" in error and seconds < SECONDS
    else:
        assert "does not answer as rank 0" in error and seconds < SECONDS + LATE


def claim(ranks, worlds):
    mine = int(os.environ["RANK"])
    return outcome_of_opening({"RANK": str(ranks[mine]), "WORLD_SIZE": str(worlds[mine])})


def test_two_processes_that_are_the_same_rank():
    outcomes = spawn(claim, 3, (0, 1, 1), (3, 3, 3))
    errors = [error for error, _, _ in outcomes]
    assert any("2 processes are rank 1" in error for error in errors[1:])
    assert "rank 2" in errors[0]


def test_ranks_that_expect_different_numbers_of_ranks():
    outcomes = spawn(claim, 2, (0, 1), (2, 4))
    assert (
        "rank 1 expects 4 ranks, and others 2" in outcomes[1][0]
        or "rank 0 expects 2 ranks, and others 4" in outcomes[0][0]
    )


def come_back():
    """torchrun on a machine that came back counts its restarts from 0; rank 0 keeps a new store itself."""
    return outcome_of_opening({"TORCHELASTIC_RESTART_COUNT": str(1 - int(os.environ["RANK"]))})[0]


def test_machines_that_have_restarted_their_ranks_at_different_times_meet():
    assert spawn(come_back, 2) == ["no error"] * 2


def open_without_connections():
    def fail(*words, **options):
        raise RuntimeError("Gloo connectFullMesh failed with Connect timeout")

    dist.init_process_group = fail
    return outcome_of_opening({})[0]


def test_ranks_that_meet_and_cannot_connect_are_named_with_their_machine():
    for rank, error in enumerate(spawn(open_without_connections, 2)):
        assert f"rank {rank} on {socket.gethostname()} cannot connect" in error and "Connect timeout" in error


class Polled(dist.HashStore):
    """A store into which the other rank's arrival is written while this rank looks who is missing."""

    def check(self, keys):
        if keys == ["arrived/1"]:
            self.add("arrived/1", 1)
            self.add("arrived", 1)
            self.set("complete", "")
        return super().check(keys)


def test_a_rank_that_comes_at_the_last_moment_has_come():
    address = rendezvous.RankAddress(0, 2, "127.0.0.1", 29500, hosts_store=True)
    rendezvous._arrive(Polled(), address, time.monotonic() - 2.0, timeout_seconds=1.0)
