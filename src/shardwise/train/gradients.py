"""The gradient phase: after the last backward of a step, everything that must be summed over tp is summed once.

# [Note: one gradient phase]
Hooks on parameters fire too early under accumulation and never under some pipeline schedules, so nothing is reduced while
backward runs (a hook only notes that a gradient has come in). Afterwards one collective sums all partial gradients together, and one more each group of gradients of
replicated key/value heads. Whoever reads gradients (`full_gradients`, `clip_grad_norm_`, an optimizer from
`build_optimizer`) makes sure first that the phase has run, so a hand-written loop needs no extra call.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn

from shardwise.comm.operations import Group, all_reduce_
from shardwise.layers.registry import ParameterEntry, Registry, registry_of

__all__ = ["add_back", "mark_unsummed", "reduce_gradients", "set_aside_summed"]


def reduce_gradients(model: nn.Module) -> None:
    """Sums over tp the gradients that are still partial: of whole parameters inside regions, of shared heads.

    A gradient that was summed already is left alone, so calling twice does no harm. Every rank of the mesh must call it.

    Communicates: over tp, one all-reduce of all partial gradients of a dtype together, and one over each group of ranks
    that share key/value heads.
    """
    registry = registry_of(model)
    if registry.mesh.group("tp") is None:
        return
    pending = [(registry.entry(name), parameter.grad) for name, parameter in model.named_parameters()]
    pending = [(entry, gradient) for entry, gradient in pending if entry.fqn in registry.unsummed]
    summable = [(entry, gradient) for entry, gradient in pending if gradient is not None]
    _sum_together((gradient for entry, gradient in summable if entry.gradient == "partial"), registry.mesh.group("tp"))
    shared: dict[tuple[tuple[int, ...], ...], list[Tensor]] = {}
    for entry, gradient in summable:
        for blocks, part in _shared_parts(entry, gradient, registry):
            shared.setdefault(blocks, []).append(part)
    for blocks, parts in shared.items():
        _sum_together(parts, registry.mesh.subgroup("tp", blocks))
    registry.unsummed.clear()


def mark_unsummed(model: nn.Module) -> None:
    """Says that a backward has run: every gradient that is partial by nature now waits for its sum."""
    registry = registry_of(model)
    registry.unsummed.update(entry.fqn for entry in registry.entries.values() if entry.needs_sum)


def set_aside_summed(model: nn.Module) -> dict[str, Tensor]:
    """Takes away the gradients that were summed in an earlier step and not zeroed since, by name.

    New partial gradients must not be added to summed ones: `add_back` joins both once the new ones are summed as well.
    """
    registry = registry_of(model)
    aside: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        entry = registry.entry(name)
        if parameter.grad is not None and entry.needs_sum and entry.fqn not in registry.unsummed:
            aside[name], parameter.grad = parameter.grad, None
    return aside


def add_back(model: nn.Module, aside: dict[str, Tensor]) -> None:
    """Adds gradients set aside before to the ones of the same names now."""
    for name, earlier in aside.items():
        parameter = model.get_parameter(name)
        parameter.grad = earlier if parameter.grad is None else earlier + parameter.grad


def _shared_parts(
    entry: ParameterEntry, gradient: Tensor, registry: Registry
) -> Iterator[tuple[tuple[tuple[int, ...], ...], Tensor]]:
    """What this rank holds of elements that other tp ranks hold too, with the blocks of ranks that share alike."""
    split = entry.split
    if split is None:
        return
    coord = registry.mesh.coord("tp")
    blocks = tuple(sorted({holders for _, holders in split.shared()}))
    for interval, holders in split.shared():
        if coord in holders:
            for start, stop in split.local_of(coord, interval):
                yield blocks, gradient.narrow(split.dim, start, stop - start)


def _sum_together(parts: Iterable[Tensor], group: Group | None) -> None:
    """Sums every tensor over `group` in place, in one collective a dtype."""
    if group is None:
        return
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for part in parts:
        by_dtype.setdefault(part.dtype, []).append(part)
    for same in by_dtype.values():
        flat = torch.cat([part.reshape(-1) for part in same])
        all_reduce_(flat, group)
        for part, summed in zip(same, flat.split([part.numel() for part in same]), strict=True):
            part.copy_(summed.view_as(part))
