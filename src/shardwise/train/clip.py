"""Gradient norms and clipping over every rank that holds a part."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from shardwise.comm.operations import all_reduce_
from shardwise.layers.canonical import owned_parts
from shardwise.layers.registry import ParameterEntry, Registry, entry_of, local_part, registry_of, reshard
from shardwise.train.gradients import reduce_gradients, sum_gradients

__all__ = ["clip_grad_norm_"]

_Held = tuple[ParameterEntry | None, Tensor]


def clip_grad_norm_(
    parameters: nn.Module | Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    *,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """Clips the gradients to a global norm, as `torch.nn.utils.clip_grad_norm_` does on the whole model.

    Every canonical element counts once, however many ranks hold it.

    Args:
        parameters: a split model, or some of its parameters (the same on every rank).
        max_norm: what the norm is clipped to; `math.inf` clips nothing and just returns the norm.
        norm_type: p of the p-norm, `math.inf` for the largest entry.
        error_if_nonfinite: raise where the norm is infinite or NaN.

    Returns:
        The norm before clipping, float32 scalar, the same on every rank.

    Raises:
        ValueError: `norm_type` is not positive, or `max_norm` is negative or NaN.
        RuntimeError: the norm is infinite or NaN and `error_if_nonfinite` is set; on every rank.

    Communicates: over all ranks, one all-reduce of one value; first sums gradients that are still partial.
    """
    if not norm_type > 0:
        raise ValueError(f"norm_type must be positive or math.inf, got {norm_type}")
    if not max_norm >= 0:
        raise ValueError(f"max_norm must be at least 0, got {max_norm}")
    held, registry = _held(parameters)
    total = _total_norm(held, registry, norm_type)
    if registry is not None and isinstance(parameters, nn.Module):
        registry.norm = total
    if error_if_nonfinite and not bool(torch.isfinite(total)):
        raise RuntimeError(f"the gradient norm of order {norm_type} is {float(total)}, so it cannot be clipped")
    factor = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    gradients = [local_part(gradient) for _, gradient in held]
    if gradients and math.isfinite(max_norm):
        torch._foreach_mul_(gradients, factor.to(gradients[0].device))
    return total


def _held(parameters: nn.Module | Tensor | Iterable[Tensor]) -> tuple[list[_Held], Registry | None]:
    """Gradients, summed, with the entries of the parameters that Shardwise has split."""
    if isinstance(parameters, nn.Module):
        reshard(parameters)
        reduce_gradients(parameters)
        registry: Registry | None = registry_of(parameters)
        parameters = parameters.parameters()
    else:
        parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        entries = [(entry, parameter) for parameter in parameters if (entry := entry_of(parameter)) is not None]
        registry = entries[0][0].registry if entries else None
        if registry is not None:
            sum_gradients(entries, registry)
    return [(entry_of(each), each.grad) for each in parameters if each.grad is not None], registry


def _total_norm(held: Sequence[_Held], registry: Registry | None, norm_type: float) -> Tensor:
    device = registry.mesh.device if registry is not None else (held[0][1].device if held else torch.device("cpu"))
    parts = [part for each in held for part in _owned(*each) if part.numel()]
    norms = torch._foreach_norm([part.float() for part in parts], norm_type) if parts else []
    local = torch.linalg.vector_norm(torch.stack(list(norms)), norm_type) if norms else torch.zeros((), device=device)
    group = registry.mesh.group() if registry is not None else None
    if group is None:
        return local
    if math.isinf(norm_type):
        is_nan = local.isnan()  # which the largest of several values may leave out
        both = torch.stack([local.masked_fill(is_nan, 0.0), is_nan.to(local.dtype)])
        all_reduce_(both, group, largest=True)
        return both[0].masked_fill(both[1] > 0, torch.nan)
    powered = local.pow(norm_type)
    all_reduce_(powered, group)
    return powered.pow(1.0 / norm_type)


def _owned(entry: ParameterEntry | None, gradient: Tensor) -> list[Tensor]:
    return [local_part(gradient)] if entry is None else owned_parts(gradient, entry.layout, entry.registry.mesh.coords)
