"""Batches: what a step may be fed, how rows are divided, what counts as a target."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from transformers.loss.loss_utils import LOSS_MAPPING, ForSequenceClassificationLoss
from transformers.utils import ModelOutput

from shardwise.errors import BatchError, counted
from shardwise.loss.label_use import shifts_labels
from shardwise.loss.shares import check_shares, share_targets
from shardwise.plan.token_work import TokenWork
from shardwise.runtime.adapters import find_model

__all__ = [
    "IGNORED",
    "check_batch",
    "check_rows",
    "count_each_target",
    "count_targets",
    "flops_of",
    "make_up_targets",
    "share_among",
    "split_rows",
    "target_names",
    "targets_of",
]

IGNORED = -100
"""The label that transformers' losses leave out."""

_SPANS = ("start_positions", "end_positions")

_SHARED = ("position_ids", "cache_position")
"""Inputs that may have one row for all rows of the batch."""


def check_batch(model: nn.Module, batch: Mapping[str, Any], num_microbatches: int) -> int:
    """The number of rows; raises where the batch cannot be trained on."""
    if not isinstance(batch, Mapping):
        raise BatchError(
            f"a batch cannot be a {type(batch).__name__}",
            fix='pass a dict of the model\'s inputs, such as {"input_ids": ids, "labels": ids}',
        )
    targets = {name: batch[name] for name in target_names(model) if batch.get(name) is not None}
    if not targets:
        raise BatchError(
            f"the batch has no labels (it has {', '.join(sorted(batch)) or 'nothing'})",
            why="the model computes its loss from them",
            fix='add "labels": the input ids themselves for causal models, with -100 where nothing is to be learned',
        )
    for name, target in targets.items():
        if not isinstance(target, Tensor) or not target.ndim:
            raise BatchError(
                f"{name} cannot be {'a scalar' if isinstance(target, Tensor) else f'a {type(target).__name__}'}",
                why="a step counts the targets of every row",
                fix=f"pass a tensor [rows, …], such as torch.tensor({name})",
            )
    num_rows = next(iter(targets.values())).shape[0]
    check_rows(num_rows, num_microbatches)
    rows = {name: value.shape[0] for name, value in batch.items() if isinstance(value, Tensor) and value.ndim}
    legal = {num_rows, num_rows * _inputs_per_row(model)}
    if any(count not in legal and not (name in _SHARED and count == 1) for name, count in rows.items()):
        raise BatchError(
            "the tensors of the batch differ in rows",
            why=", ".join(f"{name}: {count}" for name, count in rows.items()),
            fix="give every tensor as many rows as the labels have",
        )
    return num_rows


def check_rows(num_rows: int, num_microbatches: int) -> None:
    """Raises `BatchError` where rows do not divide into microbatches."""
    if num_rows == 0 or num_rows % num_microbatches:
        raise BatchError(
            f"cannot divide {counted(num_rows, 'row')} into {counted(num_microbatches, 'microbatch')}",
            why="every microbatch has the same number of rows, at least one",
            fix=f"use a multiple of {num_microbatches} rows, or another num_microbatches",
        )


def target_names(model: nn.Module) -> tuple[str, ...]:
    """The arguments of the model's forward from which it computes a loss; `labels` first."""
    names = inspect.signature(find_model(model).forward).parameters
    found = [name for name in names if "label" in name or name in _SPANS]
    return ("labels", *(name for name in found if name != "labels"))


def _inputs_per_row(model: nn.Module) -> int:
    """Rows of inputs for each row of labels: models of audio codes take one for each of their codebooks."""
    config = getattr(model, "config", None)
    return getattr(getattr(config, "decoder", None) or config, "num_codebooks", None) or 1


def split_rows(batch: Mapping[str, Any], rows: int, count: int) -> list[dict[str, Any]]:
    """Equal runs of rows, also of tensors in lists, tuples and transformers' outputs; a tensor with several rows for
    each row of labels gives them along, one row for all is shared.
    """

    def part(value: Any, index: int) -> Any:
        if type(value) in (list, tuple):
            return type(value)(part(each, index) for each in value)
        if isinstance(value, ModelOutput):  # of an encoder, say
            return type(value)(**{name: part(each, index) for name, each in value.items()})
        if count == 1 or not isinstance(value, Tensor) or not value.ndim or value.shape[0] < rows:
            return value
        size = value.shape[0] // count
        return value[index * size : (index + 1) * size]

    return [{name: part(value, index) for name, value in batch.items()} for index in range(count)]


def count_targets(model: nn.Module, batch: Mapping[str, Any], *, stays: bool = False) -> Any:
    """What the model's loss is a mean over: labels that are not ignored, without the first of each row where it shifts
    them; rows, where there are no labels to count.

    Args:
        stays: whether what was counted on a device comes as an int64 scalar there, for which nobody waits.
    """
    count = targets_of(model, batch)
    assert count is not None, "check_batch has passed"
    if not isinstance(count, Tensor):
        return count
    if _is_on_host(count):
        return int(count.numpy())
    return count if stays else int(count)


def _is_on_host(value: Tensor) -> bool:
    return value.device.type == "cpu"


def targets_of(model: nn.Module, batch: Mapping[str, Any]) -> int | Tensor | None:
    """As `count_targets`, on the labels' device; None where the batch has no targets."""
    labels = batch.get("labels")
    if not isinstance(labels, Tensor) or labels.is_floating_point() or _counts_rows(find_model(model)):
        targets = {name: batch[name] for name in target_names(model) if isinstance(batch.get(name), Tensor)}
        first = next((name for name, target in targets.items() if target.ndim), None)
        if first in _SPANS and not targets[first].is_floating_point():
            return _count_others(first, batch)
        return None if first is None else targets[first].shape[0]
    if isinstance(shifted := batch.get("shift_labels"), Tensor):  # of which the loss is computed instead
        labels = shifted
    elif labels.ndim > 1 and shifts_labels(model):
        labels = labels[..., 1:]
    return (labels != IGNORED).sum()


def _counts_rows(model: Any) -> bool:
    """Whether the loss is a mean over rows: of CTC, or of labels that are numbers, as transformers' losses find out."""
    config = getattr(model, "config", None)
    if getattr(model, "loss_type", None) == "ForCTC":
        return True
    problem = getattr(config, "problem_type", None)
    if problem is None and LOSS_MAPPING.get(getattr(model, "loss_type", None)) is ForSequenceClassificationLoss:
        return getattr(config, "num_labels", None) == 1
    return problem == "regression"


def count_each_target(model: nn.Module, batch: Mapping[str, Any]) -> dict[str, int]:
    """The targets of every argument that holds some, `count_targets` first; empty where that is the only one."""
    found = [name for name in target_names(model) if isinstance(batch.get(name), Tensor) and batch[name].ndim]
    if not found[1:]:
        return {}
    return {found[0]: count_targets(model, batch)} | {name: int(_count_others(name, batch)) for name in found[1:]}


def share_among(model: nn.Module, parts: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The parts of a full batch, of which each of several targets counts by its own number when a part's loss is
    weighted by `count_targets`.

    Raises:
        BatchError: a part has targets, but none of those by which it is weighted.
    """
    each = [count_each_target(model, part) for part in parts]
    check_shares(each)
    totals = {name: sum(own.get(name, 0) for own in each) for name in each[0]}
    return [part | share_targets(part, own, totals) for part, own in zip(parts, each, strict=True)]


def make_up_targets(batch: Mapping[str, Any]) -> dict[str, Tensor]:
    """Targets for a batch that has none, of which the mean would be 0/0; whatever is made up counts nothing."""
    found = {name: batch[name] for name in ("labels", "shift_labels", *_SPANS) if isinstance(batch.get(name), Tensor)}
    return {
        name: value.clamp(max=_length(batch) - 1) if name in _SPANS else value.clamp(min=0)
        for name, value in found.items()
        if not value.is_floating_point()
    }


def _count_others(name: str, batch: Mapping[str, Any]) -> int | Tensor:
    """The targets of an argument besides `labels` that the loss does not leave out: of spans those in the sequence, of
    numbers all rows.
    """
    if batch[name].is_floating_point():
        return batch[name].shape[0]
    return (batch[name] < _length(batch) if name in _SPANS else batch[name] != IGNORED).sum()


def _length(batch: Mapping[str, Any]) -> int:
    """Of the sequences in the batch; any number where it has none."""
    tokens = (batch[name] for name in ("input_ids", "inputs_embeds") if isinstance(batch.get(name), Tensor))
    return next((each.shape[1] for each in tokens if each.ndim > 1), sys.maxsize)


def flops_of(batch: Mapping[str, Any], work: TokenWork) -> int:
    """Operations of forward and backward of the tokens of a batch, padding included: [Note: model FLOPs]."""
    inputs = (batch[name] for name in ("input_ids", "inputs_embeds", "labels") if isinstance(batch.get(name), Tensor))
    shape = next((value.shape[:2] for value in inputs if value.ndim > 1), (0, 0))
    return shape[0] * shape[1] * work.flops(shape[1])
