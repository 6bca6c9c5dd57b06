"""Converts structure to rules: what a tiny model's graph shows to be splittable.

Names the row products and required indices of `shardwise.search.influence`: the module at which a region is entered,
the style of each split parameter, the integer attributes that count split features. The graph does not determine
everything, so a block has several plans to try, best guess first.

Between its blocks a layer works on every position alone, so a part of the sequence is enough. Modules that mix
positions are split regions, which gather at their edge, or replicated modules that need the full sequence.
"""

import contextlib
import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

import torch
from torch import Tensor, nn

from shardwise.errors import LayoutError, PlanError
from shardwise.plan.decision import SplitPlan
from shardwise.plan.parameters import feature_split, qkv_split
from shardwise.plan.regions import stacks_with_regions
from shardwise.plan.rule import AttributeRule, InputRule, ParameterRule, RegionRule, Rule, SequenceRule, SplitStyle
from shardwise.plan.spec import Plan
from shardwise.plan.structure import ModelFacts, is_within, outermost, outermost_layers, parent_of, upwards
from shardwise.runtime.arguments import hidden_name
from shardwise.runtime.norm import norm_formula
from shardwise.search.block_graph import BlockGraph
from shardwise.search.influence import RequiredIndices, RowProduct, gradients_of, is_linear_weight, is_nonzero
from shardwise.search.trace import Layer, ModuleCall
from shardwise.search.traced_sizes import solve
from shardwise.sharding.boxes import Interval
from shardwise.sharding.placement import Split, equal_sections, join_intervals

_MAX_SECTIONS = 8
_WASTE = 1.1  # how much more than needed a style may hold: a named style says more to a reader than intervals do
_COUNT_NAMES = ("head", "group", "num_blocks")
_NEVER = frozenset({"layer_idx", "layer_index", "head_dim", "num_key_value_groups", "attention_head_size", "head_size"})


def find_style(graph: BlockGraph, name: str, required: RequiredIndices) -> str:
    """Returns the style whose placement of the parameter `name` holds what every rank needs with least besides."""
    fitting = [
        (sum(split.local_sizes), style)
        for style, split in _named(graph, name, required.dim)
        if _covers(split, required)
    ]
    exact = sum(len(indices) for indices in required.ranks)
    if fitting:
        held, style = min(fitting, key=lambda each: each[0])
        if held <= max(exact * _WASTE, required.size):
            return style
    return str(SplitStyle(required.dim, 1, _intervals(required)))


def _named(graph: BlockGraph, name: str, dim: int) -> Iterator[tuple[str, Split]]:
    owner, size, num_parts = parent_of(name), graph.layer.parameters[name].shape[dim], graph.num_parts
    modules = graph.facts.modules
    around = itertools.takewhile(lambda module: module != graph.layer.fqn, upwards(owner))
    heads = next((found for module in around if (found := modules[module].heads) is not None), None)
    with contextlib.suppress(PlanError, LayoutError):
        yield str(SplitStyle(dim)), feature_split(dim, size, heads=heads, num_parts=num_parts)
    for sections in range(2, _MAX_SECTIONS + 1):
        if size % sections == 0:
            yield str(SplitStyle(dim, sections)), equal_sections(dim, size, num_sections=sections, parts=num_parts)
    if heads is not None and dim == (1 if modules[owner].kind == "transposed" else 0):
        with contextlib.suppress(PlanError, LayoutError):
            yield "qkv_colwise", qkv_split(dim, size, heads=heads, num_parts=num_parts)


def _covers(split: Split, required: RequiredIndices) -> bool:
    held = (itertools.chain.from_iterable(itertools.starmap(range, runs)) for runs in split.pieces)
    return all(indices.issubset(own) for indices, own in zip(required.ranks, held, strict=True))


def _intervals(required: RequiredIndices) -> tuple[tuple[Interval, ...], ...]:
    """Returns each rank's indices as runs. Indices that no rank needs stay with those before them."""
    needed = [set(indices) for indices in required.ranks]
    known = set().union(*needed)
    last: list[int] = [0]
    for index in range(required.size):
        if index in known:
            last = [rank for rank, indices in enumerate(required.ranks) if index in indices]
        else:
            for rank in last:
                needed[rank].add(index)
    return tuple(join_intervals((index, index + 1) for index in sorted(indices)) for indices in needed)


def guess_attributes(graph: BlockGraph, *, limit: int) -> list[dict[str, str]]:
    """Returns attributes with their styles, best guess first: solutions for the tiny model's sizes, guesses by name."""
    known = graph.facts.attributes()
    solved = solve(list(graph.equations()), limit=limit)
    guesses = [
        {
            name: "divided" if part == Fraction(1, graph.num_parts) else f"divided({1 / part})"
            for name, part in parts.items()
            if name in known
        }
        for parts in solved
    ]
    guesses += [dict.fromkeys(names, "divided") for names in _by_name(graph)]
    distinct = {tuple(sorted(guess.items())): guess for guess in guesses}
    return list(distinct.values())[:limit]


def _by_name(graph: BlockGraph) -> list[tuple[str, ...]]:
    layer, names = graph.layer.fqn, [*graph.required_indices, *(product.parameter for product in graph.group)]
    modules = {layer, *(module for name in names for module in upwards(parent_of(name)) if len(module) > len(layer))}
    sizes = {each.size for each in graph.required_indices.values()} | {product.features for product in graph.group}
    counts, features = [], []
    for module in sorted(modules):
        for name, value in graph.facts.modules[module].attributes.items():
            if value % graph.num_parts or name.rpartition(".")[2] in _NEVER:
                continue
            if any(part in name for part in _COUNT_NAMES) and not name.endswith(("dim", "size")):
                counts.append(f"{module}.{name}")
            elif value in sizes:
                features.append(f"{module}.{name}")
    own = tuple(name for name in counts if ".config." not in name)
    return [(), own, tuple(counts), (*own, *(name for name in features if ".config." not in name))]


_MAX_GUESSES = 6  # of attributes that are tried at the first choice of entries
_MAX_GUESSES_BELOW = 2  # and at the others
_weights = functools.partial(ParameterRule, source="structure")
_region = functools.partial(RegionRule, source="structure")
_count = functools.partial(AttributeRule, source="structure")
_input = functools.partial(InputRule, source="structure")
_LARGE = 0.02  # from which part of its layer's elements a linear outside of all blocks is worth a collective


@dataclass(eq=False)
class Block:
    """One region of one layer, ready to be tried."""

    layer: str
    plans: tuple[Plan, ...]  # to try, best guess first; the last may gather what others leave split
    parameters: frozenset[str]  # that it splits
    key: tuple[str, ...]  # names its kind: the row products within the layer


def find_blocks(
    model: nn.Module, facts: ModelFacts, products: Sequence[RowProduct], layers: Sequence[Layer], *, num_parts: int
) -> list[Block]:
    """Returns the blocks of every layer. Row products that need the same split weights form one block."""
    blocks = []
    for layer in layers:
        own = [product for product in products if product.layer == layer.fqn]
        for group in _groups(own):
            graph = BlockGraph(model, facts, layer, group, own, num_parts=num_parts)
            rows = [product.parameter for product in group]
            blocks.append(_block(layer.fqn, _RuleBuilder(graph).plans(), [*graph.required_indices, *rows], rows))
    rest = (_rest(model, facts, layer, blocks, num_parts) for layer in outermost_layers(facts.stacks))
    return [*blocks, *(block for block in rest if block is not None)]


def _block(layer: str, plans: Iterable[Plan], parameters: Iterable[str], named_after: Iterable[str]) -> Block:
    key = tuple(sorted(name.removeprefix(f"{layer}.") for name in named_after))
    return Block(layer=layer, plans=tuple(plans), parameters=frozenset(parameters), key=key)


def _rest(model: nn.Module, facts: ModelFacts, layer: str, blocks: Sequence[Block], num_parts: int) -> Block | None:
    """The large linears of a layer that are in no block, with gathered outputs: all, if its graph shows nothing."""
    own = [block for block in blocks if block.layer == layer]
    regions = (rule for block in own for rule in block.plans[0].section(RegionRule))
    entries = [rule.pattern for rule in regions if rule.style in ("region", "region_output")]
    split = frozenset().union(*(block.parameters for block in own))
    sizes = {name: math.prod(facts.modules[name].parameters.get("weight", (0,))) for name in facts.inside(layer)}
    names = [
        name
        for name, size in sizes.items()
        if size >= _LARGE * sum(sizes.values())
        and f"{name}.weight" not in split
        and not is_within(name, entries)
        and _can_gather(model, facts, name, num_parts)
    ]
    if not names:
        return None
    reason = "its layer shows no structure around it"
    rules = tuple(_weights(name, "colwise_gather_output", reason=reason) for name in names)
    return _block(layer, [Plan(rules)], [f"{name}.weight" for name in names], names)


def _can_gather(model: nn.Module, facts: ModelFacts, module: str, num_parts: int) -> bool:
    """Returns whether a module computes as a plain linear and is large enough to give every rank a part."""
    kind = facts.modules[module].kind
    plain = kind == "transposed" or type(model.get_submodule(module)).forward is nn.Linear.forward
    return plain and min(facts.modules[module].parameters["weight"]) >= num_parts


def _groups(products: list[RowProduct]) -> list[list[RowProduct]]:
    groups: list[list[RowProduct]] = []
    for product in products:
        together = [
            group
            for group in groups
            if any(set(other.required_indices) & set(product.required_indices) for other in group)
        ]
        merged = [product, *(other for group in together for other in group)]
        groups = [group for group in groups if group not in together] + [merged]
    return groups


class _RuleBuilder:
    """Converts the graph of a block to rules."""

    def __init__(self, graph: BlockGraph) -> None:
        self.graph, self.facts = graph, graph.facts

    def plans(self) -> Iterator[Plan]:
        """Yields the plans to try, best guess first."""
        guesses = [
            [_count(name, style, reason="counts what is split") for name, style in each.items()]
            for each in guess_attributes(self.graph, limit=_MAX_GUESSES)
        ]
        choices = [(self._rules(entries), list(self._slices(entries))) for entries in self.graph.entries]
        for position, (rules, slices) in enumerate(choices):
            for counts in guesses if position == 0 else guesses[:_MAX_GUESSES_BELOW]:
                # Blocks of one kind are tried in step, so each has both.
                yield Plan((*rules, *counts, *slices))
                yield Plan((*rules, *counts))
        entries = self.graph.entries[0]
        (rules, slices), local_sizes = choices[0], list(self._sizes(entries))
        for counts in guesses if local_sizes else ():
            yield Plan((*rules, *counts, *slices, *local_sizes))
        if gathered := tuple(self._gathered(entries)):
            yield Plan(gathered)

    def _rules(self, entries: Mapping[str, str]) -> list[Rule]:
        """Returns the rules; if several have one name, the last."""
        return list({rule.pattern: rule for rule in self._found(entries)}.values())

    def _found(self, entries: Mapping[str, str]) -> Iterator[Rule]:
        for entry, edge in entries.items():
            yield _region(entry, edge, reason="everything it is given is used by split parameters alone")
        for name in self._residual_inputs(entries):
            yield _input(name, "aside", reason="it is used after the sum")
        for product in self.graph.group:
            yield from self._row_rules(product, entries)
        needed = self.graph.required_indices
        covered = {parent_of(name) for name in needed if self._is_weight(name)}
        for name, required in needed.items():
            if self._is_weight(name) or parent_of(name) not in covered or not name.endswith(".bias"):
                yield from self._column_rules(name, required, entries)
        for entry in (entry for entry, edge in entries.items() if edge == "region_output"):
            for name in self.graph.added(entry):
                yield _weights(name, "added_once", reason="it is added to partial sums")
            for name in self.graph.bypassing_identities(entry):
                yield _region(name, "moe_identity_expert", reason="its output is added to partial sums")

    def _residual_inputs(self, entries: Mapping[str, str]) -> list[str]:
        owners = (entry for entry, edge in entries.items() if edge == "region")
        return [f"{owner}.{name}" for owner in owners for name in sorted(self.graph.bypassing_inputs(owner) or ())]

    def _slices(self, entries: Mapping[str, str]) -> Iterator[Rule]:
        """Yields input rules for a rank's own part. Plans without them are tried too."""
        residual = self._residual_inputs(entries)
        for name, dim in self.graph.sliced_inputs(entries).items():
            if name not in residual:
                yield _input(name, f"split({dim})", reason="each rank uses its own part of it")

    def _sizes(self, entries: Mapping[str, str]) -> Iterator[Rule]:
        """Yields rules for modules that may read the size of split features off their hidden states."""
        calls = {call.fqn: call for call in self.graph.layer.calls if entries.get(call.fqn) == "region"}
        for name in (f"{fqn}.{hidden_name(call.named)}" for fqn, call in calls.items()):
            if name in self.facts.inputs():
                yield _input(name, "local_size", reason="what is split is reshaped by its size")

    def _gathered(self, entries: Mapping[str, str]) -> Iterator[Rule]:
        """Yields rules that gather the output of every linear: this always works, at one collective each."""
        names = {*self.graph.required_indices, *(product.parameter for product in self.graph.group)}
        names |= {name for name in self.graph.layer.parameters if is_within(parent_of(name), entries)}
        for owner in sorted({parent_of(name) for name in names if self._is_weight(name)}):
            if _can_gather(self.graph.model, self.facts, owner, self.graph.num_parts):
                yield _weights(owner, "colwise_gather_output", reason="what works on its outputs cannot be split")

    def _is_weight(self, name: str) -> bool:
        return is_linear_weight(self.graph.model, name)

    def _row_rules(self, product: RowProduct, entries: Mapping[str, str]) -> Iterator[Rule]:
        reason = f"its {product.features} input features fall into runs that need different rows"
        owner = parent_of(product.parameter)
        if self._is_weight(product.parameter):
            yield _weights(owner, "rowwise_reenter" if product.reenters else "rowwise", reason=reason)
            return
        parameters = self.graph.layer.parameters
        sections = parameters[product.parameter].shape[product.input_dim] // product.features
        yield _weights(product.parameter, str(SplitStyle(product.input_dim, sections)), reason=reason)
        bias = f"{product.module}.bias"
        if product.module == owner and entries.get(owner) == "all_reduce" and bias in parameters:
            yield _weights(bias, "added_once", reason="it is added to partial sums")

    def _column_rules(self, name: str, required: RequiredIndices, entries: Mapping[str, str]) -> Iterator[Rule]:
        owner = parent_of(name)
        if norm_formula(self.graph.model.get_submodule(owner)) is not None:
            yield _weights(owner, "norm_split", reason="it normalises split features")
            return
        names = [name]
        if self._is_weight(name):
            # Where the module's own rule says that it is entered, its parameters have theirs.
            names = [f"{owner}.{own}" for own in self.facts.modules[owner].parameters] if owner in entries else [owner]
        style, reason = find_style(self.graph, name, required), "each rank's features depend on their own part of it"
        yield from (_weights(each, style, reason=reason) for each in names)


_MAX_INPUTS = 2
_rule = functools.partial(SequenceRule, source="structure")


def sequence_plans(plan: Plan, split: SplitPlan, facts: ModelFacts, layers: Sequence[Layer]) -> Iterator[Plan]:
    """Yields `plan` (`split`, once resolved) with rules for splitting the sequence, best guess first, or unchanged.

    Args:
        layers: layers of a tiny model in eval mode, every tensor a node, nothing cut; empty if it cannot be watched.
    """
    stacks = [stack.fqn for stack in stacks_with_regions(facts, split.tensor.regions)]
    if len(stacks) < 2 or not layers:
        yield plan  # where there is none, trying it says so
    ran = [stack for stack in stacks if any(parent_of(layer.fqn) == stack for layer in layers)]
    seen = set()
    ends = [name for name, style in split.tensor.modules.items() if style == "rowwise"]
    ends += [region.fqn for region in split.tensor.regions if region.edge == "output"]
    for chosen in _choices(ran, facts, ends):
        inside = [layer for layer in layers if layer.fqn in chosen or parent_of(layer.fqn) in chosen]
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


def _choices(stacks: Sequence[str], facts: ModelFacts, ends: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """Yields all stacks, then all but one, then each alone, the largest first, then layers that have several `ends`."""
    by_size = sorted((s for s in facts.stacks if s.fqn in stacks), key=lambda stack: -len([*facts.inside(stack.fqn)]))
    without = [tuple(stack for stack in stacks if stack != one.fqn) for one in reversed(by_size)]
    yield from filter(None, dict.fromkeys((tuple(stacks), *without, *((stack.fqn,) for stack in by_size))))
    yield from (stack.items for stack in by_size if sum(is_within(end, stack.items[:1]) for end in ends) > 1)


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
    regions = [region.fqn for region in split.tensor.regions if region.edge != "gather"]
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
    """Returns whether an output at one position depends on `value` `[batch, sequence, ...]` at another."""
    for out in outputs:
        if out.grad_fn is None or out.ndim < 2 or out.shape[:2] != value.shape[:2]:
            continue
        for position in (0, out.shape[1] // 2, out.shape[1] - 1):
            (gradient,) = gradients_of(out[:, position].sum(), [value])
            if gradient is not None and is_nonzero(gradient[:, torch.arange(gradient.shape[1]) != position]):
                return True
    return False
