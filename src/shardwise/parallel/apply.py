"""The one order in which a model becomes split: every way to a split model ends in `apply_plan`."""

from __future__ import annotations

import torch
from torch import nn

from shardwise.errors import PlanError, UnsupportedError
from shardwise.loss.deferred_logits import apply_deferral
from shardwise.mesh import Mesh
from shardwise.parallel.adapters import apply_adapters
from shardwise.parallel.caches import train_without_cache
from shardwise.parallel.compiled import apply_compilation, check_compilation
from shardwise.parallel.facts import output_head
from shardwise.parallel.fsdp import apply_data_parallelism, check_data_parallelism
from shardwise.parallel.precision import apply_precision
from shardwise.parallel.recompute import apply_recomputation, find_recomputed
from shardwise.parallel.sequence_parallel import apply_sequence_parallelism
from shardwise.parallel.stages import apply_stages, fit_absent
from shardwise.parallel.state_dict_guard import guard_state_dict
from shardwise.parallel.tensor_parallel import apply_tensor_parallelism, check_tensor_parallelism, split_parameters
from shardwise.parameters.registry import Registry, attach_registry, entries_of, is_split, note_parameters
from shardwise.plan.decision import SplitPlan
from shardwise.plan.options import ParallelSpec
from shardwise.runtime.adapters import find_model
from shardwise.runtime.context import SplitContext
from shardwise.runtime.modes import has_dropout
from shardwise.runtime.wrapping import check_unwrapped
from shardwise.topology.axes import UNSERVED_AXES
from shardwise.topology.shape import MeshShape

__all__ = ["apply_plan", "check_axes", "check_unsplit"]


def apply_plan(
    model: nn.Module, mesh: Mesh, plan: SplitPlan, spec: ParallelSpec, *, dtype: torch.dtype | None = None
) -> Registry:
    """Splits `model` (real, meta or fake) over `mesh` in place; parameter names stay. Communicates nothing.

    Foreign stages are released first. Then, from the inside out: tensor and sequence parallelism change modules,
    recomputation and compilation wrap blocks, and FSDP2 comes last, because it gathers a unit before anything in it
    runs, or runs again.

    Args:
        plan: resolved for this model and this mesh, the same on every rank.
        spec: what was asked for; its plan has gone into `plan`.
        dtype: what floating-point parameters are converted to before FSDP2 takes them; their own where None.

    Raises:
        ConfigError: an option names what the model does not have.
        UnsupportedError: it asks for what this torch or device does not have.
    """
    context = SplitContext.of(mesh, has_dropout=has_dropout(model))
    # First all checks, then all edits: a model that cannot be split stays as it is.
    check_compilation(spec.compilation, context)
    check_data_parallelism(model, spec.fsdp, mesh)
    check_tensor_parallelism(model, plan)
    recomputed = find_recomputed(model, plan.stacks, spec.recompute)
    registry = Registry(mesh=mesh, plan=plan, context=context, tied=plan.tied)
    note_parameters(model, registry)
    apply_stages(model, registry)
    head = output_head(find_model(model))
    split_parameters(model, registry)
    if plan.tp_size > 1:
        apply_tensor_parallelism(model, registry)
        apply_sequence_parallelism(model, registry)
    # FSDP2 keeps the head gathered until its backward, but not in pipelines, nor in units that were asked for.
    if mesh.size("fsdp") == 1 or (plan.pipeline is None and spec.fsdp.units is None):
        apply_deferral(head, context, _most_classes(head, context))
    apply_adapters(model, registry)
    attach_registry(model, registry)
    guard_state_dict(model, registry)
    model.register_forward_pre_hook(lambda module, _: context.begin_forward(module), prepend=True)
    model.register_forward_hook(lambda module, *_: context.end_forward(module), always_call=True)
    if dtype is not None:
        model.to(dtype)
    devices = {value.device for value in (*model.parameters(), *model.buffers())} - {mesh.device}
    if devices and torch.device("meta") not in devices:
        model.to(mesh.device)
    apply_precision(model, registry, spec.precision)
    apply_recomputation(model, registry, spec.recompute, recomputed)
    apply_compilation(model, registry, spec.compilation, budget=spec.recompute.budget)
    train_without_cache(model, recomputes=spec.recompute.mode != "none")
    apply_data_parallelism(model, registry, spec.fsdp)
    compute_dtype = getattr(torch, spec.precision.compute) if spec.precision is not None else dtype
    fit_absent(registry, compute_dtype=compute_dtype)
    return registry


def _most_classes(head: nn.Module | None, context: SplitContext) -> int | None:
    """The most classes of a split head that a tp rank has; None where it is not split."""
    entry = entries_of(head).get("weight") if head is not None else None
    return context.tp.even_sizes(entry.layout.shape[0])[0] if entry is not None and entry.split is not None else None


def check_unsplit(model: nn.Module) -> None:
    """Raises `PlanError` where the model has been split before, `UnsupportedError` where torch has wrapped it."""
    check_unwrapped(model)
    if is_split(model):
        raise PlanError(f"this {type(model).__name__} is split already", fix="split a model once, from the unsplit one")


def check_axes(shape: MeshShape) -> None:
    """Raises `UnsupportedError` where the layout has an axis that nothing serves yet."""
    unserved = {axis: shape.size(axis) for axis in UNSERVED_AXES if shape.size(axis) > 1}
    if unserved:
        raise UnsupportedError(
            f"layout {shape} uses " + ", ".join(f"{axis}{size}" for axis, size in unserved.items()),
            why="only pp, ddp, fsdp and tp are supported so far",
            fix=f"use fsdp{shape.world_size} or tp{shape.world_size}",
        )
