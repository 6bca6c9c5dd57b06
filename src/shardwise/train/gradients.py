"""The gradient phase: after the last backward of a step, everything that must still be summed is summed once.

# [Note: one gradient phase]
Hooks on parameters fire too early under accumulation and never under some pipeline schedules, so we reduce nothing
while backward runs (a hook only notes that a gradient comes in). FSDP2 does: it reduces over the data axes as soon as a
unit is done. A sum over tp does not mind which comes first, and is shorter behind it. Afterwards one collective sums
all partial gradients together, and one more each group of gradients of replicated key/value heads. Whoever reads
gradients (`full_gradients`, `clip_grad_norm_`, an optimizer from `build_optimizer`) makes sure first that the phase has
run, so a hand-written loop needs no extra call. When a gradient that was summed is added to, it is first shared out
among the ranks that summed it, so the next sum restores it: gradients may be read and accumulated in any order.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from shardwise.comm.operations import Group, all_reduce_
from shardwise.layers.registry import (
    ParameterEntry,
    Registry,
    carry_entry,
    entry_of,
    local_part,
    registry_of,
    share_out,
)
from shardwise.topology.axes import DATA_AXES

__all__ = ["reduce_gradients", "sum_gradients"]


def reduce_gradients(model: nn.Module) -> None:
    """Sums the gradients that are still partial: of whole parameters inside regions, of shared heads, and of what
    FSDP2 does not hold.

    A gradient that was summed already is left alone, so calling twice does no harm. Every rank of the mesh must call.

    Communicates: over tp, one all-reduce of all partial gradients of a dtype together, and one over each group of ranks
    that share key/value heads; over the data axes, one all-reduce of the gradients FSDP2 has not reduced.
    """
    registry = registry_of(model)
    if not registry.needs_sums:
        return
    _note_strangers(model, registry)
    sum_gradients([(registry.entry(name), parameter) for name, parameter in model.named_parameters()], registry)


def sum_gradients(parameters: Iterable[tuple[ParameterEntry, Tensor]], registry: Registry) -> None:
    """As `reduce_gradients`, of some parameters of a model: the same on every rank."""
    if not registry.unsummed:
        return
    summands = [_Summand(*each) for each in parameters if each[0].needs_sum and each[1].requires_grad]
    partial = [each for each in summands if each.entry.gradient == "partial"]
    _sum_together((part for each in partial for part in (each.local, each.present)), registry.mesh.group("tp"))
    shared: dict[tuple[tuple[int, ...], ...], list[Tensor]] = {}
    for each in summands:
        if each.entry.split is not None and each.entry.split.shared():
            parts = [part for _, part in each.entry.shared_parts(each.local)]
            shared.setdefault(_holder_blocks(each.entry), []).extend((*parts, each.present))
    for blocks, parts in shared.items():
        _sum_together(parts, registry.mesh.subgroup("tp", blocks))
    reduced = [each for each in summands if each.entry.data == "reduced"]
    _sum_together((part for each in reduced for part in (each.local, each.present)), registry.mesh.group(*DATA_AXES))
    for each in reduced:
        each.local.div_(registry.divide_factor)
    for each in summands:
        each.keep()
    registry.unsummed.difference_update(each.entry.fqn for each in summands)


class _Summand:
    """A parameter's gradient on its way through the sums.

    # [Note: gradients that some ranks lack]
    An expert that none of this rank's tokens chose has no gradient here and one elsewhere. What is summed is decided
    from the layout alone, so that ranks sum the same: zeros stand for a gradient that is not there, and beside every
    gradient runs a one where it is there. Where these add up to zero it is nowhere, and stays None as in the full
    model: an optimizer must not decay it. Only a rank that lacks a gradient looks.

    Attributes:
        local: what this rank adds to the sum; afterwards the sum.
        present: how many ranks have the gradient.
    """

    def __init__(self, entry: ParameterEntry, parameter: Tensor) -> None:
        share_out(parameter, entry)
        gradient = parameter.grad
        self.entry, self.parameter, self.is_lacking = entry, parameter, gradient is None
        self.local = torch.zeros_like(local_part(parameter)) if gradient is None else local_part(gradient)
        self.present = self.local.new_full((1,), float(gradient is not None))

    def keep(self) -> None:
        """Gives the parameter the sum where it has had no gradient here."""
        if self.is_lacking and bool(self.present):
            self.parameter.grad = self.entry.wrap(self.local)


def _note_strangers(model: nn.Module, registry: Registry) -> None:
    """Notes gradients of parameters that came in later: a copied model's, those of `load_state_dict(assign=True)`."""
    for name, parameter in model.named_parameters():
        entry = registry.entry(name)
        if entry_of(parameter) is not entry:
            carry_entry(parameter, entry)
            if entry.needs_sum and parameter.grad is not None:
                registry.unsummed.add(entry.fqn)


def _holder_blocks(entry: ParameterEntry) -> tuple[tuple[int, ...], ...]:
    """The blocks of tp coords that share parts of a split parameter."""
    assert entry.split is not None
    return tuple(sorted({holders for _, holders in entry.split.shared()}))


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
