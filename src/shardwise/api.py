"""The functions behind the front door: the one place that composes planning, splitting, loading and saving."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from shardwise.layers.canonical import canonical_tensor
from shardwise.layers.registry import Registry, registry_of
from shardwise.mesh import Mesh
from shardwise.split.apply import apply_layout
from shardwise.split.door import open_door
from shardwise.plan.spec import Plan
from shardwise.train.gradients import reduce_gradients

__all__ = ["full_gradients", "full_state_dict", "parallelize"]


def parallelize(
    model: nn.Module,
    mesh: Mesh,
    *,
    plan: str | Plan | Mapping[str, str] = "auto",
    sequence_parallel: bool = False,
    dtype: torch.dtype | None = None,
) -> nn.Module:
    """Splits an existing transformers model over `mesh`, in place; parameter names stay.

    Args:
        model: a real model, the same on every rank, or one on the meta device (whose weights are loaded afterwards).
        plan: "auto" (family corrections on the model's own plan), or rules to put on top of those: a dictionary of
            pattern to style, or a `Plan`.
        sequence_parallel: split hidden states between blocks along the sequence too; same bytes on the wire, less memory.
        dtype: what the parameters are converted to; by default they keep their dtype.

    Returns:
        `model` itself, on the mesh's device unless it is meta.

    Raises:
        PlanError: the plan cannot be followed; every problem is listed, with the sizes that work.
        UnsupportedError: the layout or the model needs something that does not exist yet.

    Communicates: nothing (the first use of replicated key/value heads creates their groups).
    """
    registry = apply_layout(model, mesh, plan=plan, sequence_parallel=sequence_parallel)
    if dtype is not None:
        model.to(dtype)
    if not any(parameter.is_meta for parameter in model.parameters()):
        model.to(mesh.device)
    _open_subgroups(registry)
    return model


def full_state_dict(model: nn.Module, *, rank0_only: bool = False) -> dict[str, Tensor]:
    """The state dict of the whole model: Hugging Face names, full CPU tensors, tied names included.

    Args:
        rank0_only: only rank 0 receives it, and the others an empty dict: they never hold a whole tensor.

    Communicates: over tp, one all-gather (with `rank0_only` a gather) of each split parameter.
    """
    registry = registry_of(model)
    with open_door(model):
        local = model.state_dict()
    state: dict[str, Tensor] = {}
    done: dict[str, Tensor | None] = {}
    for fqn, value in local.items():
        canonical = registry.tied.get(fqn, fqn)
        if canonical in registry.entries:
            if canonical not in done:
                layout = registry.entries[canonical].layout
                done[canonical] = canonical_tensor(value, layout, registry.mesh, rank0_only=rank0_only)
            whole = done[canonical]
        else:
            whole = None if rank0_only and registry.mesh.rank else value.detach().to("cpu", copy=True)
        if whole is not None:
            state[fqn] = whole
    return state


def full_gradients(model: nn.Module, *, rank0_only: bool = False) -> dict[str, Tensor]:
    """The gradients of the whole model by Hugging Face name: full CPU tensors, for parameters that have one.

    Communicates: sums gradients that are still partial, then gathers as `full_state_dict` does.
    """
    registry = registry_of(model)
    reduce_gradients(model)
    gradients: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is None:
            continue
        whole = canonical_tensor(parameter.grad, registry.entry(name).layout, registry.mesh, rank0_only=rank0_only)
        if whole is not None:
            gradients[name] = whole
    return gradients


def _open_subgroups(registry: Registry) -> None:
    """Creates the groups of replicated heads now, where every rank is at the same point."""
    for entry in registry.entries.values():
        if entry.split is not None and entry.split.shared():
            blocks = tuple(sorted({holders for _, holders in entry.split.shared()}))
            registry.mesh.subgroup("tp", blocks)
