"""Finds how a tiny model's layers can be split along the sequence: plans to try.

Between its blocks a layer works on every position alone, so a part of the sequence is enough. Modules that mix
positions are split regions, which gather at their edge, or replicated modules that need the full sequence.
"""

import functools
import itertools
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from shardwise.plan.decision import SplitPlan
from shardwise.plan.rule import InputRule, SequenceRule
from shardwise.plan.sequence_plan import stacks_with_regions
from shardwise.plan.spec import Plan
from shardwise.plan.structure import ModelFacts, is_within, outermost, parent_of
from shardwise.runtime.arguments import hidden_name
from shardwise.search.influence import gradients_of, is_nonzero
from shardwise.search.refusal import Candidate
from shardwise.search.trace import Layer, ModuleCall

_MAX_INPUTS = 2
_rule = functools.partial(SequenceRule, source="structure")
_input = functools.partial(InputRule, source="structure")


def sequence_plans(candidate: Candidate, layers: Sequence[Layer]) -> Iterator[Plan]:
    """Yields plans with rules for splitting the sequence, best guess first; possibly the candidate's plan unchanged.

    Args:
        layers: layers of a tiny model in eval mode, every tensor a node, nothing cut; empty if it cannot be watched.
    """
    plan, split, facts = candidate.plan, candidate.split, candidate.facts
    stacks = [stack.fqn for stack in stacks_with_regions(facts, split.regions)]
    if len(stacks) < 2 or not layers:
        yield plan  # where there is none, trying it says so
    ran = [stack for stack in stacks if any(parent_of(layer.fqn) == stack for layer in layers)]
    seen = set()
    for chosen in _choices(ran, facts):
        inside = [layer for layer in layers if parent_of(layer.fqn) in chosen]
        for inputs, mixing in itertools.product(_inputs(inside), _mixing(inside, split)):
            rules = [
                *(_rule(fqn, "sequence", reason="its layers are split") for fqn in chosen),
                *(_rule(fqn, "whole_sequence", reason="it mixes positions and is not split") for fqn in mixing),
                *(_input(fqn, "sequence", reason="it is used position by position") for fqn in inputs),
            ]
            with_sequence = plan | Plan(tuple(rules))
            if with_sequence not in seen:
                seen.add(with_sequence)
                yield with_sequence


def _choices(stacks: Sequence[str], facts: ModelFacts) -> Iterator[tuple[str, ...]]:
    """Yields all stacks together, then each alone, the one with most modules first."""
    if stacks:
        yield tuple(stacks)
    if len(stacks) > 1:
        for stack in sorted(stacks, key=lambda stack: -len(list(facts.inside(stack)))):
            yield (stack,)


def _has_sequence_of(value: Tensor, hidden: Tensor | None) -> bool:
    """Whether a tensor has the sequence dim of the hidden states `[batch, sequence, hidden]` or `[tokens, hidden]`."""
    if hidden is None or hidden.ndim < 2:
        return False
    dims = min(hidden.ndim - 1, 2)
    return value.ndim >= dims + (dims > 1) and value.shape[:dims] == hidden.shape[:dims]


def _inputs(layers: Sequence[Layer]) -> Iterator[tuple[str, ...]]:
    """Yields inputs of layers besides the hidden states that have their length and may be used position by position."""
    alike: dict[str, list[str]] = {}
    pointwise: list[str] = []
    for layer in layers:
        call = next((call for call in layer.calls if call.fqn == layer.fqn), ModuleCall(layer.fqn))
        hidden = _hidden(call)
        for name, value in call.named.items():
            if value is not hidden and name not in call.carried and _has_sequence_of(value, hidden):
                alike.setdefault(name, []).append(f"{layer.fqn}.{name}")
                if not _mixes(value, layer.outputs):
                    pointwise.append(f"{layer.fqn}.{name}")
    chosen = [tuple(pointwise), ()]
    for size in range(1, min(len(alike), _MAX_INPUTS) + 1):
        for names in itertools.combinations(alike, size):
            chosen.append(tuple(fqn for name in names for fqn in alike[name]))
    yield from dict.fromkeys(chosen)


def _mixing(layers: Sequence[Layer], split: SplitPlan) -> Iterator[tuple[str, ...]]:
    """Yields modules outside of regions that mix positions: the lowest of them, then the highest."""
    regions = [region.fqn for region in split.regions if region.edge != "gather"]
    lowest: list[str] = []
    highest: list[str] = []
    for layer in layers:
        outside = [call for call in layer.calls if call.fqn != layer.fqn and not is_within(call.fqn, regions)]
        mixing = dict.fromkeys(call.fqn for call in outside if _mixes_hidden(call))
        explained = [parent_of(name) for name in (*mixing, *regions)]
        lowest += [name for name in mixing if not any(is_within(other, (name,)) for other in explained)]
        highest += outermost(mixing)
    yield from dict.fromkeys((tuple(lowest), tuple(highest)))


def _hidden(call: ModuleCall) -> Tensor | None:
    return call.named.get(hidden_name(call.named) or "")


def _mixes_hidden(call: ModuleCall) -> bool:
    hidden = _hidden(call)
    return hidden is not None and hidden.ndim >= 3 and _mixes(hidden, call.outputs[:1])


def _mixes(value: Tensor, outputs: Sequence[Tensor]) -> bool:
    """Whether an output at one position depends on `value` `[batch, sequence, ...]` at another."""
    for out in outputs:
        if out.grad_fn is None or out.ndim < 2 or out.shape[:2] != value.shape[:2]:
            continue
        for position in (0, out.shape[1] // 2, out.shape[1] - 1):
            (gradient,) = gradients_of(out[:, position].sum(), [value])
            if gradient is not None and is_nonzero(gradient[:, torch.arange(gradient.shape[1]) != position]):
                return True
    return False
