"""A plan from structure: what a tiny twin's graph says can be split, as rules.

Takes the row products and holdings of `shardwise.split.influence` and names them: which module a region is entered at, which
style splits each parameter, which integer attributes of modules count what is split. Attributes are the one thing a graph
does not tell; candidates are tried by whoever can run the split (`candidates` yields plans, best guess first).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from shardwise.errors import LayoutError, PlanError
from shardwise.layers.norm import recognise_norm
from shardwise.errors import UnsupportedError
from shardwise.layout.placement import Split, equal_sections
from shardwise.plan.features import feature_split, qkv_split
from shardwise.plan.spec import Plan, Rule
from shardwise.plan.split_style import SplitStyle
from shardwise.plan.structure import Heads, ModelFacts, parent_of
from shardwise.split.influence import Holding, RowProduct
from shardwise.split.trace import Layer

__all__ = ["Block", "find_blocks"]

_MAX_SECTIONS = 8
_MAX_SEARCHED = 7
"""Up to so many attributes every choice of them is tried, where no guess fits."""
_COUNT_NAMES = ("head", "group", "num_blocks")


@dataclass(eq=False)
class Block:
    """One region of one layer, ready to be tried.

    Attributes:
        layer: FQN of the layer.
        rules: what splits it, attributes aside.
        attributes: guesses of which attributes to divide, best first.
        bytes_split: elements of the parameters it splits.
    """

    layer: str
    rules: tuple[Rule, ...]
    attributes: tuple[tuple[str, ...], ...]
    num_elements: int
    parameters: frozenset[str] = field(default_factory=frozenset)
    key: tuple[str, ...] = ()

    def plans(self) -> Iterator[Plan]:
        """The block's plan with each guess of the attributes to divide."""
        for names in self.attributes:
            divided = tuple(_rule(name, "divided", "counts what is split") for name in names)
            yield Plan((*self.rules, *divided))


def find_blocks(
    model: nn.Module, facts: ModelFacts, products: Sequence[RowProduct], layers: Sequence[Layer], *, parts: int
) -> list[Block]:
    """The blocks of every layer: row products that need the same split weights are one."""
    blocks = []
    for layer in layers:
        own = [product for product in products if product.layer == layer.fqn]
        for group in _groups(own):
            blocks.append(_Builder(model, facts, layer, group, own, parts).block())
    return blocks


def _groups(products: list[RowProduct]) -> list[list[RowProduct]]:
    groups: list[list[RowProduct]] = []
    for product in products:
        together = [group for group in groups if any(set(other.holdings) & set(product.holdings) for other in group)]
        merged = [product, *(other for group in together for other in group)]
        groups = [group for group in groups if group not in together] + [merged]
    return groups


def _rule(pattern: str, style: str, reason: str) -> Rule:
    return Rule(pattern, style, source="structure", reason=reason)


class _Builder:
    def __init__(
        self,
        model: nn.Module,
        facts: ModelFacts,
        layer: Layer,
        group: list[RowProduct],
        all_products: list[RowProduct],
        parts: int,
    ) -> None:
        self.model, self.facts, self.layer, self.group, self.parts = model, facts, layer, group, parts
        self.shapes = {fqn: shape for fqn, _, _, shape in facts.parameters()}
        self.holdings: dict[str, Holding] = {}
        for product in group:
            for name, holding in product.holdings.items():
                known = self.holdings.get(name)
                if known is None:
                    self.holdings[name] = holding
                elif known.dim == holding.dim:
                    ranks = tuple(a | b for a, b in zip(known.ranks, holding.ranks, strict=True))
                    self.holdings[name] = Holding(dim=known.dim, size=known.size, ranks=ranks)
        rows = {product.parameter for product in all_products}
        self.holdings = {name: holding for name, holding in self.holdings.items() if holding.is_split and name not in rows}

    def block(self) -> Block:
        rules: dict[str, Rule] = {}
        for product in self.group:
            rules |= self._row_rules(product)
        weights = [name for name in self.holdings if self._is_weight(name)]
        covered = {parent_of(name) for name in weights}
        entries = self._entries()
        for entry, edge in entries.items():  # first: a rule on a parameter of the same module must win
            rules[entry] = _rule(entry, edge, "everything it is given is used by split parts alone")
        for name, holding in self.holdings.items():
            if name in weights or parent_of(name) not in covered or not name.endswith(".bias"):
                rules |= self._column_rule(name, holding, entries)
        parameters = frozenset(self.holdings) | {product.parameter for product in self.group}
        return Block(
            layer=self.layer.fqn,
            rules=tuple(rules.values()),
            attributes=tuple(self._attribute_guesses()),
            num_elements=sum(torch.Size(self.shapes[name]).numel() for name in parameters),
            parameters=parameters,
            key=tuple(sorted(product.parameter.removeprefix(f"{self.layer.fqn}.") for product in self.group)),
        )

    def _is_weight(self, name: str) -> bool:
        return name.endswith(".weight") and self.facts.modules[parent_of(name)].kind in ("linear", "transposed")

    def _row_rules(self, product: RowProduct) -> dict[str, Rule]:
        reason = f"its {product.features} input features fall into runs that need different rows"
        if self._is_weight(product.parameter):
            style = "rowwise_reenter" if product.reenters else "rowwise"
            owner = parent_of(product.parameter)
            return {owner: _rule(owner, style, reason)}
        return {product.parameter: _rule(product.parameter, str(SplitStyle(product.input_dim)), reason)}

    def _column_rule(self, name: str, holding: Holding, entries: Mapping[str, str]) -> dict[str, Rule]:
        owner = parent_of(name)
        if self._is_norm(name, holding):
            return {owner: _rule(owner, "norm_split", "it normalises split features")}
        style, reason = self._style(name, holding), "each rank's features depend on their own part of it"
        if not self._is_weight(name):
            return {name: _rule(name, style, reason)}
        if owner not in entries:
            return {owner: _rule(owner, style, reason)}
        # The module's own rule says that it is entered; then its parameters have theirs.
        names = [f"{owner}.{own}" for own in self.facts.modules[owner].parameters]
        return {each: _rule(each, style, reason) for each in names}

    def _is_norm(self, name: str, holding: Holding) -> bool:
        module = self.model.get_submodule(parent_of(name))
        weight = module._parameters.get("weight")
        if weight is None or weight.ndim != 1 or any(True for _ in module.children()):
            return False
        try:
            recognise_norm(module)
        except (UnsupportedError, RuntimeError, TypeError):
            return False
        return True

    def _style(self, name: str, holding: Holding) -> str:
        """The style whose placement holds what every rank needs, and least beside."""
        heads = self._heads(parent_of(name))
        size, dim = self.shapes[name][holding.dim], holding.dim
        candidates: list[tuple[str, Split]] = []
        for given in dict.fromkeys((heads, None)):
            try:
                candidates.append((str(SplitStyle(dim)), feature_split(dim, size, heads=given, tp_size=self.parts)))
            except (PlanError, LayoutError):
                continue
            if given is heads:
                break
        for sections in range(2, _MAX_SECTIONS + 1):
            if size % sections == 0:
                split = equal_sections(dim, size, num_sections=sections, parts=self.parts)
                candidates.append((str(SplitStyle(dim, sections)), split))
        kind = self.facts.modules[parent_of(name)].kind
        if heads is not None and dim == (1 if kind == "transposed" else 0):
            try:
                candidates.append(("qkv_colwise", qkv_split(dim, size, heads=heads, tp_size=self.parts)))
            except (PlanError, LayoutError):
                pass
        fitting = [(_held(split), style) for style, split in candidates if _covers(split, holding)]
        exact = sum(len(indices) for indices in holding.ranks)
        if fitting and min(fitting)[0] <= max(exact * 1.1, size):
            return min(fitting, key=lambda each: each[0])[1]
        return str(SplitStyle(dim, 1, _intervals(holding)))

    def _heads(self, module: str) -> Heads | None:
        while module and module != self.layer.fqn:
            if self.facts.modules[module].heads is not None:
                return self.facts.modules[module].heads
            module = parent_of(module)
        return None

    def _entries(self) -> dict[str, str]:
        """Modules at which the region is entered, to their style: the highest that lead nowhere but to its row products."""
        owners = self._entry_owners()
        bare = [product for product in self.group if not self._is_weight(product.parameter)]
        owners |= {product.module for product in bare}
        entries: dict[str, str] = {}
        for owner in sorted(owners):
            highest, module = owner, owner
            while module and module != self.layer.fqn:
                if self.facts.modules[module].kind != "list" and self._leads_only_to_rows(module):
                    highest = module
                module = parent_of(module)
            holds_bare = any(product.module == highest or product.module.startswith(f"{highest}.") for product in bare)
            entries[highest] = "region_output" if holds_bare else "region"
        return {name: edge for name, edge in entries.items() if not any(name.startswith(f"{other}.") for other in entries)}

    def _entry_owners(self) -> set[str]:
        """Modules whose split weights multiply something whole."""
        parameters = dict(self.model.named_parameters())
        split = [parameters[name] for name in self.holdings if parameters[name].requires_grad]
        owners = set()
        for use in self.layer.uses:
            holding = self.holdings.get(use.parameter)
            if holding is None or (holding.dim == use.input_dim and parameters[use.parameter].ndim == 2):
                continue
            if not use.x.requires_grad:
                owners.add(use.module)
                continue
            gradients = torch.autograd.grad(use.x.sum(), split, retain_graph=True, allow_unused=True)
            if all(gradient is None or not bool((gradient != 0).any()) for gradient in gradients):
                owners.add(use.module)
        return owners

    def _leads_only_to_rows(self, module: str) -> bool:
        """Whether nothing that `module` is given reaches the layer's outputs past the (cut) row products."""
        calls = [call for call in self.layer.calls if call.fqn == module]
        inputs = [value for call in calls for value in call.inputs]
        outputs = [value for value in self.layer.outputs if value.requires_grad and value.grad_fn is not None]
        if not inputs or not outputs:
            return bool(calls) and not outputs
        total = sum(((value * _signs(value)).sum() for value in outputs), torch.zeros(()))
        if not total.requires_grad:
            return True
        inputs = [value for value in inputs if value.requires_grad]
        if not inputs:
            return True
        gradients = torch.autograd.grad(total, inputs, retain_graph=True, allow_unused=True)
        return all(gradient is None or not bool((gradient != 0).any()) for gradient in gradients)

    def _attribute_guesses(self) -> list[tuple[str, ...]]:
        modules = {self.layer.fqn}
        for name in (*self.holdings, *(product.parameter for product in self.group)):
            module = parent_of(name)
            while len(module) > len(self.layer.fqn):
                modules.add(module)
                module = parent_of(module)
        sizes = {holding.size for holding in self.holdings.values()} | {product.features for product in self.group}
        counts, features = [], []
        for module in sorted(modules):
            facts = self.facts.modules[module]
            if facts.kind in ("linear", "transposed", "embedding"):
                continue
            for name, value in facts.attributes.items():
                if value % self.parts or name.rpartition(".")[2] in _NEVER:
                    continue
                if any(part in name for part in _COUNT_NAMES) and not name.endswith(("dim", "size")):
                    counts.append(f"{module}.{name}")
                elif value in sizes:
                    features.append(f"{module}.{name}")
        own = [name for name in features if ".config." not in name]
        guesses: list[tuple[str, ...]] = [
            (),
            tuple(name for name in counts if ".config." not in name),
            tuple(counts),
            (*(name for name in counts if ".config." not in name), *own),
            (*counts, *features),
            tuple(own),
            tuple(features),
        ]
        candidates = [name for name in (*counts, *features) if ".config." not in name]
        for size in range(1, len(candidates) + 1) if len(candidates) <= _MAX_SEARCHED else ():
            guesses += itertools.combinations(candidates, size)
        return list(dict.fromkeys(tuple(sorted(guess)) for guess in guesses))


_NEVER = frozenset({"layer_idx", "layer_index", "head_dim", "num_key_value_groups", "attention_head_size", "head_size"})


def _signs(value: torch.Tensor) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.rand(value.shape, generator=generator) + 0.5


def _covers(split: Split, holding: Holding) -> bool:
    for rank, indices in enumerate(holding.ranks):
        held = {index for start, stop in split.pieces[rank] for index in range(start, stop)}
        if not indices <= held:
            return False
    return True


def _held(split: Split) -> int:
    return sum(stop - start for intervals in split.pieces for start, stop in intervals)


def _intervals(holding: Holding) -> tuple[tuple[tuple[int, int], ...], ...]:
    """Each rank's indices as runs; indices that nobody seems to need stay with the neighbour before them."""
    needed = [set(indices) for indices in holding.ranks]
    known = set().union(*needed)
    last: list[int] = [0]
    for index in range(holding.size):
        if index in known:
            last = [rank for rank, indices in enumerate(holding.ranks) if index in indices]
        else:
            for rank in last:
                needed[rank].add(index)
    runs = []
    for indices in needed:
        ordered = sorted(indices)
        found: list[tuple[int, int]] = []
        for index in ordered:
            if found and found[-1][1] == index:
                found[-1] = (found[-1][0], index + 1)
            else:
                found.append((index, index + 1))
        runs.append(tuple(found))
    return tuple(runs)
