"""Forward and backward of one batch by any split model, also a hand-written one that computes its own loss."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from shardwise.errors import BatchError, UnsupportedError
from shardwise.mesh import Mesh
from shardwise.runtime.registry import registry_of
from shardwise.train.step import TrainStep

__all__ = ["named_inputs", "run_batch"]


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
