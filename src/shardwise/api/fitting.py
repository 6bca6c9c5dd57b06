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
    from shardwise.api.rehearsal import Forecast, Rehearsal


def describe_fit(card: Card, found: Forecast) -> str:
    """Returns a line that says whether what was found fits a card, and if not what would."""
    does_fit, taken = found.needed <= card.num_bytes, f"{sized(found.needed)} of {sized(card.num_bytes)}"
    if found.batch is None or (found.unknown and does_fit):
        more = "" if found.batch else "; --batch ROWSxTOKENS adds a step"
        return f"fits {card.name}: {'not known' if does_fit else 'no'}, {taken} are kept from step to step{more}"
    return f"fits {card.name}: " + (f"yes, {taken}" if does_fit else f"no, {taken}: {find_remedies(card, found)}")


def find_remedies(card: Card, missed: Forecast) -> str:
    """Returns, in words, the rehearsed changes with which a step would fit: single ones, or else with recomputation."""
    found: list[str] = []
    rehearsal, batch = missed.rehearsal, missed.batch or (1, 1)
    recomputed = replace(rehearsal, spec=replace(rehearsal.spec, recompute=Recompute(mode="full")))
    for base, before in ((rehearsal, ""), (recomputed, "recompute mode full and ")):
        for words, changed, rows in _changes(base, batch) if not found else ():
            with suppress(ShardwiseError), warnings.catch_warnings():  # the model or the schedule has no such split
                warnings.simplefilter("ignore")
                step = changed.forecast(rows, missed.num_microbatches, most=card.num_bytes)
                if not step.unknown and step.needed <= card.num_bytes:
                    found.append(f"{before}{words} ({sized(step.needed)})")
    if found:
        return f"it would with {', or '.join(found)}"
    return "recomputation, twice the ranks along an axis, half of the rows or bfloat16 are not enough"


def _changes(rehearsal: Rehearsal, batch: tuple[int, int]) -> Iterator[tuple[str, Rehearsal, tuple[int, int]]]:
    spec, shape = rehearsal.spec, rehearsal.shape
    if spec.recompute.mode != "full":
        yield "recompute mode full", replace(rehearsal, spec=replace(spec, recompute=Recompute(mode="full"))), batch
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
