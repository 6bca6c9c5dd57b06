"""Gradients averaged over the data ranks that no model sums, and multiplied by a number."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from shardwise.mesh import Mesh
from shardwise.optim.summing import sum_together
from shardwise.parameters.registry import entry_of, local_part
from shardwise.topology.axes import DATA_AXES

__all__ = ["average_gradients", "multiply_gradients"]


@torch.no_grad()
def average_gradients(parameters: Iterable[Tensor], mesh: Mesh) -> None:
    """Makes the gradients the means over the data ranks, in place. Those of models that Shardwise knows are already.

    Every rank must pass the same parameters; one without a gradient here counts zeros, and has one afterwards.

    Communicates: over the data axes, one all-reduce a dtype.
    """
    group = mesh.group(*DATA_AXES)
    if group is None:
        return
    gradients: list[Tensor] = []
    for parameter in parameters:
        entry = entry_of(parameter)
        if not parameter.requires_grad or (entry is not None and entry.data):
            continue
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        gradients.append(local_part(parameter.grad))
    sum_together(gradients, group)
    for gradient in gradients:
        gradient.div_(mesh.data_size)


@torch.no_grad()
def multiply_gradients(parameters: Iterable[Tensor], factor: float | Tensor) -> None:
    """Multiplies what this rank holds of every gradient.

    Args:
        parameters: as they are at rest, and optimizers hold them: between forward and backward the modules may have
            others, which FSDP2 has gathered.
    """
    by_device: dict[torch.device, list[Tensor]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            local = local_part(parameter.grad)
            by_device.setdefault(local.device, []).append(local)
    for device, gradients in by_device.items():
        torch._foreach_mul_(gradients, factor.to(device) if isinstance(factor, Tensor) else factor)
