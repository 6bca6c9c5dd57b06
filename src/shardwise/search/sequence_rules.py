"""How a tiny model's layers can be split along the sequence: plans to try, by what runs when and what mixes positions.

Between its blocks a layer works on every position alone, so a part of the sequence is enough. What mixes positions is a
split region, which gathers it at its edge, or a replicated module that must be given all of it. What runs
after the last layer, wherever it is registered, has partial gradients where a split head follows.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from shardwise.plan.decision import SplitPlan
from shardwise.plan.resolve import resolve
from shardwise.plan.rule import InputRule, SequenceRule
from shardwise.plan.sequence_plan import stacks_with_regions
from shardwise.plan.spec import Plan
from shardwise.plan.structure import LayerStack, ModelFacts, is_within, parent_of
from shardwise.search.reachability import gradients_of, hidden_name
from shardwise.search.trace import Layer, ModuleCall
from shardwise.sharding.placement import Split
from shardwise.tiny.objective import copied

__all__ = ["sequence_plans"]

_MAX_INPUTS = 2
_BY = "structure"


def sequence_plans(
    model: nn.Module,
    facts: ModelFacts,
    plan: Plan,
    *,
    layers: Sequence[Layer],
    batch: Mapping[str, Any],
    tp_size: int,
) -> Iterator[Plan]:
    """`plan` with rules that say where the sequence is split; best guess first, which may be `plan` as it is.

    Args:
        model: a tiny model in eval mode.
        layers: how its layers ran when watched, every tensor a node, nothing cut.
        tp_size: for how many ranks.
    """
    split = resolve(plan, facts, tp_size=tp_size)
    stacks = stacks_with_regions(facts, split.regions)
    if len(stacks) < 2:
        yield plan  # where there is none, trying it says so
    order = _watch_order(model, stacks, batch)
    ran = sorted(order.left_at, key=lambda stack: order.left_at[stack])
    seen = set()
    for chosen in _choices(ran, facts):
        inside = [layer for layer in layers if parent_of(layer.fqn) in chosen]
        for gathered, inputs, mixing, tail in itertools.product(
            _gathered(inside, split),
            _inputs(inside),
            _mixing(inside, split),
            _tails(split, chosen[-1], order),
        ):
            last = "sequence_partial" if tail is not None else "sequence"
            names = {
                "sequence": (chosen[:-1], "its layers are split"),
                last: (chosen if last == "sequence" else chosen[-1:], "its layers are split"),
                "partial_gradient": (tail or (), "it runs between the layers and the head"),
                "whole_sequence": (mixing, "it mixes positions and is not split"),
            }
            rules = [SequenceRule(fqn, style, _BY, why) for style, (fqns, why) in names.items() for fqn in fqns]
            split_inputs = [InputRule(fqn, "sequence", _BY, "it is used position by position") for fqn in inputs]
            split_inputs += [
                InputRule(fqn, "sequence", _BY, "it is a part, as the hidden states are") for fqn in gathered
            ]
            candidate = plan | Plan((*rules, *split_inputs))
            if candidate not in seen:
                seen.add(candidate)
                yield candidate


def _choices(stacks: Sequence[str], facts: ModelFacts) -> Iterator[tuple[str, ...]]:
    """All stacks together; else each alone, the one with most modules first."""
    if stacks:
        yield tuple(stacks)
    if len(stacks) > 1:
        for stack in sorted(stacks, key=lambda stack: -len(list(facts.inside(stack)))):
            yield (stack,)


def _tails(split: SplitPlan, stack: str, order: _Order) -> Iterator[tuple[str, ...] | None]:
    """Replicated parameters used after the last stack, whose gradients are partial; None where none may be."""
    if split.head is not None:
        after = []
        for name, planned in split.parameters.items():
            inside = name.startswith(f"{stack}.") or isinstance(planned.placement, Split)
            if not inside and order.used_at.get(name, -1) > order.left_at[stack]:
                after.append(name)
        yield tuple(after)
    yield None


def _gathered(layers: Sequence[Layer], split: SplitPlan) -> Iterator[tuple[str, ...]]:
    """Inputs of regions that may be parts of the sequence beside the hidden states: none, or all as long as them."""
    yield ()
    regions = {region.fqn for region in split.regions}
    found = []
    for call in (call for layer in layers for call in layer.calls if call.fqn in regions):
        hidden = call.tensors.get(hidden_name(call) or "")
        for name, value in call.tensors.items() if hidden is not None else ():
            known = f"{call.fqn}.{name}" in split.inputs or f"{call.fqn}.{name}" in split.residual_inputs
            if name != hidden_name(call) and not known and _has_sequence_of(value, hidden):
                found.append(f"{call.fqn}.{name}")
    if found:
        yield tuple(dict.fromkeys(found))


def _has_sequence_of(value: Tensor, hidden: Tensor | None) -> bool:
    """Whether a tensor has the sequence dim of the hidden states `[batch, sequence, hidden]` or `[tokens, hidden]`."""
    if hidden is None or hidden.ndim < 2:
        return False
    dims = min(hidden.ndim - 1, 2)
    return value.ndim >= dims + (dims > 1) and value.shape[:dims] == hidden.shape[:dims]


def _inputs(layers: Sequence[Layer]) -> Iterator[tuple[str, ...]]:
    """Inputs of layers beside the hidden states that are as long as them and may be used position by position."""
    alike: dict[str, list[str]] = {}
    pointwise: list[str] = []
    for layer in layers:
        call = next((call for call in layer.calls if call.fqn == layer.fqn), None)
        hidden = _hidden(call) if call is not None else None
        if call is None or hidden is None:
            continue
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
    """Modules outside of regions that mix positions: the lowest of them, or the highest."""
    regions = tuple(f"{region.fqn}." for region in split.regions if region.edge != "gather")
    lowest: list[str] = []
    highest: list[str] = []
    for layer in layers:
        mixing = []
        for call in layer.calls:
            outside = call.fqn != layer.fqn and not f"{call.fqn}.".startswith(regions)
            hidden = _hidden(call)
            if outside and hidden is not None and hidden.ndim >= 3 and _mixes(hidden, call.outputs[:1]):
                mixing.append(call.fqn)
        mixing = list(dict.fromkeys(mixing))
        explained = (*mixing, *(region.removesuffix(".") for region in regions))
        lowest += [name for name in mixing if not any(other.startswith(f"{name}.") for other in explained)]
        highest += [name for name in mixing if not is_within(parent_of(name), mixing)]
    yield from dict.fromkeys((tuple(lowest), tuple(highest)))


def _hidden(call: ModuleCall) -> Tensor | None:
    name = hidden_name(call)
    return call.named[name] if name is not None else None


def _mixes(value: Tensor, outputs: Sequence[Tensor]) -> bool:
    """Whether an output at one position depends on `value` `[batch, sequence, ...]` at another."""
    for out in outputs:
        if out.grad_fn is None or out.ndim < 2 or out.shape[:2] != value.shape[:2]:
            continue
        for position in (0, out.shape[1] // 2, out.shape[1] - 1):
            gradient = next(iter(gradients_of(out[:, position].sum(), [value])))
            if gradient is not None:
                elsewhere = torch.arange(gradient.shape[1]) != position
                if bool((gradient[:, elsewhere] != 0).any()):
                    return True
    return False


class _Order(TorchFunctionMode):
    """When what ran: `left_at` the end of every stack's last layer, `used_at` the last use of every parameter."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.left_at: dict[str, int] = {}
        self.used_at: dict[str, int] = {}
        self.now = 0
        self.names = {id(parameter): name for name, parameter in model.named_parameters()}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.now += 1
        if getattr(func, "__name__", "") != "__get__":
            for value in (*args, *(kwargs or {}).values()):
                if isinstance(value, Tensor) and id(value) in self.names:
                    self.used_at[self.names[id(value)]] = self.now
        return func(*args, **(kwargs or {}))


def _watch_order(model: nn.Module, stacks: Sequence[LayerStack], batch: Mapping[str, Any]) -> _Order:
    model = copy.deepcopy(model)  # some models replace their modules when they run
    order = _Order(model)
    hooks = []
    for stack in stacks:

        def left(module: nn.Module, args: Any, output: Any, stack: str = stack.fqn) -> None:
            order.left_at[stack] = order.now

        hooks += [model.get_submodule(layer).register_forward_hook(left) for layer in stack.items]
    try:
        with order, torch.no_grad():
            model(**copied(batch))
    finally:
        for hook in hooks:
            hook.remove()
    return order
