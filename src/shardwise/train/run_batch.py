"""Forward and backward of one batch by any split model, also a hand-written one that computes its own loss."""

from __future__ import annotations

from collections.abc import Mapping
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.errors import BatchError, UnsupportedError
from shardwise.mesh import Mesh
from shardwise.parameters.registry import registry_of
from shardwise.pipeline.runner import runner_of
from shardwise.runtime.adapters import find_model
from shardwise.train.step import TrainStep

__all__ = ["add_runners", "named_inputs", "run_batch"]


def run_batch(model: nn.Module, mesh: Mesh, *args: Any, num_microbatches: int = 1, **kwargs: Any) -> Tensor:
    """Forward and backward of one batch; the loss, detached.

    A planned model with labels is trained as `TrainStep` does: the loss is the mean over the tokens of all data ranks'
    batches, the same on every rank, and microbatches and pipelines work. Any other model gives its loss, an output
    with a `loss`, or a tuple that begins with it; gradients are means over data ranks.

    Args:
        args: one dictionary of inputs, or the arguments of forward.

    Raises:
        BatchError: the model gives no loss.
        UnsupportedError: a pipeline without named arguments and labels.

    Communicates: as `TrainStep`, or as the model's forward and backward.
    """
    args, kwargs = named_inputs(args, kwargs)
    if not args and "labels" in kwargs and not registry_of(model).local_state:
        return TrainStep(model, mesh, num_microbatches=num_microbatches)(kwargs).loss
    if num_microbatches > 1 or mesh.size("pp") > 1:
        raise UnsupportedError(
            f"{num_microbatches} microbatches on {mesh.shape} of a batch without labels, or without names",
            why="it is the model's own targets that say how microbatches are weighted",
            fix="pass the keyword arguments of the model's forward, labels included",
        )
    loss = _loss_of(model(*args, **kwargs))
    loss.backward()
    return loss.detach()


def add_runners(model: nn.Module, *, num_microbatches: int) -> None:
    """Gives a split model `run_train` and `run_eval`, and a pipeline its number of microbatches, where rows divide."""
    pipeline = runner_of(find_model(model))
    if pipeline is not None:
        pipeline.num_microbatches = num_microbatches
    model.__dict__["run_train"] = MethodType(_run_train, model)
    model.__dict__["run_eval"] = MethodType(_run_eval, model)


def _run_train(model: Any, *args: Any, **kwargs: Any) -> Tensor:
    """Forward and backward of one batch, in the microbatches that were asked for; the loss, detached."""
    pipeline = runner_of(find_model(model))
    number = (pipeline.num_microbatches if pipeline is not None else None) or 1
    if pipeline is None or pipeline.takes(number):
        return run_batch(model, registry_of(model).mesh, *args, num_microbatches=number, **kwargs)
    args, kwargs = named_inputs(args, kwargs)
    loss: Tensor = model(*args, **kwargs).loss
    loss.backward()
    return loss.detach()


@torch.no_grad()
def _run_eval(model: Any, *args: Any, **kwargs: Any) -> Any:
    """What the model computes, without gradients."""
    args, kwargs = named_inputs(args, kwargs)
    return model(*args, **kwargs)


def named_inputs(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call; one dictionary of inputs is taken apart."""
    if len(args) == 1 and isinstance(args[0], Mapping) and not kwargs:
        return (), dict(args[0])
    return args, dict(kwargs)


def _loss_of(output: Any) -> Tensor:
    loss = getattr(output, "loss", None) if not isinstance(output, Tensor) else output
    if loss is None and isinstance(output, tuple | list) and output:
        loss = output[0]
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        raise BatchError(
            f"the model gave {type(output).__name__}, which is no loss",
            fix="let forward return the loss, an output with a loss, or a tuple that begins with it; pass labels",
        )
    return loss
