"""A model in stages, all of them in one process."""

from __future__ import annotations

import copy
from collections.abc import Sequence

from torch import Tensor, nn

from shardwise.parallel.stages import build_local_stages
from shardwise.plan.pipeline_plan import LayerOrder, PipelinePlan
from shardwise.stages.model import Stages

__all__ = ["gradients_of", "stages_of"]


def stages_of(model: nn.Module, order: LayerOrder, starts: Sequence[int] | None = None) -> list[Stages]:
    """A copy of the model for every stage, by default one for every segment."""
    starts = tuple(starts or range(len(order.calls)))
    plan = PipelinePlan(order=order, schedule="1f1b", starts=starts, rank_of=tuple(range(len(starts))))
    return [build_local_stages(copy.deepcopy(model), plan, own=(stage,)) for stage in range(len(starts))]


def gradients_of(stages: Sequence[Stages], whole: nn.Module) -> dict[str, Tensor]:
    """The gradients of all stages together by the names of the whole model, summed over those that hold a parameter."""
    first = {id(each): name for name, each in whole.named_parameters()}
    names = {name: first[id(each)] for name, each in whole.named_parameters(remove_duplicate=False)}
    found: dict[str, Tensor] = {}
    for stage in stages:
        for name, parameter in stage.model.named_parameters():
            if parameter.grad is not None:
                own = names[name]
                found[own] = found[own] + parameter.grad if own in found else parameter.grad
    return found
