"""Batches of a training step: checks, division of rows, and counts of targets."""

import copy
import inspect
import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from transformers.loss.loss_utils import LOSS_MAPPING, ForSequenceClassificationLoss
from transformers.utils import ModelOutput

from shardwise.errors import BatchError, UnsupportedError, counted
from shardwise.loss.label_use import shifts_labels
from shardwise.plan.decision import TokenWork
from shardwise.runtime.adapter_facts import find_model

Runs = Mapping[str, list[slice]]  # for each part of a batch the first dim's run of a tensor, by the tensor's name

_WORDS = {"video": ("video",), "image": ("image", "pixel"), "audio": ("audio", "feature")}


def is_medium(name: str) -> bool:
    """Returns whether an input of that name holds images, videos or sound, or describes each of them."""
    return _medium_of(name) is not None


def _medium_of(name: str) -> str | None:
    return next((medium for medium, words in _WORDS.items() if any(word in name for word in words)), None)


def divide_media(model: nn.Module, batch: Mapping[str, Any], num_rows: int, num_parts: int) -> Runs:
    """Divides the images, videos and sound of a batch like its rows, by the placeholders in `input_ids`.

    Args:
        batch: `input_ids` [rows, tokens]; tensors [images, …] such as `image_grid_thw`, or [patches of all images, …].

    Returns:
        The runs of these tensors. Tensors with a row for each row of text are not included, unless placeholders tell
            of rows without an item.
    """
    if num_parts == 1:
        return {}
    names: dict[str, list[str]] = {}
    for name, value in batch.items():
        medium = _medium_of(name)
        if isinstance(value, Tensor) and value.ndim and medium is not None:
            names.setdefault(medium, []).append(name)
    runs: dict[str, list[slice]] = {}
    for medium, own in names.items():
        is_one_per_row = f"{medium}_grid_thw" not in own and all(batch[name].shape[0] == num_rows for name in own)
        with suppress(BatchError) if is_one_per_row else nullcontext():
            runs |= _runs_of(model, batch, medium, own, num_parts)
    return runs


def _runs_of(
    model: nn.Module, batch: Mapping[str, Any], medium: str, names: list[str], num_parts: int
) -> dict[str, list[slice]]:
    grid, ids, token = batch.get(f"{medium}_grid_thw"), batch.get("input_ids"), _token_of(model, medium)
    why = "the model's config names no such token, or the batch has no input_ids"
    if isinstance(ids, Tensor) and token is not None:
        is_token, counts = ids == token, {batch[name].shape[0] for name in names}
        if grid is None and counts == {len(ids)} and is_token.any(1).all():
            return {}  # the images of each row, or its only one
        num_items = min(counts)
        sizes = torch.ones(num_items, dtype=torch.long) if grid is None else grid.prod(-1).cpu()
        ends, placeholders = sizes.cumsum(0), is_token.reshape(num_parts, -1).sum(1).cpu().cumsum(0)
        last = torch.searchsorted(ends * placeholders[-1], placeholders * sizes.sum())  # of each part
        ends = torch.cat((ends.new_zeros(1), ends))
        items = [int(end) + bool(placeholders[part]) for part, end in enumerate(last)]
        places = {num_items: items, int(sizes.sum()): [int(ends[item]) for item in items]}
        fits = bool(placeholders[-1]) == bool(num_items) and all(
            int(ends[item]) * int(placeholders[-1]) == int(placeholders[part]) * int(sizes.sum())
            for part, item in enumerate(items)
        )
        if fits and all(batch[name].shape[0] in places for name in names):
            return {name: _slices(places[batch[name].shape[0]]) for name in names}
        why = f"{int(placeholders[-1])} tokens {token} in {len(ids)} rows do not fit {num_items} of them"
    raise BatchError(
        f"cannot divide the rows of {', '.join(names)} into {num_parts} microbatches",
        why=f"the {medium} tokens in input_ids tell which row they belong to: {why}",
        fix="use num_microbatches=1, or give every row as many",
    )


def _slices(ends: list[int]) -> list[slice]:
    return [slice(start, end) for start, end in zip([0, *ends], ends, strict=False)]


def _token_of(model: nn.Module, medium: str) -> int | None:
    """Returns the id of the placeholder token of a medium."""
    config = getattr(find_model(model), "config", None)
    found = (getattr(config, f"{medium}_token_{end}", None) for end in ("id", "index"))
    return next((token for token in found if isinstance(token, int)), None)


Count = int | Tensor  # targets: a number, or an int64 scalar that is still on the device

Weight = float | Tensor  # the share of a microbatch's targets, likewise

IGNORED = -100  # the label that transformers' losses leave out

SPANS = ("start_positions", "end_positions")

_SHARED = ("position_ids", "cache_position")  # inputs that may have one row for all rows of the batch


def check_batch(model: nn.Module, batch: Mapping[str, Any], num_microbatches: int) -> int:
    """Returns the number of rows of `batch`; raises if it cannot be trained on."""
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
    others = {name for name, count in rows.items() if count not in legal and not (name in _SHARED and count == 1)}
    if any(not is_medium(name) and not _has_sections(name, batch[name], num_rows) for name in others):
        raise BatchError(
            "the tensors of the batch differ in rows",
            why=", ".join(f"{name}: {count}" for name, count in rows.items()),
            fix="give every tensor as many rows as the labels have",
        )
    return num_rows


def check_rows(num_rows: int, num_microbatches: int) -> None:
    """Raises `BatchError` if rows do not divide into microbatches."""
    if num_rows == 0 or num_rows % num_microbatches:
        raise BatchError(
            f"cannot divide {counted(num_rows, 'row')} into {counted(num_microbatches, 'microbatch')}",
            why="every microbatch has the same number of rows, at least one",
            fix=f"use a multiple of {num_microbatches} rows, or another num_microbatches",
        )


def target_names(model: nn.Module) -> tuple[str, ...]:
    """Returns the arguments of the model's forward from which it computes a loss; `labels` first."""
    names = inspect.signature(find_model(model).forward).parameters
    found = [name for name in names if "label" in name or name in SPANS]
    return ("labels", *(name for name in found if name != "labels"))


def _inputs_per_row(model: nn.Module) -> int:
    """Returns the number of input rows per row of labels: models of audio codes take one per codebook."""
    config = getattr(model, "config", None)
    return getattr(getattr(config, "decoder", None) or config, "num_codebooks", None) or 1


def _has_sections(name: str, value: Tensor, num_rows: int) -> bool:
    """Returns whether a tensor holds positions of time, height and width: [3, rows or 1, tokens]."""
    return name == "position_ids" and value.ndim == 3 and value.shape[1] in (1, num_rows)


def split_rows(batch: Mapping[str, Any], rows: int, count: int, runs: Runs | None = None) -> list[dict[str, Any]]:
    """Divides a batch into equal runs of rows, also tensors in lists, tuples and transformers' outputs.

    A tensor with several rows per row of labels is divided with them. A tensor with one row is shared.

    Args:
        runs: tensors that are divided otherwise (see `divide_media`). Parts without such rows do not get it.
    """
    runs = runs or {}

    def part(value: Any, index: int) -> Any:
        if type(value) in (list, tuple):
            return type(value)(part(each, index) for each in value)
        if isinstance(value, ModelOutput):  # of an encoder, say
            return type(value)(**{name: part(each, index) for name, each in value.items()})
        if count == 1 or not isinstance(value, Tensor) or not value.ndim or value.shape[0] < rows:
            return value
        size = value.shape[0] // count
        return value[index * size : (index + 1) * size]

    def named_part(name: str, value: Any, index: int) -> Any:
        if name in runs:
            return value[runs[name][index]]
        if isinstance(value, Tensor) and _has_sections(name, value, rows):
            return value.chunk(count, dim=1)[index] if value.shape[1] == rows else value
        return part(value, index)

    def has_part(name: str, index: int) -> bool:
        return name not in runs or runs[name][index].start < runs[name][index].stop

    return [
        {name: named_part(name, value, index) for name, value in batch.items() if has_part(name, index)}
        for index in range(count)
    ]


def count_targets(model: nn.Module, batch: Mapping[str, Any], *, stays: bool = False) -> Any:
    """Returns the number of targets over which the model's loss is a mean.

    Counts labels that are not ignored, without the first of each row if the loss shifts labels; rows, if there are no
    labels to count.

    Args:
        stays: return a device count as an int64 scalar tensor on the device, without waiting for it.
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
    """Counts like `count_targets`, on the labels' device; None if the batch has no targets."""
    labels = batch.get("labels")
    if not isinstance(labels, Tensor) or labels.is_floating_point() or counts_rows(find_model(model)):
        targets = {name: batch[name] for name in target_names(model) if isinstance(batch.get(name), Tensor)}
        first = next((name for name, target in targets.items() if target.ndim), None)
        if first in SPANS and not targets[first].is_floating_point():
            return _count_others(first, batch)
        return None if first is None else targets[first].shape[0]
    if isinstance(shifted := batch.get("shift_labels"), Tensor):  # of which the loss is computed instead
        labels = shifted
    elif labels.ndim > 1 and shifts_labels(model):
        labels = labels[..., 1:]
    return (labels != IGNORED).sum()


def counts_rows(model: Any) -> bool:
    """Returns whether the loss is a mean over rows: CTC, or floating-point labels, as transformers' losses decide."""
    config = getattr(model, "config", None)
    if getattr(model, "loss_type", None) == "ForCTC":
        return True
    problem = getattr(config, "problem_type", None)
    if problem is None and LOSS_MAPPING.get(getattr(model, "loss_type", None)) is ForSequenceClassificationLoss:
        return getattr(config, "num_labels", None) == 1
    return problem == "regression"


def sums_rows(model: Any) -> bool:
    """Returns whether the loss is a sum over rows: CTC, where the config says so."""
    reduction = getattr(getattr(model, "config", None), "ctc_loss_reduction", "mean")
    return getattr(model, "loss_type", None) == "ForCTC" and reduction != "mean"


def find_uneven_targets(model: nn.Module, batch: Mapping[str, Any]) -> str | None:
    """Returns the names arguments of the batch with different numbers of targets; None if all numbers are equal.

    A microbatch has one weight, computed from one number of targets.
    """
    names = [name for name in target_names(model) if isinstance(batch.get(name), Tensor) and batch[name].ndim]
    if not names[1:]:
        return None
    counts = [count_targets(model, batch), *(int(_count_others(name, batch)) for name in names[1:])]
    return " and ".join(names) if len(set(counts)) > 1 else None


def check_divides(model: nn.Module, batch: Mapping[str, Any], parts: Sequence[Mapping[str, Any]], size: int) -> None:
    """Raises if the model, in its current state, computes something else for the parts of a batch than for the batch.

    Args:
        size: number of parts over all data ranks.
    """
    if size == 1:
        return
    what, inner = f"a batch in {size} parts", find_model(model)
    if any(isinstance(value, Tensor) and value.is_floating_point() for value in batch.values()):
        for norm in batch_norms(model):  # text alone may pass by those of what sees or hears
            refuse_batch_norm(inner, size, norm)
    if sums_rows(inner):
        raise UnsupportedError(
            f"{what}, with a loss that is a sum over rows",
            why="a step's loss is the mean over its parts",
            fix='set config.ctc_loss_reduction = "mean"',
        )
    if hasattr(inner, "_loss_function"):
        raise UnsupportedError(
            f"{what}, with a loss_function of your own",
            why="it is unknown how to combine the losses of parts: by their targets, by weights, or as a sum",
            fix="use one microbatch, no fsdp and no ddp (with pp call the model), or the model's own loss",
        )
    uneven = next((name for part in parts if (name := find_uneven_targets(model, part)) is not None), None)
    if uneven is not None:
        raise UnsupportedError(
            f"{what}, with several kinds of targets: {uneven}",
            why="a part is weighted by its number of targets, and has another number of each kind",
            fix="use one microbatch and a layout without fsdp and ddp, or one kind of targets",
        )


def batch_norms(model: nn.Module) -> list[nn.Module]:
    """Returns the batch norms of a model."""
    return [module for module in model.modules() if isinstance(module, _BatchNorm)]


def refuse_batch_norm(model: nn.Module, size: int, norm: nn.Module) -> None:
    """Raises `UnsupportedError` if the batch norm is in training mode."""
    if norm.training:
        raise UnsupportedError(
            f"a batch in {size} parts, of a {type(model).__name__} with batch norms in training mode",
            why="they take the mean and variance of a part, and each data rank would keep different ones",
            fix="put them in eval mode after model.train(): for each in model.modules() that is one, each.eval()",
        )


@dataclass(frozen=True)
class TargetWeights:
    """The microbatches of a batch, each weighted by its share of the full batch's targets.

    Attributes:
        counts: number of targets of each microbatch.
        total: number of targets of the full batch, over all data ranks.
    """

    parts: Sequence[dict[str, Any]]
    counts: Sequence[Count]
    total: Count

    @property
    def is_empty(self) -> bool:
        """Whether the host knows that the full batch has no targets."""
        return not isinstance(self.total, Tensor) and not self.total

    def __len__(self) -> int:
        return len(self.parts)

    def weight(self, number: int) -> Weight:
        """Returns the weight of the mean loss of microbatch `number`: its share of the targets of the full batch.

        The weighted losses, summed over microbatches and data ranks, are the mean over all targets of all data ranks.
        """
        count, total = self.counts[number], self.total
        if isinstance(total, Tensor):
            return count / total.clamp(min=1)
        return count / total if total else 0.0

    def arguments(self, number: int) -> dict[str, Any]:
        """Returns the arguments of a microbatch.

        A microbatch without targets may have to run, because other ranks wait for its gradients or only the device
        knows the count. It gets made-up targets with weight 0, because the mean over no targets is 0/0.
        """
        part, count = self.parts[number], self.counts[number]
        if isinstance(count, Tensor):
            return part | {
                name: torch.where(count == 0, made_up, part[name]) for name, made_up in make_up_targets(part).items()
            }
        return part if count else part | make_up_targets(part)


def make_up_targets(batch: Mapping[str, Any]) -> dict[str, Tensor]:
    """Returns the targets for a batch that has none. They avoid a mean of 0/0 and get weight 0."""
    found = {name: batch[name] for name in ("labels", "shift_labels", *SPANS) if isinstance(batch.get(name), Tensor)}
    return {
        name: value.clamp(max=_length(batch) - 1) if name in SPANS else value.clamp(min=0)
        for name, value in found.items()
        if not value.is_floating_point()
    }


def drop_targets(batch: Mapping[str, Any], first: int) -> Any:
    """Returns a copy of a batch, without the targets of the rows from `first` on. Numbers as labels stay."""
    changed: Any = copy.copy(batch)
    for name in make_up_targets(batch):
        changed[name] = batch[name].clone()
        changed[name][first:] = _length(batch) if name in SPANS else IGNORED
    return changed


def _count_others(name: str, batch: Mapping[str, Any]) -> int | Tensor:
    """Targets of an argument other than `labels` that the loss counts: spans inside the sequence, rows of numbers."""
    if batch[name].is_floating_point():
        return batch[name].shape[0]
    return (batch[name] < _length(batch) if name in SPANS else batch[name] != IGNORED).sum()


def _length(batch: Mapping[str, Any]) -> int:
    """Returns the length of the batch's sequences; any number if it has none."""
    tokens = (batch[name] for name in ("input_ids", "inputs_embeds") if isinstance(batch.get(name), Tensor))
    return next((each.shape[1] for each in tokens if each.ndim > 1), sys.maxsize)


def flops_of(batch: Mapping[str, Any], work: TokenWork) -> int:
    """Returns the FLOPs of forward and backward for a batch's tokens, padding included: [Note: model FLOPs]."""
    inputs = (batch[name] for name in ("input_ids", "inputs_embeds", "labels") if isinstance(batch.get(name), Tensor))
    shape = next((value.shape[:2] for value in inputs if value.ndim > 1), (0, 0))
    return shape[0] * shape[1] * work.flops(shape[1])
