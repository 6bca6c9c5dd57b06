"""Norms of gradients of which ranks hold parts."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from shardwise.comm.operations import all_reduce_
from shardwise.errors import UnsupportedError
from shardwise.parameters.registry import ParameterEntry, Registry

_SUMMED = torch.float32
_RUN_ELEMENTS = 2**18


def norm_of_owned(values: Iterable[tuple[Tensor, ParameterEntry | None]], order: float) -> Tensor:
    """Norm of the gradient elements that this rank owns, float32 scalar; over all ranks every element counts once.

    Args:
        values: local tensors of gradients, of any dtypes, on any devices, each with the entry of its parameter; None
            for a tensor that this rank holds all of. Nothing is copied.
    """
    by_device: dict[torch.device, tuple[list[Tensor], list[Tensor]]] = {}
    for value, entry in values:
        narrow, wide = by_device.setdefault(value.device, ([], []))
        parts = narrow if value.dtype.itemsize < _SUMMED.itemsize else wide
        places = (None,) if entry is None else entry.owned_slices
        parts += [value if place is None else value[place] for place in places]
    norms: list[Tensor] = []
    for device, (narrow, wide) in by_device.items():
        short = [run for part in narrow for run in _runs(part)] if device.type == "cpu" else narrow
        norms += [*_norms_of(wide, order), *_norms_of(short, order, dtype=_SUMMED)]
    device = max(by_device, key=lambda device: device.type != "cpu", default=torch.device("cpu"))
    if not norms:
        return torch.zeros((), device=device)
    return torch.linalg.vector_norm(torch.stack([norm.to(device, _SUMMED) for norm in norms]), order)


def _norms_of(parts: Sequence[Tensor], order: float, **options: Any) -> Sequence[Tensor]:
    parts = [part for part in parts if part.numel()]
    return torch._foreach_norm(parts, order, **options) if parts else ()


def _runs(x: Tensor) -> Sequence[Tensor]:
    """Slices of `x` along its first dim, because torch copies each slice to a wider dtype on CPUs."""
    return x.split(max(1, _RUN_ELEMENTS * len(x) // x.numel())) if x.numel() > _RUN_ELEMENTS and x.ndim else (x,)


def complete_norms(shares: Tensor, registry: Registry, order: float) -> Tensor:
    """Norms over all ranks. Args: shares: norms of the elements that this rank owns, float32. Returns the same shape.

    Communicates: over all ranks, one all-reduce of as many values.
    """
    group = registry.mesh.group()
    if group is None:
        return shares
    shares = shares.to(registry.mesh.device)
    if math.isinf(order):
        is_nan = shares.isnan()  # which the largest of several values may leave out
        both = torch.stack([shares.masked_fill(is_nan, 0.0), is_nan.to(shares.dtype)])
        all_reduce_(both, group, largest=True)
        return both[0].masked_fill(both[1] > 0, torch.nan)
    powered = shares.pow(order)
    all_reduce_(powered, group)
    return powered.pow(1.0 / order)


def complete_stacked(shares: Tensor, registry: Registry, order: float) -> Tensor:
    """Norms over all ranks, in a pipeline of all stages' gradients, padded with zeros: the norm of the result is the
    same on every rank.

    Args:
        shares: `[n]`, norms of the elements that this rank owns of its gradients.

    Raises:
        UnsupportedError: they are only some of a stage's gradients.

    Communicates: over all ranks, one all-reduce of as many values; in a pipeline another one of one value.
    """
    mesh = registry.mesh
    num_stages, group = mesh.size("pp"), mesh.group()
    if num_stages == 1 or group is None:
        return complete_norms(shares, registry, order)
    model = registry.model()
    num_gradients = sum(parameter.grad is not None for parameter in model.parameters()) if model is not None else 0
    if len(shares) != num_gradients:
        raise UnsupportedError(
            f"the norm of {len(shares)} of the {num_gradients} gradients of one stage of a pipeline",
            why="other stages may have none of these, and never ask, or ask for the norm of others",
            fix="use the norm of all: torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)",
        )
    most = torch.tensor(len(shares), device=mesh.device)
    all_reduce_(most, group, largest=True)
    table = torch.zeros(num_stages, int(most), dtype=shares.dtype, device=mesh.device)
    table[mesh.coord("pp"), : len(shares)] = shares.to(mesh.device)
    return complete_norms(table, registry, order).view(-1)


def check_all_stages_ask(registry: Registry, caller: str) -> None:
    """Raises if a stage trains nothing. torch would not ask for a norm there, and this rank would wait for it."""
    if idle := registry.idle_stages:
        raise UnsupportedError(
            f"{caller} on a pipeline of which a part is frozen as a whole",
            why=f"the ranks at {', '.join(map(str, idle))} along pp have no gradients, and torch does nothing there",
            fix="use shardwise.clip_grad_norm_(model, max_norm), and Precision(compute=...) in place of a GradScaler, "
            "or other cuts: Pipeline(layers=...)",
        )
