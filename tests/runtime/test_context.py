"""What the modules of a forward share: lengths of parts, streams of random numbers, what has entered regions."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from shardwise.runtime.context import Axis, SplitContext
from shardwise.runtime.forward_state import Entered, ForwardState

pytestmark = pytest.mark.single


@given(st.integers(0, 40), st.integers(1, 6))
def test_even_sizes_are_those_of_torch_chunk(length, size):
    chunks = [len(part) for part in torch.arange(length).chunk(size)] if length else []
    assert Axis("tp", size=size).even_sizes(length) == (*chunks, *[0] * (size - len(chunks)))


def test_a_tensor_enters_once_until_another_one_does():
    entered, made = Entered(), []

    def enter(x):
        made.append(x * 2)
        return made[-1]

    x, other = torch.ones(2, requires_grad=True) * 1, torch.ones(2, requires_grad=True) * 1
    assert entered.get_or_enter("a", x, enter) is entered.get_or_enter("a", x, enter) is made[0]
    assert entered.get_or_enter("b", x, enter) is made[1], "slots do not know of each other"
    assert entered.get_or_enter("a", other, enter) is made[2]
    assert entered.get_or_enter("a", x, enter) is made[3], "only the last one is kept"
    x += 1
    assert entered.get_or_enter("a", x, enter) is made[4], "it was written to"
    entered.clear()
    assert entered.get_or_enter("a", x, enter) is made[5]
    with torch.no_grad():
        assert entered.get_or_enter("a", x, enter) is made[6], "what has no graph is not handed to what has one"
    assert entered.get_or_enter("a", x, enter) is made[5]


def context_of(coord):
    return SplitContext(tp=Axis("tp", size=2, coord=coord), has_dropout=True)


def draw():
    return torch.rand(3).tolist()


def numbers(coord, *, training=True):
    """What a rank draws: before, in a region, alike inside of a layer, and after."""
    torch.manual_seed(0)
    context, module = context_of(coord), nn.Module().train(training)
    found = {"before": draw()}
    context.fork_rng("layer", module)
    found["layer"] = draw()
    for name in ("router", "other"):
        context.fork_rng("full_sequence", module, replicated=name)
        found[name] = draw()
        context.restore_rng("full_sequence")
    context.fork_rng("region", module)
    found["region"] = draw()
    context.restore_rng("region")
    context.restore_rng("layer")
    context.restore_rng("layer")  # again: nothing is begun
    return found | {"after": draw()}


def test_ranks_draw_alike_outside_and_where_they_are_told_and_differently_inside():
    first, second = numbers(0), numbers(1)
    assert {name for name in first if first[name] == second[name]} == {"before", "router", "other", "after"}
    assert len({tuple(values) for values in first.values()}) == len(first), "no stream repeats another"
    assert numbers(0) == first


def test_nothing_is_begun_where_nothing_drops():
    torch.manual_seed(0)
    plain = [draw() for _ in range(6)]
    assert list(numbers(1, training=False).values()) == plain


def test_the_end_of_a_forward_gives_every_stream_back():
    torch.manual_seed(0)
    context, module = context_of(1), nn.Module()
    context.begin_forward(module)
    context.fork_rng("layer", module)
    context.fork_rng("region", module)
    context.end_forward(module)
    after = draw()
    torch.manual_seed(0)
    torch.empty((), dtype=torch.int64).random_()  # what the layer took for its seed
    assert after == draw()


def test_forwards_within_each_other_have_states_of_their_own():
    context, module = SplitContext(), nn.Module()
    context.begin_forward(module)
    outer = context.state
    outer.lengths["layers"] = 5
    context.begin_forward(module)
    assert context.state is not outer and not context.state.lengths
    context.end_forward(module)
    assert context.state is outer
    context.end_forward(module)
    assert context.state is outer, "backward may compute parts of it again"
    later = ForwardState()

    def fail():
        with context.resumed(later):
            assert context.state is later
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert context.state is outer
