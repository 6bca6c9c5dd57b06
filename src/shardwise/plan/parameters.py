"""Storage of every parameter: the one place that converts styles to placements."""

import functools
from collections.abc import Mapping
from dataclasses import dataclass

from shardwise.errors import LayoutError, PlanError
from shardwise.plan.decision import ParameterPlan
from shardwise.plan.features import feature_split, qkv_split
from shardwise.plan.regions import COLUMN_STYLES, Region, region_around
from shardwise.plan.rule import ParameterRule
from shardwise.plan.sequence_plan import SequencePlan
from shardwise.plan.split_style import SplitStyle
from shardwise.plan.structure import Heads, ModelFacts, Shape, parent_of, upwards
from shardwise.sharding.layout import Layout, Step
from shardwise.sharding.placement import Placement, Replicate, Split, equal_sections, split_even

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
        """Plan of the parameter `fqn` with the full `shape`.

        Raises:
            PlanError: its rule cannot be applied.
        """
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
        """Placement for a `split(...)` style. A bias has the output dim of its weight."""
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
        """Heads of the nearest enclosing module that has any, inside its region."""
        region = region_around(module, self.regions)
        for name in upwards(module):
            heads = self.facts.modules[name].heads
            if heads is not None or (region is not None and name == region.fqn):
                return heads
        return None


def complete_ties(rules: Mapping[str, ParameterRule], facts: ModelFacts) -> dict[str, ParameterRule]:
    """Adds rules for tied parameters of which only one module is said to be split.

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
