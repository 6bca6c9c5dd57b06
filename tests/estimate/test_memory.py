"""Bytes a rank keeps, from layouts alone; `bench/fsdp.py` holds them against what ranks really hold."""

from __future__ import annotations

import pytest

from shardwise.estimate.memory import state_bytes
from shardwise.sharding.layout import Layout, Step
from shardwise.sharding.placement import Chunk, Replicate, split_even

pytestmark = pytest.mark.pure


def test_every_axis_takes_its_share_and_the_first_rank_holds_most():
    weight = Layout((10, 6), (Step(("tp",), (2,), split_even(1, 6, parts=2)), Step(("fsdp",), (4,), Chunk(0))))
    norm = Layout((10,), (Step(("tp",), (2,), Replicate()), Step(("fsdp",), (4,), Chunk(0))))
    first = state_bytes([weight, norm], {"tp": 0, "fsdp": 0})
    assert first.parameters == first.gradients == (3 * 3 + 3) * 4
    assert first.optimizer == 2 * first.parameters and first.total == 4 * first.parameters
    assert state_bytes([weight, norm], {"tp": 1, "fsdp": 3}).parameters == (1 * 3 + 1) * 4


def test_dtypes_count():
    layout = Layout((8,))
    assert state_bytes([layout], {}, itemsize=2).total == 8 * 2 * 4
