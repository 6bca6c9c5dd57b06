"""Where the split regions of a model are: the modules at whose edges the collectives sit.

# [Note: partial inside]
Inside a region every rank computes with its own heads or features, and every gradient is partial: the ranks' values add
up to the true one. That holds for activations and for parameters alike, so one collective on the region's input settles
all projections that read it, and a parameter replicated inside a region (a q/k norm, an MLA latent projection, a
router, a sink) needs just one sum in the gradient phase. Nothing inside reduces on its own. This is why q, k and v cost
one all-reduce and not three, and why no style needs special treatment for a replicated parameter.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from shardwise.errors import PlanError
from shardwise.plan.rule import ParameterRule, RegionRule
from shardwise.plan.structure import ModelFacts, is_within, outermost, parent_of, upwards

__all__ = ["COLUMN_STYLES", "ROW_STYLES", "Region", "find_deferred_sums", "find_regions", "region_around"]

COLUMN_STYLES = frozenset({"colwise", "packed_colwise", "qkv_colwise"})
ROW_STYLES = frozenset({"rowwise", "rowwise_reenter", "packed_rowwise"})


@dataclass(frozen=True, kw_only=True)
class Region:
    """A module whose inside is split.

    Attributes:
        fqn: the module; its floating-point inputs enter the region.
        edge: where the region is left: "row" at the row-split modules inside it, "output" at its own output, "gather"
            at its own output by gathering the parts, "open" nowhere (what follows works on the split features).
    """

    fqn: str
    edge: str


def find_regions(
    facts: ModelFacts, parameters: Mapping[str, ParameterRule], given: Mapping[str, RegionRule]
) -> dict[str, Region]:
    """The regions that are given, and those that column- and row-split parameters imply: FQN to region, outermost only,
    in model order.

    A column-split linear belongs to the nearest ancestor that also holds a row-split one (attention, MLP); where a
    layer or a container that never runs itself comes first, the linear is a region of its own.

    Args:
        parameters: FQN of a module or parameter to the rule that governs it; the head's is not among them.
    """
    edges = {"region": "row", "region_output": "output"}
    regions = {name: Region(fqn=name, edge=edges[rule.kind]) for name, rule in given.items() if rule.kind in edges}
    said = frozenset(regions)
    rows = {name for name, rule in parameters.items() if rule.kind in ROW_STYLES}
    for name, rule in parameters.items():
        if name not in facts.modules and parameters.get(parent_of(name)) is rule:
            continue  # the weight or bias of a module that the same rule governs
        if rule.style in COLUMN_STYLES and not is_within(name, said):
            region = _enclosing(name, facts, rows)
            regions.setdefault(region.fqn, region)
        elif rule.style == "colwise_gather_output":
            regions.setdefault(name, Region(fqn=name, edge="gather"))
    for name, region_rule in given.items():
        if region_rule.style == "moe_tp_experts" and not is_within(name, said):
            _widen_to_experts_block(name, facts, regions)
    order = {name: position for position, name in enumerate(facts.modules)}
    return {fqn: regions[fqn] for fqn in sorted(outermost(regions), key=order.__getitem__)}


def region_around(module: str, regions: Mapping[str, Region]) -> Region | None:
    """The region that `module` is, or is in."""
    return next((regions[name] for name in upwards(module) if name in regions), None)


def find_deferred_sums(
    facts: ModelFacts,
    parameters: Mapping[str, ParameterRule],
    given: Mapping[str, RegionRule],
    regions: Mapping[str, Region],
) -> tuple[dict[str, str], list[PlanError]]:
    """FQNs of modules that defer their partial sum to another module, to that one's; and what is wrong with the rules.

    A region must be left by a sum at both.
    """

    def is_left_at(module: str) -> bool:
        region = region_around(module, regions)
        if region is not None and region.edge == "output":
            return module == region.fqn
        return module in parameters and parameters[module].kind == "rowwise"

    found: dict[str, str] = {}
    problems = []
    for module, rule in (*parameters.items(), *given.items()):
        if rule.into is None or module not in facts.modules:
            continue
        target = next((name for name in _seen_from(module, rule.into) if name in facts.modules), None)
        why = None
        if target is None:
            why = "no module around it holds one of that name"
        elif not (is_left_at(module) and is_left_at(target)):
            why = "no region is left there by a sum"
        else:
            found[module] = target
        if why is not None:
            problems.append(PlanError(f"{module} cannot be summed with {rule.into}", at=rule.place, why=why))
    return found, problems


def _seen_from(module: str, name: str) -> Iterator[str]:
    """What `name` may mean next to `module`: in the modules around it, from the inside out."""
    while module := parent_of(module):
        yield f"{module}.{name}"


def _enclosing(name: str, facts: ModelFacts, rows: set[str]) -> Region:
    own = name if name in facts.modules else parent_of(name)
    ancestor = parent_of(own) if name in facts.modules else own
    while ancestor and ancestor not in facts.layers and facts.modules[ancestor].kind not in ("list", "dict"):
        if any(is_within(row, (ancestor,)) for row in rows):
            return Region(fqn=ancestor, edge="row")
        ancestor = parent_of(ancestor)
    return Region(fqn=own, edge="open")


def _widen_to_experts_block(experts: str, facts: ModelFacts, regions: dict[str, Region]) -> None:
    """Makes the mixture-of-experts block the region, router and shared experts included, where it is a module."""
    block = parent_of(experts)
    if not block or block in facts.layers or facts.modules[block].kind == "list":
        regions[experts] = Region(fqn=experts, edge="output")
    else:
        regions[block] = Region(fqn=block, edge="output")
