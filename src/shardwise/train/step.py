"""One training step, forward and backward, for every layout."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.comm.agree import failing_together
from shardwise.comm.operations import all_reduce_, host_device
from shardwise.errors import BatchError
from shardwise.layers.registry import expect_gradients, registry_of
from shardwise.mesh import Mesh
from shardwise.topology.axes import DATA_AXES
from shardwise.train.gradients import reduce_gradients

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
        self._registry = registry_of(model)
        self.model = model
        self.mesh = mesh
        self.num_microbatches = num_microbatches
        # Gradients are divided by a factor when they are reduced, so that the loss is multiplied by it.
        self._loss_factor = self._registry.divide_factor if mesh.data_size > 1 else 1.0

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

        Communicates: over all ranks, one all-reduce of the number of targets, where there are several data ranks; what
            the model's forward and backward do; the gradient phase (see [Note: one gradient phase]); over the data
            ranks, one all-reduce of the loss.
        """
        parts, counts, num_tokens = self._prepare(batch)
        expect_gradients(self.model)
        total = torch.zeros((), device=self.mesh.device)
        for number, (part, count) in enumerate(zip(parts, counts, strict=True)):
            self._time_reduction(is_last=number == len(parts) - 1)
            total += self._microbatch(part, count / num_tokens if num_tokens else 0.0)
        reduce_gradients(self.model)
        group = self.mesh.group(*DATA_AXES)
        if group is not None:
            all_reduce_(total, group)
        return StepResult(loss=total, num_tokens=num_tokens)

    def _prepare(self, batch: Mapping[str, Any]) -> tuple[list[dict[str, Any]], list[int], int]:
        """The microbatches, on the device, their numbers of targets, and the number over all ranks' batches."""
        fault: BatchError | None = None
        rows, counts = 0, [0]
        try:
            rows = _check_batch(batch, self.num_microbatches, inputs_per_row=_inputs_per_row(self.model))
            counts = [_count_targets(self.model, part) for part in _microbatches(batch, rows, self.num_microbatches)]
        except BatchError as error:
            if self.mesh.data_size == 1:
                raise
            fault = error
        num_tokens = self._sum_over_data(sum(counts), fault)
        placed = {name: _place(value, self.mesh.device) for name, value in batch.items()}
        return _microbatches(placed, rows, self.num_microbatches), counts, num_tokens

    def _sum_over_data(self, count: int, fault: BatchError | None) -> int:
        """The sum of all data ranks' counts. Where some rank's batch is at fault, its error, on every rank."""
        world = self.mesh.group()
        if self.mesh.data_size == 1 or world is None:
            return count
        totals = torch.tensor([count, fault is not None], device=host_device(world, self.mesh.device))
        all_reduce_(totals, world)
        num_tokens, num_faults = totals.tolist()
        if num_faults:
            with failing_together(self.mesh, "checking its batch"):
                if fault is not None:
                    raise fault
        return int(num_tokens) * self.mesh.data_size // self.mesh.shape.world_size

    def _time_reduction(self, *, is_last: bool) -> None:
        """Tells FSDP2 what this microbatch's backward reduces and frees; see `FsdpPolicy`."""
        root: Any = self._registry.data_root
        if root is None or self.num_microbatches == 1:
            return
        stage, shards = self._registry.policy.zero_stage, self.mesh.size("fsdp") > 1
        root.set_is_last_backward(is_last)
        if stage == 1 or not shards:
            root.set_requires_gradient_sync(is_last)
        elif self.mesh.size("ddp") > 1:
            root.set_requires_all_reduce(is_last)
        if stage < 3:
            root.set_reshard_after_backward(is_last)

    def _microbatch(self, part: dict[str, Any], weight: float) -> Tensor:
        """Backward of one microbatch's mean loss times `weight`; returns that product, detached."""
        if weight == 0.0:
            if self.mesh.data_size == 1:
                return torch.zeros((), device=self.mesh.device)
            # Other ranks wait for this one's gradients. The mean over no targets is 0/0, so some are made up: they
            # count nothing.
            part = part | {"labels": part["labels"].clamp(min=0)}
        loss = self.model(**part).loss
        factor = weight * self._loss_factor
        (loss if factor == 1.0 else loss * factor).backward()
        return loss.detach().float() * weight


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
