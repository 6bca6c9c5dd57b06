"""Storage of every parameter: the one place that converts styles to placements."""

import functools
from collections.abc import Mapping
from dataclasses import dataclass

from shardwise.errors import LayoutError, PlanError
from shardwise.plan.decision import ParameterPlan
from shardwise.plan.regions import COLUMN_STYLES, Region, SequencePlan, region_around
from shardwise.plan.rule import ParameterRule, SplitStyle
from shardwise.plan.structure import Heads, ModelFacts, Shape, parent_of, upwards
from shardwise.sharding.layout import Layout, Step
from shardwise.sharding.placement import (
    Placement,
    Replicate,
    Split,
    equal_sections,
    split_blocks,
    split_even,
    split_heads,
    split_sections,
)


def _is_legal(heads: Heads, num_parts: int) -> bool:
    """Returns whether query heads divide among `num_parts` ranks, and key/value heads divide or replicate evenly."""
    kv = heads.num_key_value_heads
    return heads.num_heads % num_parts == 0 and (kv % num_parts == 0 or num_parts % kv == 0)


def check_heads(heads: Heads, num_parts: int) -> tuple[str, str] | None:
    """Returns the reason and remedy if `heads` cannot be divided among `num_parts` ranks; None if they can."""
    if _is_legal(heads, num_parts):
        return None
    reasons = []
    if heads.num_heads % num_parts:
        reasons.append(f"{heads.num_heads} query heads do not divide among {num_parts} ranks")
    kv = heads.num_key_value_heads
    if kv % num_parts and num_parts % kv:
        reasons.append(
            f"{kv} key-value heads do not divide among {num_parts} ranks, and {num_parts} is not a multiple of {kv}"
        )
    sizes = ", ".join(str(size) for size in range(1, heads.num_heads + 1) if _is_legal(heads, size))
    return "; ".join(reasons), f"use tp_size {sizes}, or replicate this attention with the style replicate"


def local_heads(heads: Heads, num_parts: int) -> Heads:
    """Returns the heads of one rank."""
    return Heads(
        num_heads=heads.num_heads // num_parts,
        num_key_value_heads=max(1, heads.num_key_value_heads // num_parts),
        head_dim=heads.head_dim,
    )


def feature_split(dim: int, size: int, *, heads: Heads | None, num_parts: int) -> Split:
    """Returns the split of a feature dim of `size`: by query heads, by key/value heads, or without heads."""
    if heads is None:
        if size < num_parts:
            raise PlanError(
                f"{size} features cannot be split over tp={num_parts}", why="a rank would hold none of them"
            )
        return split_even(dim, size, parts=num_parts)
    kv, head_dim = heads.num_key_value_heads, heads.head_dim
    if head_dim is not None and size == kv * head_dim:
        return split_heads(dim, kv, head_dim=head_dim, parts=num_parts)
    if size % heads.num_heads == 0:
        return split_blocks(dim, heads.num_heads, block_size=size // heads.num_heads, parts=num_parts)
    if size % kv == 0:
        return split_heads(dim, kv, head_dim=size // kv, parts=num_parts)
    raise PlanError(
        f"{size} features do not divide into heads",
        why=f"the module has {heads.num_heads} query and {kv} key-value heads"
        + (f" of {head_dim} features" if head_dim else ""),
        fix='replicate it with the style "replicate", or split its features in plain runs in a block without heads',
    )


def qkv_split(dim: int, size: int, *, heads: Heads | None, num_parts: int) -> Split:
    """Returns the split of a fused `[q | k | v]` dim, each section by its own heads."""
    if heads is None:
        raise PlanError("qkv_colwise needs the heads of the module it is in", why="no head counts were found on it")
    num_blocks = heads.num_heads + 2 * heads.num_key_value_heads
    if size % num_blocks:
        raise PlanError(
            f"{size} features are not q, k and v sections",
            why=f"{heads.num_heads} query and 2 x {heads.num_key_value_heads} key-value heads make {num_blocks} heads",
        )
    head_dim = size // num_blocks
    kv = split_heads(dim, heads.num_key_value_heads, head_dim=head_dim, parts=num_parts)
    return split_sections(dim, [split_blocks(dim, heads.num_heads, block_size=head_dim, parts=num_parts), kv, kv])


VOCABULARY_STYLES = frozenset({"embedding_rowwise", "colwise_gather_output", "colwise"})
OUTSIDE = "no rule splits it: it works on full features, outside of the split regions"
_INSIDE = "no rule splits it: every rank's part of the region reads all of it; its gradient is summed"


@dataclass(frozen=True, kw_only=True)
class ParameterRules:
    """Everything that determines parameters: their rules, the regions and head around them, and the sequence.

    Attributes:
        head: the output embedding if it is split over the vocabulary.
    """

    facts: ModelFacts
    rules: Mapping[str, ParameterRule]
    regions: Mapping[str, Region]
    head: str | None
    sequence: SequencePlan | None
    num_parts: int

    def plan(self, fqn: str, shape: Shape) -> ParameterPlan:
        """Returns the plan of the parameter `fqn` with the full `shape`."""
        module = parent_of(fqn)
        rule = self.rules.get(fqn) or self.rules.get(module)
        if rule is None:
            why = _INSIDE if region_around(module, self.regions) else OUTSIDE
            why = why if self.num_parts > 1 else "there is one rank"
            rule = ParameterRule(fqn, "replicate", source="facts", reason=why)
        try:
            placement = self._placement(rule, fqn, shape)
        except (PlanError, LayoutError) as error:
            raise PlanError(
                f"cannot split {fqn} over tp={self.num_parts}: {error.summary}",
                at=f"{rule.place} on {fqn} {list(shape)}",
                why=error.why,
                fix=error.fix,
            ) from error
        steps = (Step(("tp",), (self.num_parts,), placement),) if self.num_parts > 1 else ()
        gradient = self._gradient(rule, fqn, placement)
        return ParameterPlan(fqn=fqn, layout=Layout(shape, steps), rule=rule, gradient=gradient)

    def _placement(self, rule: ParameterRule, fqn: str, shape: Shape) -> Placement:
        style, num_parts, split = rule.kind, self.num_parts, rule.split
        module, _, name = fqn.rpartition(".")
        last = len(shape) - 1
        is_transposed = self.facts.modules[module].kind == "transposed"
        out_dim = last if is_transposed else max(0, last - 1)
        in_dim = out_dim - 1 if is_transposed else last
        if module == self.head or style == "embedding_rowwise" or fqn in self._of_head:
            return split_even(0, shape[0], parts=num_parts)
        if style == "embedding_colwise":
            return feature_split(last, shape[last], heads=None, num_parts=num_parts)
        heads = self._heads_around(module)
        if split is not None:
            return self._placement_of(split, name, shape, heads)
        if style == "packed_colwise":
            return equal_sections(out_dim, shape[out_dim], num_sections=2, parts=num_parts)
        if style == "qkv_colwise":
            return qkv_split(out_dim, shape[out_dim], heads=heads, num_parts=num_parts)
        if style in COLUMN_STYLES or style in ("colwise_gather_output", "norm_split"):
            return feature_split(out_dim, shape[out_dim], heads=heads, num_parts=num_parts)
        if not rule.splits or len(shape) == 1 or name == "bias":  # biases of row-split linears are added once
            return Replicate()
        if style == "packed_rowwise":
            return equal_sections(in_dim, shape[in_dim], num_sections=2, parts=num_parts)
        return feature_split(in_dim, shape[in_dim], heads=heads, num_parts=num_parts)

    @functools.cached_property
    def _of_head(self) -> frozenset[str]:
        """The head's parameters that other modules share."""
        return frozenset(canonical for alias, canonical in self.facts.tied.items() if parent_of(alias) == self.head)

    def _placement_of(self, style: SplitStyle, name: str, shape: Shape, heads: Heads | None) -> Placement:
        """Returns the placement for a `split(...)` style. A bias has the output dim of its weight."""
        if style.dim >= len(shape):
            if name != "bias":
                raise PlanError(f"it has no dim {style.dim}", why=f"its shape is {list(shape)}")
            style = SplitStyle(0, style.num_sections, style.pieces)
        size = shape[style.dim]
        if style.pieces is not None:
            if len(style.pieces) != self.num_parts:
                raise PlanError(f"the rule spells out {len(style.pieces)} ranks", why=f"tp is {self.num_parts}")
            return Split(style.dim, style.pieces)
        if style.num_sections > 1:
            return equal_sections(style.dim, size, num_sections=style.num_sections, parts=self.num_parts)
        return feature_split(style.dim, size, heads=heads, num_parts=self.num_parts)

    def _gradient(self, rule: ParameterRule, fqn: str, placement: Placement) -> str:
        """Returns "partial" or "full". A split parameter's gradient is full, except that of replicated heads."""
        if self.num_parts == 1 or isinstance(placement, Split):
            return "full"
        module, _, name = fqn.rpartition(".")
        region = region_around(module, self.regions)
        is_left = region is not None and region.edge == "row" and rule.kind in ("rowwise", "packed_rowwise")
        is_inside = region is not None and not (is_left and name == "bias")
        if is_inside or rule.style in ("replicated_with_grad_allreduce", "added_once"):
            return "partial"
        return "partial" if self.sequence is not None and self.sequence.stack_of(module) is not None else "full"

    def _heads_around(self, module: str) -> Heads | None:
        """Returns the heads of the nearest enclosing module that has any, inside its region."""
        region = region_around(module, self.regions)
        for name in upwards(module):
            heads = self.facts.modules[name].heads
            if heads is not None or (region is not None and name == region.fqn):
                return heads
        return None


def complete_ties(rules: Mapping[str, ParameterRule], facts: ModelFacts) -> dict[str, ParameterRule]:
    """Returns `rules` with a rule for each module whose parameter is tied to that of a module with a rule.

    Embeddings and heads that share a weight are split alike. A parameter that one module splits is also split for the
    modules that never use it.
    """
    rules = dict(rules)
    tied: dict[str, set[str]] = {}
    for alias, canonical in facts.tied.items():
        if alias.endswith(".weight") and canonical.endswith(".weight"):
            tied.setdefault(canonical, {parent_of(canonical)}).add(parent_of(alias))
    for modules in tied.values():
        split = (name for name in sorted(modules) if name in rules and rules[name].style in VOCABULARY_STYLES)
        given = next(split, None)
        for name in modules if given is not None else ():
            is_embedding = facts.modules[name].kind == "embedding"
            style = "embedding_rowwise" if is_embedding else "colwise_gather_output"
            rules.setdefault(name, ParameterRule(name, style, source="structure", reason=f"tied to {given}"))
    for pair in facts.tied.items():
        for name, other in (pair, pair[::-1]):
            rule = rules.get(other)
            if rule is not None and rule.split is not None:
                reason = f"tied to {other}"
                rules.setdefault(name, ParameterRule(name, rule.style, source="structure", reason=reason))
    return rules
