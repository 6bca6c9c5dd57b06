"""A plan to be tried, with what it decides for the tiny model."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from dataclasses import dataclass

from shardwise.plan.decision import ParameterPlan, SplitPlan
from shardwise.plan.spec import Plan
from shardwise.plan.structure import ModelFacts
from shardwise.sharding.placement import Split

__all__ = ["Candidate", "split_share"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Candidate:
    """A plan and its decision: `split` is what `plan`, with the rules of the user on top, resolves to for `facts`."""

    plan: Plan
    split: SplitPlan
    facts: ModelFacts

    @functools.cached_property
    def share(self) -> float:
        """Elements of the split parameters in layers over elements of all in layers."""
        layers = self.split.parameters.items()
        return split_share(planned for fqn, planned in layers if self.facts.layer_of(fqn) is not None)


def split_share(planned: Iterable[ParameterPlan]) -> float:
    """Elements of split parameters over elements of all."""
    sizes = [(math.prod(parameter.shape), isinstance(parameter.placement, Split)) for parameter in planned]
    return sum(size for size, is_split in sizes if is_split) / max(1, sum(size for size, _ in sizes))
