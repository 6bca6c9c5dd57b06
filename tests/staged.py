"""A model cut into stages that run one after another in one process, beside the whole one."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.parallel.stages import keep_stages
from shardwise.plan.pipeline_plan import LayerOrder, PipelinePlan
from shardwise.runtime.stages import Stages


def stages_of(model: nn.Module, order: LayerOrder, starts: Sequence[int] | None = None) -> list[Stages]:
    """A copy of the model for every stage, by default one for every segment."""
    starts = tuple(starts or range(len(order.calls)))
    plan = PipelinePlan(order=order, schedule="1f1b", starts=starts, rank_of=tuple(range(len(starts))))
    return [keep_stages(copy.deepcopy(model), plan, own=(stage,)) for stage in range(len(starts))]


def train(stages: Sequence[Stages], batch: Mapping[str, Any]) -> tuple[Any, list[tuple[Tensor, ...]]]:
    """One forward and backward through all stages, which hand each other detached tensors.

    Returns:
        The output of the last one, and what every cut was crossed by.
    """
    outgoing: list[tuple[Tensor, ...]] = []
    incoming: list[tuple[Tensor, ...]] = [()]
    output: Any = None
    for stage, each in enumerate(stages):
        output = each.run(stage, batch, incoming[-1])
        if stage < len(stages) - 1:
            _, expected = each.shapes(stage, batch)
            assert [(tuple(x.shape), x.dtype) for x in output] == [(x.shape, x.dtype) for x in expected]
            outgoing.append(output)
            pairs = zip(output, expected, strict=True)
            incoming.append(tuple(x.detach().requires_grad_(known.needs_gradient) for x, known in pairs))
    output.loss.backward()
    for sent, received in zip(reversed(outgoing), reversed(incoming), strict=False):
        given = [(x, y.grad) for x, y in zip(sent, received, strict=True) if x.requires_grad and y.grad is not None]
        torch.autograd.backward([x for x, _ in given], [gradient for _, gradient in given])
    return output, outgoing


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
