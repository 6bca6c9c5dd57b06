"""Tells rounding from faults: how far a split model may be from the unsplit one, and what is measured again."""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.comm.operations import all_gather_objects
from shardwise.mesh import Mesh

__all__ = ["Difference", "Tolerance", "all_passed", "in_float64", "without_rounding"]

_ROUNDING = {"gradient": 4.0, "in_training": 4.0, "parameter": math.inf}
"""How many times what is allowed may be rounding alone: what is more is a kink or a fault."""

_NUDGE = 1e-3
"""How far other weights are from the model's, relatively: far more than rounding moves anything."""


@dataclass(frozen=True, kw_only=True)
class Tolerance:
    """How far a split model may be from the unsplit one, in float32.

    Attributes:
        loss: absolute.
        logits: absolute.
        gradient: relative to the largest entry of the gradient in question, plus `gradient_floor` absolute.
        parameter: absolute, after the optimizer's steps.
        num_others: with how many other weights it is tried what may be a kink (see `without_rounding`).
    """

    loss: float = 1e-5
    logits: float = 1e-4
    gradient: float = 1e-4
    gradient_floor: float = 1e-6
    parameter: float = 1e-5
    num_others: int = 3


@dataclass(frozen=True, kw_only=True)
class Difference:
    """The largest difference found over named tensors: where, how large, and what would have been allowed.

    Attributes:
        again: how it was measured again, where rounding had put it over what is allowed.
        num_compared: how many tensors were compared.
        num_draws: how many random tensors, dropout masks for instance, both models drew alike.
    """

    error: float
    allowed: float
    name: str = ""
    again: str = ""
    num_compared: int = 1
    num_draws: int = 0

    @property
    def passed(self) -> bool:
        """Whether it is allowed; NaN never is."""
        return self.error <= self.allowed


def without_rounding(
    found: dict[str, Difference],
    again: Callable[..., dict[str, Difference]],
    full: nn.Module,
    batch: Mapping[str, Any],
    mesh: Mesh,
    tolerance: Tolerance,
) -> dict[str, Difference]:
    """`found`, with those in float64 of the differences that rounding explains, where the model runs so.

    Little ones are its own: AdamW makes full steps of gradients that are next to zero, norms over few features blow it
    up, and dropout may leave sums as small as it. Others may come of a kink: it puts the input of a ReLU, or the choice
    of a router, on the other side. Those are the same when measured again, and gone in float64, and in float32 with
    slightly other weights, each time, with which a kink is elsewhere, and a fault of float32 alone where it was.

    Args:
        again: measures a model on a batch, with a `tolerance`.
    """

    def agreed(*verdicts: bool) -> list[bool]:
        return [all(each) for each in zip(*all_gather_objects(verdicts, mesh.group()), strict=True)]

    passed, is_little, is_finite = agreed(
        all_passed(found),
        all(each.error <= _ROUNDING.get(name, 1.0) * each.allowed for name, each in found.items()),
        all(math.isfinite(each.error) for each in found.values()),
    )
    num_others, is_exact = tolerance.num_others, next(full.parameters()).dtype is torch.float64
    if passed or is_exact or not (is_little or (is_finite and num_others)):
        return found
    try:
        exact = again(copy.deepcopy(full).double(), batch=in_float64(batch), tolerance=tolerance)
    except Exception:  # noqa: BLE001 - code that computes some of it in float32 in any case fails in any way
        return found
    if not is_little:  # every rank tries as often: they agree on each
        once = functools.partial(again, batch=batch, tolerance=replace(tolerance, num_others=0))
        others = (once(_nudged(full, seed)) for seed in range(num_others))
        is_rounding = all(agreed(all_passed(exact))) and all(agreed(once(full) == found))
        if not is_rounding or not all(all(agreed(all_passed(each))) for each in others):
            return found
    said = "in float64" if is_little else "in float64, and with other weights"
    return {
        name: old if old.passed or exact[name] is old else replace(exact[name], again=said)
        for name, old in found.items()
    }


def all_passed(found: Mapping[str, Difference]) -> bool:
    """Whether all of them are allowed."""
    return all(each.passed for each in found.values())


def _nudged(full: nn.Module, seed: int) -> nn.Module:
    """A copy with slightly other weights."""
    other, generator = copy.deepcopy(full), torch.Generator().manual_seed(seed)
    for value in other.parameters():
        if value.is_floating_point():
            value.data *= 1 + _NUDGE * torch.randn(value.shape, generator=generator).to(value)
    return other


def in_float64(batch: Mapping[str, Any]) -> dict[str, Any]:
    """The batch, with numbers that are not whole in float64."""
    floats = {name: x.double() for name, x in batch.items() if isinstance(x, Tensor) and x.is_floating_point()}
    return {**batch, **floats}
