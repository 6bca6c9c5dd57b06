"""Gradients of parameters that no model sums for: averaged over the data ranks where somebody says so."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from shardwise.comm.operations import all_reduce_
from shardwise.mesh import Mesh
from shardwise.parameters.registry import entry_of, local_part
from shardwise.topology.axes import DATA_AXES

__all__ = ["average_gradients"]


@torch.no_grad()
def average_gradients(parameters: Iterable[Tensor], mesh: Mesh) -> None:
    """Makes the gradients the means over the data ranks, in place. Those of models that Shardwise knows are already.

    Every rank must pass the same parameters; one without a gradient here counts zeros, and has one afterwards.

    Communicates: over the data axes, one all-reduce a dtype.
    """
    group = mesh.group(*DATA_AXES)
    if group is None:
        return
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for parameter in parameters:
        entry = entry_of(parameter)
        if not parameter.requires_grad or (entry is not None and entry.data):
            continue
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        by_dtype.setdefault(parameter.dtype, []).append(local_part(parameter.grad))
    for gradients in by_dtype.values():
        flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
        all_reduce_(flat, group)
        flat /= mesh.data_size
        for gradient, mean in zip(gradients, flat.split([each.numel() for each in gradients]), strict=True):
            gradient.copy_(mean.view_as(gradient))
