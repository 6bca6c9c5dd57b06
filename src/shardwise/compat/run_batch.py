"""Forward and backward of one batch by any split model, including hand-written ones that compute their own loss."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from shardwise.comm.agree import raise_on_all_ranks
from shardwise.comm.collectives import all_gather_objects, all_reduce_
from shardwise.data.batch import check_rows, count_targets, split_rows, target_names
from shardwise.errors import BatchError, UnsupportedError
from shardwise.optim.gradients import gradients_of
from shardwise.parameters.registry import registry_of
from shardwise.pipeline.forward import named_call
from shardwise.pipeline.runner import PipelineRunner, runner_of
from shardwise.pipeline.stage import Microbatch
from shardwise.runtime.adapter_facts import find_model
from shardwise.schedule.schedule import Schedule
from shardwise.topology.shape import DATA_AXES
from shardwise.train.step import TrainStep


class BatchRunner:
    """Runs forward and backward of batches, and forwards without gradients.

    A planned model with labels is trained by a `TrainStep`: the loss is the mean over the tokens of all data ranks'
    batches, the same on every rank. Any other model returns its loss, an output with a `loss`, or a tuple that begins
    with it. Then gradients are means over data ranks, and the loss is this rank's.

    Args:
        num_microbatches: of a pipeline. If its schedule does not support the number, stages run one after the other.
        averages: return the mean of the data ranks' losses, also for a hand-written model.
    """

    def __init__(self, model: nn.Module, *, num_microbatches: int = 1, averages: bool = False) -> None:
        self._model, self._mesh, self._averages = model, registry_of(model).mesh, averages
        self._num_microbatches = num_microbatches if self._mesh.size("pp") > 1 else 1
        self._step: _Step | None = None  # from the first batch on: what it needs of the model is read once

    def run_train(self, *args: Any, **kwargs: Any) -> Tensor:
        """Runs forward and backward of one batch, through all stages of a pipeline; returns the detached loss on every
        rank. Takes one dictionary of inputs, or the arguments of the model's forward.

        Communicates: like `TrainStep`, or like the model's forward and backward; in a pipeline also one all-reduce over
        pp.
        """
        args, kwargs = _named_inputs(args, kwargs)
        if registry_of(self._model).local_state:
            loss, data = self._run_by_hand(args, kwargs), self._mesh.group(*DATA_AXES)
            if self._averages and data is not None:
                all_reduce_(loss, data)
                loss /= self._mesh.data_size
            return loss
        arguments = named_call(find_model(self._model), args, kwargs)
        if "labels" in arguments:
            if self._step is None:
                self._step = _Step(self._model, self._mesh, num_microbatches=self._num_microbatches)
            return self._step(arguments).loss
        if self._mesh.size("pp") > 1:
            raise UnsupportedError(
                f"a batch without labels on {self._mesh.shape}",
                why="it is the model's own targets that say how microbatches are weighted",
                fix="pass the keyword arguments of the model's forward, labels included",
            )
        loss = _loss_of(self._model(**arguments))
        loss.backward()
        return loss.detach()

    @torch.no_grad()
    def run_eval(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the output of the model, without gradients; the same on every rank of a pipeline."""
        args, kwargs = _named_inputs(args, kwargs)
        return self._model(*args, **kwargs)

    def _run_by_hand(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        """Forward and backward of all microbatches, weighted by targets or by rows. Returns the loss of this data rank.

        Communicates: one gather of a small object over all ranks, and one over tp and pp; what the model does, and one
        all-reduce over pp.
        """
        model, mesh, number = self._model, self._mesh, self._num_microbatches
        pipeline, gradients = runner_of(find_model(model)), gradients_of(model)
        if pipeline is None:
            loss = _loss_of(model(*args, **kwargs))
            loss.backward()
            return loss.detach()
        with raise_on_all_ranks(mesh.group(), "dividing its batch"):
            arguments = named_call(find_model(model), args, kwargs)
            tensors = [value for value in tree_leaves(arguments) if isinstance(value, Tensor) and value.ndim]
            rows = tensors[0].shape[0] if tensors else 0
            check_rows(rows, number)
            parts = split_rows(arguments, rows, number)
            schedule = pipeline.fitting(number)
        placed = tree_map_only(Tensor, lambda each: each.to(mesh.device), parts)
        has_targets = any(isinstance(parts[0].get(name), Tensor) for name in target_names(model))
        counts = [float(count_targets(model, part)) if has_targets else 1.0 for part in parts]
        weights = [count / sum(counts) if any(counts) else 1 / number for count in counts]
        total = torch.zeros((), device=mesh.device)

        def microbatch(part: dict[str, Any], weight: float) -> Microbatch:
            def loss_of(output: Any) -> Tensor:
                loss = _loss_of(output) * weight
                total.add_(loss.detach().sum())
                return loss

            made_up = {} if weight else {"labels": part["labels"].clamp(min=0)}  # a mean over no targets is NaN
            return Microbatch(part | made_up, loss_of)

        microbatches = [microbatch(*each) for each in zip(placed, weights, strict=True)]
        trained = [any(each.requires_grad for each in model.parameters()), mesh.coord("pp")]
        gradients.note_trained(all_gather_objects(trained, registry_of(model).context.same_rows))
        with gradients.no_sync():
            pipeline.run(microbatches, schedule)
        all_reduce_(total, pipeline.group)
        return total


class _Step(TrainStep):
    """A `TrainStep` with a variable number of microbatches."""

    @staticmethod
    def _schedule_of(pipeline: PipelineRunner, num_microbatches: int) -> Schedule:
        return pipeline.fitting(num_microbatches)


def add_runners(model: nn.Module, *, num_microbatches: int) -> None:
    """Adds `run_train` and `run_eval` to a split model, and sets a pipeline's number of microbatches."""
    pipeline = runner_of(find_model(model))
    if pipeline is not None:
        pipeline.num_microbatches = num_microbatches
    runner = BatchRunner(model, num_microbatches=num_microbatches)
    model.__dict__.update(run_train=runner.run_train, run_eval=runner.run_eval)


def _named_inputs(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns the arguments of a call; one dictionary of inputs becomes keyword arguments."""
    if len(args) == 1 and isinstance(args[0], Mapping) and not kwargs:
        return (), dict(args[0])
    return args, dict(kwargs)


def _loss_of(output: Any) -> Tensor:
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", output)
    if isinstance(loss, tuple | list) and loss:
        loss = loss[0]
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        raise BatchError(
            f"the model returned {type(output).__name__}, which is no loss",
            fix="let forward return the loss, an output with a loss, or a tuple that begins with it; pass labels",
        )
    return loss
