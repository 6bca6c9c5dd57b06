"""Streams of random numbers: replicated ones agree between ranks, rank-local ones do not, and both can be repeated."""

from __future__ import annotations

import pytest
import torch

from shardwise.runtime.forward_state import RandomStreams, device_rng

pytestmark = pytest.mark.single

CPU = torch.device("cpu")


def draw():
    return torch.rand(4)


def draws_of(coord):
    """What the rank at `coord` draws before, in and after a region with a replicated module in it."""
    torch.manual_seed(0)
    streams, found = RandomStreams(), {"before": draw()}
    streams.begin("region", CPU, coord)
    found["region"] = draw()
    streams.begin("adapter", CPU, coord, replicated="lora_dropout")
    found["replicated inside"] = draw()
    streams.end("adapter")
    found["region again"] = draw()
    streams.end("region")
    return found | {"after": draw()}


def test_ranks_differ_where_they_hold_parts_and_nowhere_else():
    first, second = draws_of(0), draws_of(1)
    equal = {name for name, values in first.items() if torch.equal(values, second[name])}
    assert equal == {"before", "replicated inside", "after"}


def test_the_same_seed_gives_the_same_streams():
    first, again = draws_of(1), draws_of(1)
    assert all(torch.equal(values, again[name]) for name, values in first.items())


def test_replicated_streams_of_two_names_differ():
    torch.manual_seed(0)
    streams = RandomStreams()
    streams.begin("region", CPU, 0)
    found = []
    for name in ("first", "second"):
        streams.begin("adapter", CPU, 0, replicated=name)
        found.append(draw())
        streams.end("adapter")
    streams.end("region")
    assert not torch.equal(*found)


def test_the_end_of_a_level_ends_what_was_begun_inside():
    torch.manual_seed(0)
    expected = (torch.empty((), dtype=torch.int64).random_(), draw())[1]
    torch.manual_seed(0)
    streams = RandomStreams()
    streams.begin("layer", CPU, 1)
    streams.begin("region", CPU, 1)  # an error skips its end
    streams.end("layer")
    assert torch.equal(draw(), expected) and streams.seed is None


def test_a_seeded_block_leaves_the_stream_as_it_was():
    torch.manual_seed(0)
    expected = draw()
    torch.manual_seed(0)
    with device_rng(CPU, 7):
        inside = draw()
    assert torch.equal(draw(), expected) and not torch.equal(inside, expected)
