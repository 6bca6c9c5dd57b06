"""Which device a rank takes, with torch pretending that there are cards."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

import shardwise
from shardwise.errors import MeshError
from shardwise.job import processes
from shardwise.job.processes import check_own_cards, pick_device
from shardwise.job.rendezvous import RankAddress
from shardwise.ranks.spawn import spawn

pytestmark = pytest.mark.single


@pytest.fixture
def machine(monkeypatch):
    """Pretends visible cards, and a place among the ranks of the machine; returns the cards made current."""
    monkeypatch.delenv(processes.DEVICE_VARIABLE, raising=False)
    current = []

    def pretend(cards, *, local_rank=0, local_world_size=1, asked=None):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: cards > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: cards)
        monkeypatch.setattr(torch.cuda, "set_device", current.append)
        monkeypatch.setenv("LOCAL_RANK", str(local_rank))
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(local_world_size))
        if asked is not None:
            monkeypatch.setenv(processes.DEVICE_VARIABLE, asked)
        return current

    return pretend


@pytest.mark.parametrize(
    ("cards", "place", "device", "expected"),
    [
        (0, {}, None, "cpu"),
        (0, {"local_rank": 1, "local_world_size": 2}, None, "cpu"),
        (2, {"local_rank": 1, "local_world_size": 2}, None, "cuda:1"),
        (1, {"local_rank": 3, "local_world_size": 4}, None, "cuda:0"),  # the launcher shows each rank one card
        (1, {"local_rank": 3, "local_world_size": 4}, "cuda", "cuda:0"),
        (2, {"local_rank": 1, "local_world_size": 2, "asked": "cpu"}, None, "cpu"),
        (1, {"local_rank": 1, "local_world_size": 2, "asked": "cuda:0"}, None, "cuda:0"),
        (2, {"local_rank": 1, "local_world_size": 2, "asked": "cpu"}, "cuda", "cuda:1"),
        (2, {"local_rank": 1, "local_world_size": 2, "asked": ""}, None, "cuda:1"),
    ],
)
def test_a_rank_takes_its_device(machine, cards, place, device, expected):
    current = machine(cards, **place)
    assert str(pick_device(device)) == expected
    assert [str(each) for each in current] == [expected] * ("cuda" in expected)


@pytest.mark.parametrize(
    ("cards", "place", "device", "parts"),
    [
        (
            2,
            {"local_rank": 2, "local_world_size": 3},
            None,
            ["local rank 2 of 3", "torch sees 2 GPUs", "SHARDWISE_DEVICE=cpu"],
        ),
        (0, {}, "cuda", ["cuda:0", "torch sees 0 GPUs"]),
        (1, {}, "cuda:4", ["cuda:4", "torch sees 1 GPU"]),
        (0, {"asked": "gpu"}, None, ["SHARDWISE_DEVICE is 'gpu'"]),
        (0, {}, "gpu", ["device is 'gpu'"]),
    ],
)
def test_what_is_not_there_is_refused(machine, cards, place, device, parts):
    machine(cards, **place)
    with pytest.raises(MeshError) as raised:
        pick_device(device)
    assert all(part in str(raised.value) for part in parts), str(raised.value)


@pytest.mark.parametrize(("cards", "shared"), [(("a", "b"), False), (("a", "a"), True)])
def test_ranks_that_share_a_card_are_told_so_before_nccl_is_asked(monkeypatch, cards, shared):
    store = dist.HashStore()
    store.set("card/1", f"{cards[1]} of {processes.socket.gethostname()}")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=cards[0]))
    place = RankAddress(0, 2, "localhost", 1, True)
    if not shared:
        check_own_cards(store, place, torch.device("cuda", 0))
        return
    with pytest.raises(MeshError, match="ranks 0 and 1 use the same card"):
        check_own_cards(store, place, torch.device("cuda", 0))


def fail_where_groups_never_end():
    """A rank fails, and to take down a group of NCCL waits for a peer that does not come."""
    with shardwise.Mesh.open("tp2") as mesh:
        dist.get_backend = lambda *group: "cpu:gloo,cuda:nccl"
        dist.destroy_process_group = lambda *group: time.sleep(600)
        if mesh.rank == 1:
            raise ValueError("row 7 has no target")


@pytest.mark.spawn
def test_what_went_wrong_is_told_before_groups_of_nccl_are_taken_down():
    with pytest.raises(ValueError, match="row 7 has no target"):
        spawn(fail_where_groups_never_end, 2, timeout=50.0)
