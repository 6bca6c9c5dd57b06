"""Regions of two weights on simulated ranks: what enters and leaves them, its gradients, and no sum too many."""

from __future__ import annotations

import contextlib
import copy

import pytest
import torch
from torch import nn

from shardwise.comm.collectives import reduce_from_region
from shardwise.comm.simulated import run_ranks
from shardwise.errors import LayoutError, PlanError
from shardwise.runtime.context import Axis, SplitContext
from shardwise.runtime.region_edges import (
    RegionExit,
    cut,
    edge_of,
    install_owner,
    install_region,
    install_stack,
    mark_full_gradient,
    own_part,
    pad,
)

pytestmark = pytest.mark.single

ROWS, HIDDEN, INNER = 2, 4, 12  # the inner features divide by two, three and four


def drawn(seed, *shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class Block(nn.Module):
    """A product into more features and one back: of a rank's features, the second one's are partial sums."""

    def __init__(self, seed, features=slice(None)):
        super().__init__()
        self.up = nn.Parameter(drawn(seed, INNER, HIDDEN)[features].clone())
        self.down = nn.Parameter(drawn(seed + 10, HIDDEN, INNER)[:, features].clone())

    def forward(self, x, scale=None):
        inner = torch.tanh(x @ self.up.T)
        inner = inner + inner.mean(1, keepdim=True)  # every token is given something of all, as attention does
        return (inner if scale is None else inner * scale) @ self.down.T


class Layer(nn.Module):
    """Two blocks that are given the same."""

    def __init__(self, features=slice(None)):
        super().__init__()
        self.first, self.second = Block(0, features), Block(1, features)

    def forward(self, x, scale=None):
        return x + self.first(x, scale) + self.second(x, scale)


def own_features(group):
    size = INNER // group.size()
    return slice(group.rank() * size, (group.rank() + 1) * size)


def context_of(group):
    return SplitContext(tp=Axis("tp", group=group, size=group.size(), coord=group.rank()))


def run_and_compare(module, full, group, *inputs):
    """Exchanges of a forward and of a backward whose results and gradients are the full module's."""
    weight = drawn(7, *inputs[0].shape)
    expected = [each.clone().requires_grad_() for each in inputs]
    (full(*expected) * weight).sum().backward()
    given = [each.clone().requires_grad_() for each in inputs]
    start = group.num_exchanges
    out = module(*given)
    forward = group.num_exchanges - start
    (out * weight).sum().backward()
    with torch.no_grad():
        torch.testing.assert_close(out, full(*inputs), rtol=1e-4, atol=1e-5)
    for mine, other in zip(given, expected, strict=True):
        torch.testing.assert_close(mine.grad, other.grad, rtol=1e-4, atol=1e-5)
    for name, parameter in module.named_parameters():
        gradient = full.get_parameter(name).grad
        own = gradient[:, own_features(group)] if name.endswith("down") else gradient[own_features(group)]
        torch.testing.assert_close(parameter.grad, own, rtol=1e-4, atol=1e-5)
    return forward, group.num_exchanges - start - forward


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_a_region_has_one_sum_in_each_direction(num_ranks):
    def run(group):
        block = Block(0, own_features(group))
        install_region(block, "output", context_of(group))
        return run_and_compare(block, Block(0), group, drawn(1, ROWS, 5, HIDDEN))

    assert run_ranks(run, num_ranks) == [(1, 1)] * num_ranks


def test_another_input_is_summed_on_its_own():
    def run(group):
        block = Block(0, own_features(group))
        install_region(block, "output", context_of(group))
        return run_and_compare(block, Block(0), group, drawn(1, ROWS, 5, HIDDEN), drawn(2, ROWS, 5, 1))

    assert run_ranks(run, 2) == [(1, 2)] * 2


@pytest.mark.parametrize(("fused", "sums"), [(False, 2), (True, 1)])
def test_regions_given_the_same_enter_once_and_may_leave_together(fused, sums):
    def run(group):
        layer, context = Layer(own_features(group)), context_of(group)
        edge = edge_of(context, None)
        install_region(layer.first, "output", context, leave=RegionExit(edge=edge, defers=fused))
        install_region(layer.second, "output", context, leave=RegionExit(edge=edge, absorbs=fused))
        return run_and_compare(layer, Layer(), group, drawn(1, ROWS, 5, HIDDEN))

    assert run_ranks(run, 2) == [(sums, 1)] * 2


class Stack(nn.Module):
    def __init__(self, features=slice(None)):
        super().__init__()
        self.layers = nn.ModuleList([Layer(features), Layer(features)])
        self.kept = [0, 1]

    def forward(self, x):
        for number in self.kept:
            x = self.layers[number](x)
        return x


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("length", [1, 3, 4, 9])
@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_along_the_sequence_every_length_computes_the_same(num_ranks, length, fused):
    def run(group):
        stack, context = Stack(own_features(group)), context_of(group)
        for layer in stack.layers:
            edge = edge_of(context, "layers")
            install_region(layer.first, "output", context, stack="layers", leave=RegionExit(edge=edge, defers=fused))
            install_region(layer.second, "output", context, stack="layers", leave=RegionExit(edge=edge, absorbs=fused))
        install_stack(stack.layers, "layers", context)
        return run_and_compare(stack, Stack(), group, drawn(1, ROWS, length, HIDDEN))

    leaves = 1 if fused else 2  # a layer gathers once and scatters for each region; the stack is joined at its end
    assert run_ranks(run, num_ranks) == [(2 * (1 + leaves) + 1, 2 * (1 + leaves) + 1)] * num_ranks


def test_tokens_flattened_inside_leave_as_parts_of_every_sequence():
    def run(group):
        context = context_of(group)
        context.state.rows, edge = ROWS, edge_of(context, "layers")
        x = drawn(group.rank(), ROWS, 5, HIDDEN)
        return edge.leave(x.flatten(0, 1).clone()).view(ROWS, -1, HIDDEN), edge.leave(x)

    for flattened, straight in run_ranks(run, 2):
        assert torch.equal(flattened, straight)


def test_a_region_that_is_not_given_its_part_of_the_sequence_says_so():
    def run(group):
        block, context = Block(0, own_features(group)), context_of(group)
        install_region(block, "output", context, stack="layers", name="layers.0.mlp")
        context.state.lengths["layers"], context.state.stack_rows = 6, ROWS
        with pytest.raises(PlanError, match=r"layers\.0\.mlp is given 2 tokens, where this rank's part .* has 3"):
            block(drawn(0, ROWS, 2, HIDDEN))
        return block(drawn(0, ROWS, 3, HIDDEN)).shape

    assert run_ranks(run, 2) == [(ROWS, 3, HIDDEN)] * 2


@pytest.mark.parametrize(
    ("kept", "said"), [([1], "the first of its layers"), ([0], "the last of its layers"), ([0, 1], "")]
)
def test_a_stack_of_which_an_end_does_not_run_says_so(kept, said):
    def run(group):
        stack, context = Stack(own_features(group)), context_of(group)
        for layer in stack.layers:
            install_region(layer.first, "output", context, stack="layers")
            install_region(layer.second, "output", context, stack="layers")
        install_stack(stack.layers, "layers", context)
        install_owner(stack, "layers", context)
        stack.kept = kept
        with pytest.raises(LayoutError, match=f"{said} has not run") if said else contextlib.nullcontext():
            stack(drawn(1, ROWS, 4, HIDDEN))
        stack.layerdrop = 0.5
        with pytest.raises(LayoutError, match="skips layers at random"):
            stack(drawn(1, ROWS, 4, HIDDEN))

    run_ranks(run, 2)


class Scaled(Block):
    """A block that sums its products itself, after which a scale may follow."""

    def __init__(self, context, features=slice(None)):
        super().__init__(0, features)
        self.context, self.scale = context, nn.Parameter(drawn(4, HIDDEN))

    def forward(self, x, scales=None):
        out = super().forward(x)
        if self.context is not None:
            out = mark_full_gradient(reduce_from_region(out, self.context.tp.group), self.context, self.context.tp)
        return out * self.scale if scales else out


CALLS = ((True, None), (True, None), (True, True), (False, None), (True, None), (True, True))


def test_a_region_continues_after_its_sum_in_some_calls():
    """Gradients of what follows the sum are partial where something does, also in a copy and after other calls."""

    def run(group):
        context, full = context_of(group), Scaled(None)
        module = Scaled(context, own_features(group))
        install_region(module, "row", context)
        for number, (is_training, scales) in enumerate(CALLS):
            module = copy.deepcopy(module) if number == 3 else module
            inputs = [drawn(8, ROWS, 5, HIDDEN).requires_grad_() for _ in range(2)]
            for each, x in zip((module, full), inputs, strict=True):
                each.train(is_training).zero_grad()
                (each(x * 1.0, scales) ** 2).sum().backward()
            torch.testing.assert_close(inputs[0].grad, inputs[1].grad, rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(module.up.grad, full.up.grad[own_features(group)], rtol=1e-4, atol=1e-5)
            if scales:  # partial: the gradient phase adds them up
                scale = torch.stack(group.exchange(module.scale.grad)).sum(0)
                torch.testing.assert_close(scale, full.scale.grad, rtol=1e-4, atol=1e-5)

    run_ranks(run, 2)


@pytest.mark.parametrize("length", [0, 1, 5, 8])
def test_parts_are_equal_and_join_to_the_padded_whole(length):
    x = drawn(0, ROWS, length, HIDDEN)

    def run(group):
        return own_part(x, context_of(group).tp)

    joined = torch.cat(run_ranks(run, 4), 1)
    assert torch.equal(joined, pad(x, 1, 4))
    assert torch.equal(cut(joined, 1, length), x)
