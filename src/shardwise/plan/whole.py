"""Why a parameter that no rule names stays whole, told by where it stands. Nobody should have to guess that."""

from __future__ import annotations

from shardwise.plan.regions import Region
from shardwise.plan.structure import ModelFacts, Shape, parent_of

__all__ = ["OUTSIDE", "why_whole"]

OUTSIDE = "works on whole features, outside of the split regions"
"""What is said of a matrix of which no more is known than its place."""


def why_whole(facts: ModelFacts, region: Region | None, module: str, shape: Shape) -> str:
    """The reason for a parameter that `module` owns itself, `region` being the region that it is in."""
    if len(shape) > 1 and _chooses_experts(facts, module, shape):
        return "scores experts: every rank needs all of its scores"
    if len(shape) < 2:
        what = "a vector (norm, bias or scale)"
        return (
            f"{what} read whole by every rank's part; its gradient is summed" if region else f"{what} on whole features"
        )
    if region is not None:
        shared = facts.modules[module].kind in ("linear", "transposed") and facts.heads_around(module) is not None
        what = "its outputs are shared by the heads of all ranks" if shared else "every rank's part reads all of it"
        return f"{what}; its gradient is summed"
    if facts.modules[module].kind == "embedding":
        return "a table that is not the vocabulary's, looked up whole"
    if facts.layer_of(module) is not None:
        return OUTSIDE
    return "outside of the layers"


def _chooses_experts(facts: ModelFacts, module: str, shape: Shape) -> bool:
    """Whether the parameter is a matrix with an output for each of the experts beside it, stacked or listed."""
    if len(shape) != 2:
        return False
    num_scores, num_features = sorted(shape)
    while num_scores < num_features and module and module not in facts.layers:
        module = parent_of(module)
        inside = list(facts.inside(module))
        held = (held for name in inside for held in facts.modules[name].parameters.values())
        stacked = {held[0] for held in held if len(held) == 3 and min(held) > 1}
        lists = [name for name in inside if facts.modules[name].kind == "list"]
        listed = {sum(parent_of(name) == each for name in inside) for each in lists}
        if stacked | listed:
            return num_scores in stacked | listed
    return False
