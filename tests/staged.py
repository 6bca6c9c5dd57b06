"""A model cut into stages that run one after another in one process, beside the whole one."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.comm.simulated import SimulatedGroup, run_ranks
from shardwise.mesh import Mesh
from shardwise.parallel.apply import apply_plan
from shardwise.parallel.decide import decide_split
from shardwise.parallel.facts import read_facts
from shardwise.parallel.stages import keep_stages
from shardwise.plan.options import ParallelSpec, Pipeline
from shardwise.plan.pipeline_plan import LayerOrder, PipelinePlan
from shardwise.runtime.canonical import canonical_tensor
from shardwise.runtime.stages import Stages
from shardwise.search.layer_order import find_layer_order
from shardwise.search.planning import plan_for
from shardwise.tiny.simulate import SimulatedMesh
from shardwise.topology.shape import MeshShape
from shardwise.train.gradients import track_gradients


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


class StageMesh(SimulatedMesh):
    """One simulated rank of one stage, whose tensor-parallel group is simulated."""

    def __init__(self, group: SimulatedGroup, *, num_stages: int, stage: int) -> None:
        shape = MeshShape(pp_size=num_stages, tp_size=group.size())
        rank = stage * group.size() + group.rank()
        Mesh.__init__(self, shape, rank=rank, device=torch.device("cpu"), groups={("tp",): group})
        self._group = group


def split_and_train(model: nn.Module, batch: Mapping[str, Any], spec: ParallelSpec) -> tuple[float, dict[str, Tensor]]:
    """Every layer a stage of its own, over two simulated tensor-parallel ranks.

    Returns:
        The loss, and the full gradients by name, summed over stages, of the first rank.
    """
    order = find_layer_order(model)
    num_stages = len(order.calls)
    rules = plan_for(model, spec, tp_size=2)
    plan = decide_split(
        rules,
        model,
        read_facts(model),
        MeshShape(pp_size=num_stages, tp_size=2),
        sequence_parallel=spec.sequence_parallel,
        order=order,
        pipeline=Pipeline(layers=tuple(range(num_stages))),
    )

    def rank(group: SimulatedGroup) -> tuple[float, dict[str, Tensor]]:
        copies = [copy.deepcopy(model) for _ in range(num_stages)]
        meshes = [StageMesh(group, num_stages=num_stages, stage=stage) for stage in range(num_stages)]
        registries = [apply_plan(each, mesh, plan, spec) for each, mesh in zip(copies, meshes, strict=True)]
        sums = [track_gradients(each, registry) for each, registry in zip(copies, registries, strict=True)]
        stages = [registry.stages for registry in registries if registry.stages is not None]
        with ExitStack() as stack:
            for each in sums:
                stack.enter_context(each.together())
            output, _ = train(stages, batch)
        found: dict[str, Tensor] = {}
        for each, registry in zip(copies, registries, strict=True):
            for name, parameter in each.named_parameters():
                entry = registry.entry(name)
                gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                full = canonical_tensor(gradient, entry.tensor_layout, registry.mesh)
                assert full is not None
                found[entry.fqn] = found[entry.fqn] + full if entry.fqn in found else full
        return float(output.loss.detach()), found

    return run_ranks(rank, 2)[0]
