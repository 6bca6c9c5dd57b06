"""A plan from structure: what a tiny model's graph says can be split, as rules.

Takes the row products and required indices of `shardwise.search.influence` and names them: at which module a region is
entered, which style splits each parameter, which integer attributes of modules count what is split. The graph does not
tell everything, so a block has several plans, best guess first, for whoever can run a split to try.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from torch import nn

from shardwise.errors import UnsupportedError
from shardwise.plan.rule import AttributeRule, InputRule, ParameterRule, RegionRule, Rule
from shardwise.plan.spec import Plan
from shardwise.plan.split_style import SplitStyle
from shardwise.plan.structure import ModelFacts, is_within, outermost_layers, parent_of
from shardwise.runtime.norm import recognise_norm
from shardwise.search.attributes import guess_attributes
from shardwise.search.influence import RequiredIndices, RowProduct
from shardwise.search.reachability import (
    Reachability,
    find_added,
    find_bypassing_identities,
    find_entries,
    find_sliced_inputs,
    hidden_name,
)
from shardwise.search.styles import Styler
from shardwise.search.trace import Layer

__all__ = ["Block", "find_blocks"]

_MAX_GUESSES = 6
"""How many guesses of attributes are tried at the first choice of entries."""
_MAX_GUESSES_BELOW = 2
"""And at the others."""
_weights = functools.partial(ParameterRule, source="structure")
_region = functools.partial(RegionRule, source="structure")
_input = functools.partial(InputRule, source="structure")
_LARGE = 0.02
"""From which part of its layer's elements a linear outside of all blocks is worth a collective."""


@dataclass(eq=False)
class Block:
    """One region of one layer, ready to be tried.

    Attributes:
        layer: FQN of the layer.
        candidates: plans that may split it, best guess first; the last one may gather what others leave split.
        parameters: FQNs of those that it splits.
        key: names its kind: the row products within the layer.
    """

    layer: str
    candidates: tuple[Plan, ...]
    parameters: frozenset[str] = field(default_factory=frozenset)
    key: tuple[str, ...] = ()

    def plans(self) -> Iterator[Plan]:
        """The plans to try, best guess first."""
        yield from self.candidates


def find_blocks(
    model: nn.Module, facts: ModelFacts, products: Sequence[RowProduct], layers: Sequence[Layer], *, tp_size: int
) -> list[Block]:
    """The blocks of every layer: row products that need the same split weights are one."""
    blocks = []
    for layer in layers:
        own = [product for product in products if product.layer == layer.fqn]
        for group in _groups(own):
            blocks.append(_Builder(model, facts, layer, group, own, tp_size).block())
    rest = (_rest(model, facts, layer, blocks, tp_size) for layer in outermost_layers(facts.stacks))
    return [*blocks, *(block for block in rest if block is not None)]


def _rest(model: nn.Module, facts: ModelFacts, layer: str, blocks: Sequence[Block], tp_size: int) -> Block | None:
    """The large linears of a layer that are in no block, with gathered outputs.

    Where a layer runs inside a function of its own its graph shows nothing, and these are all.
    """
    own = [block for block in blocks if block.layer == layer]
    rules = (rule for block in own for rule in block.candidates[0].section(RegionRule))
    entries = [rule.pattern for rule in rules if rule.style in ("region", "region_output")]
    split = frozenset().union(*(block.parameters for block in own))
    sizes = {name: math.prod(facts.modules[name].parameters.get("weight", (0,))) for name in facts.inside(layer)}
    names = [
        name
        for name, size in sizes.items()
        if size >= _LARGE * sum(sizes.values())
        and f"{name}.weight" not in split
        and not is_within(name, entries)
        and _can_gather(model, facts, name, tp_size)
    ]
    if not names:
        return None
    reason = "its layer shows no structure around it"
    return Block(
        layer=layer,
        candidates=(Plan(tuple(_weights(name, "colwise_gather_output", reason=reason) for name in names)),),
        parameters=frozenset(f"{name}.weight" for name in names),
        key=tuple(sorted(name.removeprefix(f"{layer}.") for name in names)),
    )


def _can_gather(model: nn.Module, facts: ModelFacts, module: str, tp_size: int) -> bool:
    """Whether a module is a linear that computes as such, large enough to give every rank a part."""
    kind = facts.modules[module].kind
    plain = kind == "transposed" or type(model.get_submodule(module)).forward is nn.Linear.forward
    return plain and min(facts.modules[module].parameters["weight"]) >= tp_size


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


class _Builder:
    def __init__(
        self,
        model: nn.Module,
        facts: ModelFacts,
        layer: Layer,
        group: list[RowProduct],
        all_products: list[RowProduct],
        tp_size: int,
    ) -> None:
        self.model, self.facts, self.layer, self.group, self.tp_size = model, facts, layer, group, tp_size
        self.shapes = {fqn: shape for fqn, _, _, shape in facts.parameters()}
        rows = {product.parameter for product in all_products}
        united = _united(group)
        self.required_indices = {
            name: required for name, required in united.items() if required.is_split and name not in rows
        }
        others = [product for product in all_products if product not in group]
        self.reachability = Reachability(model, layer, group, self.required_indices, tp_size, others=others)
        self.styler = Styler(facts, layer.fqn, tp_size)

    def block(self) -> Block:
        parameters = frozenset(self.required_indices) | {product.parameter for product in self.group}
        return Block(
            layer=self.layer.fqn,
            candidates=tuple(self._candidates()),
            parameters=parameters,
            key=tuple(sorted(product.parameter.removeprefix(f"{self.layer.fqn}.") for product in self.group)),
        )

    def _candidates(self) -> Iterator[Plan]:
        attributes = guess_attributes(self.facts, self.reachability, limit=_MAX_GUESSES)
        for position, entries in enumerate(find_entries(self.facts, self.reachability)):
            rules, slices = self._rules(entries), tuple(self._slices(entries))
            for guess in attributes if position == 0 else attributes[:_MAX_GUESSES_BELOW]:
                counts = tuple(self._attributes(guess))
                # Blocks of one kind are tried in step, so each has both.
                yield Plan((*rules, *counts, *slices))
                yield Plan((*rules, *counts))
        yield from self._with_local_sizes(attributes)
        gathered = tuple(self._gathered(next(find_entries(self.facts, self.reachability))))
        if gathered:
            yield Plan(gathered)

    def _with_local_sizes(self, attributes: Sequence[Mapping[str, str]]) -> Iterator[Plan]:
        """Where no attribute gives the size that split features are reshaped by: the hidden states may give it."""
        entries = next(find_entries(self.facts, self.reachability))
        reason = "what is split is reshaped by its size"
        hidden = {call.fqn: hidden_name(call) for call in self.layer.calls if entries.get(call.fqn) == "region"}
        names = [f"{fqn}.{name}" for fqn, name in hidden.items() if f"{fqn}.{name}" in self.facts.inputs()]
        local_sizes = [_input(name, "local_size", reason=reason) for name in names]
        rules, slices = self._rules(entries), tuple(self._slices(entries))
        for guess in attributes if local_sizes else ():
            yield Plan((*rules, *self._attributes(guess), *slices, *local_sizes))

    def _attributes(self, guess: Mapping[str, str]) -> Iterator[Rule]:
        reason = "counts what is split"
        return (AttributeRule(name, style, source="structure", reason=reason) for name, style in guess.items())

    def _rules(self, entries: Mapping[str, str]) -> list[Rule]:
        """Of several on one name the last one."""
        return list({rule.pattern: rule for rule in self._found(entries)}.values())

    def _found(self, entries: Mapping[str, str]) -> Iterator[Rule]:
        for entry, edge in entries.items():
            yield _region(entry, edge, reason="everything it is given is used by split parameters alone")
            for name in sorted(self.reachability.bypassing_inputs(entry) or ()) if edge == "region" else ():
                yield _input(f"{entry}.{name}", "aside", reason="it is used after the sum")
        for product in self.group:
            yield from self._row_rules(product, entries)
        weights = [name for name in self.required_indices if self._is_weight(name)]
        covered = {parent_of(name) for name in weights}
        for name, required in self.required_indices.items():
            if name in weights or parent_of(name) not in covered or not name.endswith(".bias"):
                yield from self._column_rules(name, required, entries)
        for entry in (entry for entry, edge in entries.items() if edge == "region_output"):
            for name in find_added(self.reachability, entry):
                yield _weights(name, "added_once", reason="it is added to partial sums")
            for name in find_bypassing_identities(self.model, self.reachability, entry):
                yield _region(name, "moe_identity_expert", reason="its output is added to partial sums")

    def _slices(self, entries: Mapping[str, str]) -> Iterator[Rule]:
        """Inputs of which a rank gets its own part; tried without, too: they may be split where they are made."""
        for name, dim in find_sliced_inputs(self.facts, self.reachability, entries).items():
            if self._is_residual_input(name, entries):
                continue
            yield _input(name, f"split({dim})", reason="each rank uses its own part of it")

    def _is_residual_input(self, name: str, entries: Mapping[str, str]) -> bool:
        owner, _, argument = name.rpartition(".")
        return entries.get(owner) == "region" and argument in (self.reachability.bypassing_inputs(owner) or ())

    def _gathered(self, entries: Mapping[str, str]) -> Iterator[Rule]:
        """Every linear with its outputs gathered: which always works, at the price of a collective for each."""
        names = {*self.required_indices, *(product.parameter for product in self.group)}
        names |= {name for name in self.layer.parameters if is_within(parent_of(name), entries)}
        for owner in sorted({parent_of(name) for name in names if self._is_weight(name)}):
            if _can_gather(self.model, self.facts, owner, self.tp_size):
                yield _weights(owner, "colwise_gather_output", reason="what works on its outputs cannot be split")

    def _is_weight(self, name: str) -> bool:
        return name.endswith(".weight") and self.facts.modules[parent_of(name)].kind in ("linear", "transposed")

    def _row_rules(self, product: RowProduct, entries: Mapping[str, str]) -> Iterator[Rule]:
        reason = f"its {product.features} input features fall into runs that need different rows"
        owner = parent_of(product.parameter)
        if self._is_weight(product.parameter):
            yield _weights(owner, "rowwise_reenter" if product.reenters else "rowwise", reason=reason)
            return
        sections = self.shapes[product.parameter][product.input_dim] // product.features
        yield _weights(product.parameter, str(SplitStyle(product.input_dim, sections)), reason=reason)
        bias = f"{product.module}.bias"
        if product.module == owner and entries.get(owner) == "all_reduce" and bias in self.shapes:
            yield _weights(bias, "added_once", reason="it is added to partial sums")

    def _column_rules(self, name: str, required: RequiredIndices, entries: Mapping[str, str]) -> Iterator[Rule]:
        owner = parent_of(name)
        if self._is_norm(owner):
            yield _weights(owner, "norm_split", reason="it normalises split features")
            return
        names = [name]
        if self._is_weight(name):
            # Where the module's own rule says that it is entered, its parameters have theirs.
            names = [f"{owner}.{own}" for own in self.facts.modules[owner].parameters] if owner in entries else [owner]
        style, reason = self.styler.style(name, required), "each rank's features depend on their own part of it"
        yield from (_weights(each, style, reason=reason) for each in names)

    def _is_norm(self, owner: str) -> bool:
        try:
            recognise_norm(self.model.get_submodule(owner))
        except UnsupportedError:
            return False
        return True


def _united(group: Sequence[RowProduct]) -> dict[str, RequiredIndices]:
    """What each rank must hold for all row products of a block together."""
    united: dict[str, RequiredIndices] = {}
    for product in group:
        for name, required in product.required_indices.items():
            known = united.get(name)
            if known is None:
                united[name] = required
            elif known.dim == required.dim:
                united[name] = known.united(required)
    return united
