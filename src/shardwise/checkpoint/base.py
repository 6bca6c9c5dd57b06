"""What a checkpoint says of the frozen parameters that it leaves out: sums that tell them from others', in any layout.

# [Note: the fingerprint of a base]
Adapters fit every base of the same shapes, and go on wrongly on another one without a word. So a checkpoint of trained
parameters keeps three numbers for each frozen one, modulo 2**64: the sum of its elements' bits as integers, and the
same with every element times its place along the first and along the last dim. Integers add up alike in every order, so
each rank sums what it owns. A base is summed once, and again where it was written to.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.checkpoint.content import HeldTensor, slices_of
from shardwise.errors import ConfigError
from shardwise.parameters.registry import Registry, local_part
from shardwise.runtime.adapters import is_adapter
from shardwise.sharding.boxes import Box

__all__ = ["Sums", "base_differences", "base_sums", "check_unmerged", "fingerprint", "forget_sums"]

Sums = Mapping[str, tuple[str, tuple[int, ...]]]
"""For every frozen parameter its dtype and what a rank owns of the three sums."""

_Kept = weakref.WeakKeyDictionary[Registry, dict[str, tuple[tuple[int, int], tuple[int, ...]]]]
_KEPT: _Kept = weakref.WeakKeyDictionary()
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_MODULUS = 2**64


def check_unmerged(model: nn.Module) -> None:
    """Raises `ConfigError` where adapters are merged into the weights at the moment: these are not the base's."""
    for name, module in model.named_modules():
        if is_adapter(module) and getattr(module, "merged_adapters", None):
            raise ConfigError(f"{name} has its adapters merged into its weight", fix="call unmerge_adapter() first")


@torch.no_grad()
def base_sums(held: Mapping[str, HeldTensor], registry: Registry) -> Sums:
    """This rank's share of the sums of frozen parameters, those on the meta device left out. Communicates nothing."""
    kept, found = _KEPT.setdefault(registry, {}), {}
    for name, each in held.items():
        if each.entry is None or not isinstance(each.value, nn.Parameter) or each.value.requires_grad:
            continue
        local = local_part(each.value).detach()
        if local.is_meta or local.element_size() not in _INTEGERS:
            continue
        state = local.data_ptr(), each.value._version
        if name not in kept or kept[name][0] != state:
            boxes = [piece.full for piece in each.entry.owned]
            found_at = slices_of(each.layout, registry.mesh.coords, boxes)
            kept[name] = state, _sums([(box, local[place]) for box, place in found_at])
        found[name] = str(local.dtype).removeprefix("torch."), kept[name][1]
    return found


def forget_sums(registry: Registry) -> None:
    """Has everything summed again: parameters were written to where no version says so, inside of `DTensor`s."""
    _KEPT.pop(registry, None)


def fingerprint(everyone: Iterable[Sums]) -> dict[str, str]:
    """The sums of all ranks, one text for each parameter: its dtype and the three numbers."""
    totals: dict[str, tuple[str, list[int]]] = {}
    for sums in everyone:
        for name, (dtype, own) in sums.items():
            _, total = totals.setdefault(name, (dtype, [0] * len(own)))
            total[:] = [(one + other) % _MODULUS for one, other in zip(total, own, strict=True)]
    return {name: " ".join((dtype, *(f"{each:016x}" for each in total))) for name, (dtype, total) in totals.items()}


def base_differences(saved: Any, found: Mapping[str, str]) -> list[str]:
    """In words, the frozen parameters that are others than those that were saved with."""
    if not isinstance(saved, Mapping):
        return []
    lines = []
    for name in (name for name in found if name in saved and saved[name] != found[name]):
        then, now = str(saved[name]).split(" ")[0], found[name].split(" ")[0]
        lines.append(name if then == now else f"{name} ({now} here, {then} then)")
    return lines


def _sums(views: Sequence[tuple[Box, Tensor]]) -> tuple[int, ...]:
    total = torch.zeros(3, dtype=torch.int64)
    for box, view in views:
        bits = view.contiguous().view(_INTEGERS[view.element_size()])
        bits = bits.reshape(1) if not bits.ndim else bits
        starts = [start for start, _ in box] or [0]
        total += torch.stack(
            [bits.sum(dtype=torch.int64), _placed(bits, 0, starts[0]), _placed(bits, -1, starts[-1])]
        ).cpu()
    return tuple(total.tolist())


def _placed(bits: Tensor, dim: int, start: int) -> Tensor:
    others = [each for each in range(bits.ndim) if each != dim % bits.ndim]
    along = bits.sum(others, dtype=torch.int64) if others else bits.to(torch.int64)
    return (along * torch.arange(start + 1, start + 1 + len(along), device=bits.device)).sum()
