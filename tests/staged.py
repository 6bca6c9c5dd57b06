"""Every layer a stage of its own over simulated tensor-parallel ranks, in one process."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.comm.simulated import SimulatedGroup, run_ranks
from shardwise.mesh import Mesh
from shardwise.optim.gradients import track_gradients
from shardwise.parallel.apply import apply_plan
from shardwise.parallel.facts import decide_split, read_facts
from shardwise.parameters.canonical import canonical_tensor
from shardwise.plan.options import ParallelSpec, Pipeline
from shardwise.probe.layer_order import find_layer_order, train_in_stages
from shardwise.probe.trial import SimulatedMesh
from shardwise.runtime.adapter_facts import without_adapters
from shardwise.search.planning import plan_for
from shardwise.topology.shape import MeshShape


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
    order = find_layer_order(without_adapters(model))
    num_stages = len(order.calls)
    rules = plan_for(model, spec, num_parts=2)
    plan = decide_split(
        rules,
        model,
        read_facts(model),
        MeshShape(pp_size=num_stages, tp_size=2),
        replace(spec, pipeline=Pipeline(layers=tuple(range(num_stages)))),
        order=order,
    )

    def rank(group: SimulatedGroup) -> tuple[float, dict[str, Tensor]]:
        copies = [copy.deepcopy(model) for _ in range(num_stages)]
        meshes = [StageMesh(group, num_stages=num_stages, stage=stage) for stage in range(num_stages)]
        registries = [apply_plan(each, mesh, plan, spec) for each, mesh in zip(copies, meshes, strict=True)]
        sums = [track_gradients(each, registry) for each, registry in zip(copies, registries, strict=True)]
        stages = [registry.stages for registry in registries if registry.stages is not None]
        with ExitStack() as stack:
            for each in sums:
                stack.enter_context(each.no_sync())
            output, _ = train_in_stages(stages, batch)
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
