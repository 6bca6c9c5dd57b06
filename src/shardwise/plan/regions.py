"""Where the split regions of a model are: the modules at whose edges the collectives sit.

# [Note: partial inside]
Inside a region every rank computes with its own heads or features, and every gradient is partial: the ranks' values add
up to the true one. That holds for activations and for parameters alike, so one collective on the region's input settles
all projections that read it, and a parameter that stays whole inside a region (a q/k norm, an MLA latent projection, a
router, a sink) needs just one sum in the gradient phase. Nothing inside reduces on its own. This is why q, k and v cost
one all-reduce and not three, and why no style needs special treatment for a replicated parameter.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from shardwise.plan.spec import Rule
from shardwise.plan.structure import ModelFacts, parent_of

__all__ = ["COLUMN_STYLES", "GATHERED_STYLES", "ROW_STYLES", "Region", "find_regions"]

COLUMN_STYLES = frozenset({"colwise", "packed_colwise", "qkv_colwise"})
ROW_STYLES = frozenset({"rowwise", "rowwise_reenter", "packed_rowwise"})
GATHERED_STYLES = frozenset({"colwise_gather_output", "colwise_rep"})


@dataclass(frozen=True, kw_only=True)
class Region:
    """A module whose inside is split.

    Attributes:
        fqn: the module; its floating-point inputs enter the region.
        edge: where the region is left: "row" at the row-split modules inside it, "output" at its own output, "gather"
            at its own output by joining the parts, "open" nowhere (what follows works on the split features).
    """

    fqn: str
    edge: str


def find_regions(facts: ModelFacts, rules: Mapping[str, Rule]) -> tuple[Region, ...]:
    """The regions that the column- and row-split rules imply, outermost only, in model order.

    A column-split linear belongs to the nearest ancestor that also holds a row-split one (attention, MLP); where a
    layer comes first, the linear is a region of its own.

    Args:
        rules: FQN of a module or parameter to the rule that governs it; the head's is not among them.
    """
    regions: dict[str, Region] = {}
    given = [name for name, rule in rules.items() if rule.style in ("region", "region_output")]
    rows = {name for name, rule in rules.items() if rule.style in ROW_STYLES}
    for name, rule in rules.items():
        if name not in facts.modules and rules.get(parent_of(name)) is rule:
            continue  # the weight or bias of a module that the same rule governs
        if rule.style in ("region", "region_output"):
            regions[name] = Region(fqn=name, edge="row" if rule.style == "region" else "output")
        elif rule.style in COLUMN_STYLES and not any(name == fqn or _is_below(name, fqn) for fqn in given):
            region = _enclosing(name, facts, rows)
            regions.setdefault(region.fqn, region)
        elif rule.style in GATHERED_STYLES:
            regions.setdefault(name, Region(fqn=name, edge="gather"))
    for name, rule in rules.items():
        if rule.style == "moe_tp_experts" and not any(name == fqn or _is_below(name, fqn) for fqn in given):
            _lift_experts(name, facts, regions)
    outermost = [region for region in regions.values() if not any(_is_below(region.fqn, other) for other in regions)]
    order = {name: position for position, name in enumerate(facts.modules)}
    return tuple(sorted(outermost, key=lambda region: order[region.fqn]))


def _enclosing(name: str, facts: ModelFacts, rows: set[str]) -> Region:
    own = name if name in facts.modules else parent_of(name)
    ancestor = parent_of(own) if name in facts.modules else own
    while ancestor and ancestor not in facts.layers:
        if any(_is_below(row, ancestor) for row in rows):
            return Region(fqn=ancestor, edge="row")
        ancestor = parent_of(ancestor)
    return Region(fqn=own, edge="open")


def _lift_experts(experts: str, facts: ModelFacts, regions: dict[str, Region]) -> None:
    """Makes the mixture-of-experts block the region, router and shared experts included, where it is a module."""
    block = parent_of(experts)
    if not block or block in facts.layers or facts.modules[block].kind == "list":
        regions[experts] = Region(fqn=experts, edge="output")
    else:
        regions[block] = Region(fqn=block, edge="output")


def _is_below(fqn: str, ancestor: str) -> bool:
    return fqn.startswith(f"{ancestor}.")
