"""One training step, forward and backward, for every layout."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.errors import BatchError
from shardwise.layers.registry import registry_of
from shardwise.mesh import Mesh
from shardwise.train.gradients import begin_step, reduce_gradients

__all__ = ["StepResult", "TrainStep"]

IGNORED = -100
"""The label that transformers' losses leave out."""

_SHARED = ("position_ids", "cache_position")
"""Inputs that may have one row for all rows of the batch."""


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """What a step computed.

    Attributes:
        loss: float32 scalar on the mesh's device, detached: the mean over all target tokens of the whole batch, the
            same on every rank. `float(result.loss)` waits for the device.
        num_tokens: target tokens of the whole batch.
    """

    loss: Tensor
    num_tokens: int


class TrainStep:
    """Runs forward and backward of one batch and leaves summed, complete gradients in `parameter.grad`.

    Gradients accumulate over calls until they are zeroed, as in plain torch.

    Args:
        model: a model that `shardwise.load` or `shardwise.parallelize` returned.
        mesh: the mesh it was split over.
        num_microbatches: into how many equal runs of rows a batch is divided; the rows must divide by it.

    Raises:
        BatchError: `num_microbatches` is no positive integer.
        LayoutError: the model is not split by Shardwise.
    """

    def __init__(self, model: nn.Module, mesh: Mesh, *, num_microbatches: int = 1) -> None:
        if not isinstance(num_microbatches, int) or isinstance(num_microbatches, bool) or num_microbatches < 1:
            raise BatchError(
                f"num_microbatches is {num_microbatches!r}",
                why="it counts microbatches",
                fix="use an integer of at least 1",
            )
        registry_of(model)
        self.model = model
        self.mesh = mesh
        self.num_microbatches = num_microbatches

    def __call__(self, batch: Mapping[str, Any]) -> StepResult:
        """Computes loss and gradients of `batch`.

        Args:
            batch: the keyword arguments of the model's forward, labels included: tensors `[rows, …]`, on any device;
                this data rank's rows, the same on every tp rank. Values without rows are handed on as they are.

        Returns:
            The loss as the mean over all target tokens, and their number. A microbatch without any target counts
            nothing; where the whole batch has none, the loss is 0 and gradients stay as they are.

        Raises:
            BatchError: labels are missing or no tensor, tensors differ in rows, or rows do not divide by
                `num_microbatches`.
            IndexError: a token id or a target is outside the vocabulary.

        Communicates: what the model's forward and backward do, then the gradient phase (see [Note: one gradient
            phase]).
        """
        rows = _check_batch(batch, self.num_microbatches, inputs_per_row=_inputs_per_row(self.model))
        placed = {name: _place(value, self.mesh.device) for name, value in batch.items()}
        counts = [_count_targets(self.model, part) for part in _microbatches(placed, rows, self.num_microbatches)]
        num_tokens = sum(counts)
        begin_step(self.model)
        total = torch.zeros((), device=self.mesh.device)
        for part, count in zip(_microbatches(placed, rows, self.num_microbatches), counts, strict=True):
            total += self._microbatch(part, count / num_tokens if num_tokens else 0.0)
        reduce_gradients(self.model)
        return StepResult(loss=total, num_tokens=num_tokens)

    def _microbatch(self, part: Mapping[str, Any], weight: float) -> Tensor:
        """Backward of one microbatch's mean loss times `weight`; returns that product, detached."""
        loss = self.model(**part).loss
        if weight == 0.0:
            # The mean over no targets is 0/0; what it would have been is nothing.
            loss = torch.nan_to_num(loss) * 0.0
        scaled = loss if weight == 1.0 else loss * weight
        if weight:
            scaled.backward()
        return scaled.detach().float()


def _check_batch(batch: Mapping[str, Any], num_microbatches: int, *, inputs_per_row: int) -> int:
    """The number of rows; raises where the batch cannot be trained on."""
    if not isinstance(batch, Mapping):
        raise BatchError(
            f"a batch cannot be a {type(batch).__name__}",
            fix='pass a dict of the model\'s inputs, such as {"input_ids": ids, "labels": ids}',
        )
    labels = batch.get("labels")
    if labels is None:
        raise BatchError(
            f"the batch has no labels (it has {', '.join(sorted(batch)) or 'nothing'})",
            why="the model computes its loss from them",
            fix='add "labels": the input ids themselves for causal models, with -100 where nothing is to be learned',
        )
    if not isinstance(labels, Tensor) or not labels.ndim:
        raise BatchError(
            f"labels cannot be {'a scalar' if isinstance(labels, Tensor) else f'a {type(labels).__name__}'}",
            why="a step counts the targets of every row",
            fix="pass a tensor [rows, …], such as torch.tensor(labels)",
        )
    num_rows = labels.shape[0]
    if num_rows == 0 or num_rows % num_microbatches:
        raise BatchError(
            f"{num_rows} rows do not divide into {num_microbatches} microbatches",
            why="every microbatch has the same number of rows, at least one",
            fix=f"use a multiple of {num_microbatches} rows, or another num_microbatches",
        )
    rows = {name: value.shape[0] for name, value in batch.items() if isinstance(value, Tensor) and value.ndim}
    legal = {num_rows, num_rows * inputs_per_row}
    if any(count not in legal and not (name in _SHARED and count == 1) for name, count in rows.items()):
        raise BatchError(
            "the tensors of the batch differ in rows",
            why=", ".join(f"{name}: {count}" for name, count in rows.items()),
            fix="give every tensor as many rows as the labels have",
        )
    return num_rows


def _inputs_per_row(model: nn.Module) -> int:
    """Rows of inputs for each row of labels: models of audio codes take one for each of their codebooks."""
    config = getattr(model, "config", None)
    return getattr(getattr(config, "decoder", None) or config, "num_codebooks", None) or 1


def _microbatches(batch: Mapping[str, Any], rows: int, count: int) -> list[dict[str, Any]]:
    """Equal runs of rows; a tensor with several rows for each row of labels gives them along, one row for all is
    shared.
    """

    def part(value: Any, index: int) -> Any:
        if count == 1 or not isinstance(value, Tensor) or not value.ndim or value.shape[0] < rows:
            return value
        size = value.shape[0] // count
        return value[index * size : (index + 1) * size]

    return [{name: part(value, index) for name, value in batch.items()} for index in range(count)]


def _place(value: Any, device: torch.device) -> Any:
    return value.to(device, non_blocking=True) if isinstance(value, Tensor) else value


def _count_targets(model: nn.Module, batch: Mapping[str, Any]) -> int:
    """Labels that the model's loss counts: those not ignored, the first of each row aside where it shifts them."""
    labels: Tensor = batch["labels"]
    if labels.ndim > 1 and getattr(model, "loss_type", None) == "ForCausalLM":
        labels = labels[..., 1:]
    return int((labels != IGNORED).sum())
