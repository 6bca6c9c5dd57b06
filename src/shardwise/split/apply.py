"""The spine: what splitting a model does, step by step."""

from __future__ import annotations

from torch import nn

from shardwise.errors import PlanError, UnsupportedError
from shardwise.layers.context import SplitContext
from shardwise.layers.registry import Registry, attach_registry, is_split
from shardwise.mesh import Mesh
from shardwise.plan.resolve import resolve
from shardwise.plan.spec import Plan
from shardwise.split.door import guard_door
from shardwise.split.facts import read_facts
from shardwise.split.sequence import apply_sequence_parallelism, is_direct
from shardwise.split.tensor import apply_tensor_parallelism, cut_parameters
from shardwise.topology.axes import UNSERVED_AXES
from shardwise.topology.shape import MeshShape

__all__ = ["apply_layout", "check_axes"]


def apply_layout(model: nn.Module, mesh: Mesh, rules: Plan, *, sequence_parallel: bool = False) -> Registry:
    """Splits `model` (real or meta) over `mesh` in place by `rules`; parameter names stay.

    Every rank decides the same from the same shapes, before anything is communicated or changed.

    Raises:
        PlanError: the plan cannot be followed; lists every problem.
        UnsupportedError: the layout has an axis that is not supported yet.
    """
    check_axes(mesh.shape)
    if is_split(model):
        raise PlanError(f"this {type(model).__name__} is split already", fix="split a model once, from its whole form")
    facts = read_facts(model)
    tp_size = mesh.size("tp")
    split_plan = resolve(rules, facts, tp_size=tp_size, sequence_parallel=sequence_parallel)

    context = SplitContext(
        group=mesh.group("tp"),
        size=tp_size,
        coord=mesh.coord("tp"),
        mesh=mesh.tensor_mesh,
        has_dropout=_has_dropout(model),
    )
    registry = Registry(mesh=mesh, plan=split_plan, context=context, tied=facts.tied)
    direct = is_direct(model, split_plan, facts.embedding)
    cut_parameters(model, registry)
    if tp_size > 1:
        apply_tensor_parallelism(model, registry)
        apply_sequence_parallelism(model, registry, embedding=facts.embedding if direct else None)
    attach_registry(model, registry)
    guard_door(model, registry)
    model.register_forward_hook(lambda *_: context.forget_forward(), always_call=True)
    return registry


def check_axes(shape: MeshShape) -> None:
    """Raises `UnsupportedError` where the layout has an axis that nothing serves yet."""
    waiting = {axis: shape.size(axis) for axis in UNSERVED_AXES if shape.size(axis) > 1}
    if waiting:
        raise UnsupportedError(
            f"layout {shape} uses " + ", ".join(f"{axis}{size}" for axis, size in waiting.items()),
            why="only ddp, fsdp and tp are supported so far",
            fix=f"use fsdp{shape.world_size} or tp{shape.world_size}",
        )


def _has_dropout(model: nn.Module) -> bool:
    """Whether anything in the model draws random numbers in training, as far as modules and configs say."""
    if any(isinstance(module, nn.Dropout) and module.p > 0 for module in model.modules()):
        return True
    owners = [getattr(model, "config", None), *model.modules()]
    return any(
        isinstance(value, float) and value > 0 and ("drop" in name or "jitter" in name)
        for owner in owners
        if owner is not None
        for name, value in vars(owner).items()
    )
