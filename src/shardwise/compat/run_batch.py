"""Forward and backward of one batch by any split model, also a hand-written one that computes its own loss."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from shardwise.comm.agree import raise_on_all_ranks
from shardwise.comm.operations import all_reduce_
from shardwise.data.batch import check_rows, count_targets, split_rows, target_names
from shardwise.errors import BatchError, UnsupportedError, counted
from shardwise.mesh import Mesh
from shardwise.optim.gradients import gradients_of
from shardwise.parameters.registry import registry_of
from shardwise.pipeline.forward import named_call
from shardwise.pipeline.runner import PipelineRunner, runner_of
from shardwise.pipeline.stage import Microbatch
from shardwise.runtime.adapters import find_model
from shardwise.runtime.arguments import argument_names
from shardwise.schedule.schedule import Schedule
from shardwise.topology.axes import DATA_AXES
from shardwise.train.step import Count, StepResult, TrainStep, Weight

__all__ = ["BatchRunner", "add_runners"]


class BatchRunner:
    """Runs forward and backward of one batch after another, and forwards without gradients.

    A planned model with labels is trained by one `TrainStep`: the loss is the mean over the tokens of all data ranks'
    batches, the same on every rank, and microbatches and pipelines work. Any other model gives its loss, an output
    with a `loss`, or a tuple that begins with it; gradients are means over data ranks, the loss is this rank's.

    Args:
        model: a split model.
        num_microbatches: where a pipeline's schedule does not take so many, its stages run one after the other.
        averages: return the mean of the data ranks' losses, also of a hand-written model.
        returns_each: return a list of the microbatches' losses.
    """

    def __init__(
        self, model: nn.Module, *, num_microbatches: int = 1, averages: bool = False, returns_each: bool = False
    ) -> None:
        self._model, self._mesh, self._num_microbatches = model, registry_of(model).mesh, num_microbatches
        self._averages, self._returns_each = averages, returns_each
        self._step: _Step | None = None  # from the first batch on: what it needs of the model is read once

    def run_train(self, *args: Any, **kwargs: Any) -> Any:
        """Runs forward and backward of one batch, through all stages of a pipeline.

        Args:
            args: one dictionary of inputs, or the arguments of the model's forward.

        Returns:
            The loss, detached, on every rank. With `returns_each` a list of the losses of this data rank's
            microbatches.

        Raises:
            BatchError: the model gives no loss, rows do not divide, or a loss of a microbatch without targets is asked
                for.
            UnsupportedError: microbatches, or a pipeline, of a planned model without named arguments and labels.

        Communicates: as `TrainStep`, or as the model's forward and backward; in a pipeline one all-reduce over pp.
        """
        args, kwargs = _named_inputs(args, kwargs)
        if registry_of(self._model).local_state:
            return self._run_by_hand(args, kwargs)
        args, kwargs = _named(self._model, args, kwargs)
        if not args and "labels" in kwargs:
            if self._step is None:
                new = _NotingStep if self._returns_each else _Step
                self._step = new(self._model, self._mesh, num_microbatches=self._num_microbatches)
            loss = self._step(kwargs).loss
            return self._losses_of_microbatches(self._step) if isinstance(self._step, _NotingStep) else loss
        if self._num_microbatches > 1 or self._mesh.size("pp") > 1 or self._returns_each:
            raise UnsupportedError(
                f"{counted(self._num_microbatches, 'microbatch')} on {self._mesh.shape} of a batch without labels, or "
                "without names",
                why="it is the model's own targets that say how microbatches are weighted",
                fix="pass the keyword arguments of the model's forward, labels included",
            )
        loss = _loss_of(self._model(*args, **kwargs))
        loss.backward()
        return loss.detach()

    def _losses_of_microbatches(self, step: _NotingStep) -> list[Tensor]:
        number, mesh = self._num_microbatches, self._mesh
        losses = torch.zeros(number, device=mesh.device)
        pipeline = runner_of(find_model(self._model))
        with raise_on_all_ranks(mesh.group(), "reading the losses of microbatches"):
            if pipeline is None or pipeline.is_last:
                _check_losses(len(step.seen), number)
                losses += torch.stack(step.seen)
        if pipeline is not None:
            all_reduce_(losses, pipeline.group)
        return list(losses)

    def _run_by_hand(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        losses, weights = _run_by_hand(self._model, self._mesh, args, kwargs, self._num_microbatches)
        if self._returns_each:
            with raise_on_all_ranks(self._mesh.group(), "reading the losses of microbatches"):
                _check_losses(int(weights.count_nonzero()), self._num_microbatches)
            return list(losses)
        loss, data = losses @ weights, self._mesh.group(*DATA_AXES)
        if self._averages and data is not None:
            all_reduce_(loss, data)
            loss /= self._mesh.data_size
        return loss

    @torch.no_grad()
    def run_eval(self, *args: Any, **kwargs: Any) -> Any:
        """Returns what the model computes, without gradients; the same on every rank of a pipeline."""
        args, kwargs = _named_inputs(args, kwargs)
        return self._model(*args, **kwargs)


def _check_losses(number: int, num_microbatches: int) -> None:
    if number != num_microbatches:
        raise BatchError("a microbatch has no targets", why="there is no loss of it", fix="leave it out")


class _Step(TrainStep):
    """Takes any number of microbatches."""

    @staticmethod
    def _schedule_of(pipeline: PipelineRunner, num_microbatches: int) -> Schedule:
        return pipeline.fitting(num_microbatches)


class _NotingStep(_Step):
    """Keeps the loss of every microbatch whose loss is computed here, in their order."""

    def __call__(self, batch: Mapping[str, Any]) -> StepResult:
        self.seen: list[Tensor] = []
        return super().__call__(batch)

    def _count(self, part: Mapping[str, Any]) -> Count:
        return count_targets(self.model, part)  # of one without targets there is no loss, which the host must know

    def _weighted(self, loss: Tensor, weight: Weight, scale: Weight) -> Tensor:
        self.seen.append(loss.detach().float())
        return super()._weighted(loss, weight, scale)


def _run_by_hand(
    model: nn.Module, mesh: Mesh, args: tuple[Any, ...], kwargs: dict[str, Any], num_microbatches: int
) -> tuple[Tensor, Tensor]:
    """Forward and backward of all microbatches: their losses and weights, by targets or by rows. A weight is 0 where
    there are no targets, and the loss then none.

    Communicates: one gather of a small object over all ranks, what the model does, over pp one all-reduce.
    """
    pipeline, gradients = runner_of(find_model(model)), gradients_of(model)
    if num_microbatches == 1 and pipeline is None:
        loss = _loss_of(model(*args, **kwargs))
        loss.backward()
        return loss.detach().view(1), torch.ones(1, device=loss.device, dtype=loss.dtype)
    with raise_on_all_ranks(mesh.group(), "dividing its batch"):
        parts = _parts(model, args, kwargs, num_microbatches)
        schedule = None if pipeline is None else pipeline.fitting(num_microbatches)
    placed = tree_map_only(Tensor, lambda each: each.to(mesh.device), parts)
    has_targets = any(isinstance(parts[0].get(name), Tensor) for name in target_names(model))
    counts = [float(count_targets(model, part)) if has_targets else 1.0 for part in parts]
    total = sum(counts)
    weights = [count / total if total else 1 / num_microbatches for count in counts]
    losses = torch.zeros(num_microbatches, device=mesh.device)

    def microbatch(number: int) -> Microbatch:
        def loss_of(output: Any) -> Tensor:
            loss = _loss_of(output)
            losses[number] = loss.detach()
            return loss * weights[number]

        made_up = {"labels": placed[number]["labels"].clamp(min=0)} if not weights[number] else {}  # it counts nothing
        return Microbatch(placed[number] | made_up, loss_of)

    microbatches = [microbatch(number) for number in range(num_microbatches)]
    with gradients.together():
        if pipeline is not None and schedule is not None:
            pipeline.run(microbatches, schedule)
        else:
            for each in microbatches:
                assert each.loss_of is not None
                each.loss_of(model(**each.arguments)).backward()
    if pipeline is not None:
        all_reduce_(losses, pipeline.group)
    return losses, torch.tensor(weights, device=mesh.device)


def _parts(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], count: int) -> list[dict[str, Any]]:
    """The named arguments of every microbatch."""
    arguments = named_call(find_model(model), args, kwargs)
    rows = next((value.shape[0] for value in tree_leaves(arguments) if isinstance(value, Tensor) and value.ndim), 0)
    check_rows(rows, count)
    return split_rows(arguments, rows, count)


def _named(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call by the names that the model's forward gives them, where none is given twice."""
    names = argument_names(find_model(model))
    if kwargs.keys() & set(names[: len(args)]):
        return args, kwargs
    return args[len(names) :], {**dict(zip(names, args, strict=False)), **kwargs}


def add_runners(model: nn.Module, *, num_microbatches: int) -> None:
    """Gives a split model `run_train` and `run_eval`, and a pipeline its number of microbatches, where rows divide."""
    pipeline = runner_of(find_model(model))
    if pipeline is not None:
        pipeline.num_microbatches = num_microbatches
    runner = BatchRunner(model, num_microbatches=num_microbatches if pipeline is not None else 1)
    model.__dict__.update(run_train=runner.run_train, run_eval=runner.run_eval)


def _named_inputs(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call; one dictionary of inputs is taken apart.

    Raises:
        BatchError: it is given one list or text alone, such as a whole batch.
    """
    if len(args) == 1 and isinstance(args[0], Mapping) and not kwargs:
        return (), dict(args[0])
    if len(args) == 1 and isinstance(args[0], list | tuple | str) and not kwargs:
        raise BatchError(
            f"a batch cannot be a {type(args[0]).__name__}", fix="pass a dictionary of inputs, or them by name"
        )
    return args, dict(kwargs)


def _loss_of(output: Any) -> Tensor:
    loss = getattr(output, "loss", None) if not isinstance(output, Tensor) else output
    if loss is None and isinstance(output, Mapping):
        loss = output.get("loss")
    if loss is None and isinstance(output, tuple | list) and output:
        loss = output[0]
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        raise BatchError(
            f"the model gave {type(output).__name__}, which is no loss",
            fix="let forward return the loss, an output with a loss, or a tuple that begins with it; pass labels",
        )
    return loss
