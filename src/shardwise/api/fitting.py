"""Whether a step fits a device, and what would make it fit."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from shardwise.errors import ShardwiseError, sized
from shardwise.estimate.memory import Card
from shardwise.plan.options import Recompute
from shardwise.topology.shape import SIZE_NAMES

if TYPE_CHECKING:
    from shardwise.api.describing import Rehearsal


def describe_fit(
    rehearsal: Rehearsal, card: Card, needed: int, *, batch: tuple[int, int] | None, num_microbatches: int | None
) -> str:
    """Returns a line that says whether `needed` bytes fit a card, and if not what would fit.

    Args:
        batch: rows and tokens of a microbatch; None: `needed` is only what is kept between steps.
    """
    taken = f"{sized(needed)} of {sized(card.num_bytes)}"
    if batch is None:
        answer = "not known" if needed <= card.num_bytes else "no"
        return f"fits {card.name}: {answer}, {taken} are kept from step to step; --batch ROWSxTOKENS adds a step"
    if needed <= card.num_bytes:
        return f"fits {card.name}: yes, {taken}"
    remedies = find_remedies(rehearsal, card, batch=batch, num_microbatches=num_microbatches)
    return f"fits {card.name}: no, {taken}: {remedies}"


def find_remedies(rehearsal: Rehearsal, card: Card, *, batch: tuple[int, int], num_microbatches: int | None) -> str:
    """Returns, in words, the single changes with which a step would fit, or else those that fit with recomputation.
    Each one is rehearsed.
    """
    found: list[str] = []
    bases = [(rehearsal, "")]
    if rehearsal.spec.recompute != _FULL:
        recomputed = replace(rehearsal, spec=replace(rehearsal.spec, recompute=_FULL))
        bases.append((recomputed, "recompute mode full and "))
    for base, before in bases:
        for words, changed, rows in _changes(base, batch) if not found else ():
            with suppress(ShardwiseError), warnings.catch_warnings():  # the model or schedule may have no such split
                warnings.simplefilter("ignore")
                needed = changed.step_bytes(rows, num_microbatches, most=card.num_bytes)
                found += [f"{before}{words} ({sized(needed)})"] if needed <= card.num_bytes else []
    if found:
        return f"it would with {', or '.join(found)}"
    return "recomputation, twice the ranks along an axis, half of the rows or bfloat16 are not enough"


_FULL = Recompute(mode="full")


def _changes(rehearsal: Rehearsal, batch: tuple[int, int]) -> Iterator[tuple[str, Rehearsal, tuple[int, int]]]:
    spec, shape = rehearsal.spec, rehearsal.shape
    if spec.recompute != _FULL:
        yield "recompute mode full", replace(rehearsal, spec=replace(spec, recompute=_FULL)), batch
    for axis in ("fsdp", "tp", "pp"):
        larger = replace(shape, **{SIZE_NAMES[axis]: 2 * shape.size(axis)})
        yield f"layout {larger}", replace(rehearsal, shape=larger), batch
    num_rows, seq_length = batch
    if num_rows > 1:
        yield f"microbatches of {num_rows // 2} x {seq_length:,} tokens", rehearsal, (num_rows // 2, seq_length)
    if rehearsal.precision.params != "bfloat16":
        narrow = replace(rehearsal.precision, params="bfloat16", compute="bfloat16")
        changed = replace(rehearsal, spec=replace(spec, precision=narrow), dtype=torch.bfloat16)
        yield "parameters in bfloat16", changed, batch
