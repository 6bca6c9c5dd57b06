"""Stashed gradients of a forward through a pipeline, released by the loop's backward.

# [Note: gradients released by backward]
Parameters enter the loss's graph as if the loss had been computed from them here. So autograd handles their gradients
as usual: `backward()` adds them to `.grad`, `inputs=` selects some, `torch.autograd.grad` returns them, and hooks on
parameters receive the gradient of the whole batch, once. The schedule's own backwards, of single microbatches, call
none of these hooks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.autograd.function import once_differentiable

from shardwise.errors import UnsupportedError
from shardwise.optim.gradients import gradients_of
from shardwise.parameters.registry import local_part

__all__ = ["emit_stashed_grads", "refuse_gradient", "stashed_grads"]

Kept = list[tuple[nn.Parameter, Tensor]]


@contextmanager
def stashed_grads(model: nn.Module) -> Iterator[Kept]:
    """Context manager: gradients start at None inside; afterwards the previous ones are restored, and the new ones are
    in the yielded dict.
    """
    before = [(parameter, parameter.grad) for parameter in model.parameters()]
    kept: Kept = []
    for parameter, _ in before:
        parameter.grad = None
    try:
        with _without_hooks([parameter for parameter, _ in before]):
            yield kept
    finally:
        kept += [(parameter, parameter.grad) for parameter in model.parameters() if parameter.grad is not None]
        for parameter, gradient in before:
            parameter.grad = gradient


@contextmanager
def _without_hooks(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    found = [
        hooks for each in parameters for hooks in (each._backward_hooks, each._post_accumulate_grad_hooks) if hooks
    ]
    aside = [dict(hooks) for hooks in found]
    for hooks in found:
        hooks.clear()
    try:
        yield
    finally:
        for hooks, own in zip(found, aside, strict=True):
            hooks.update(own)


def emit_stashed_grads(
    loss: Tensor,
    model: nn.Module,
    kept: Kept,
    *,
    inputs: Sequence[Tensor],
    input_gradients: Sequence[Tensor],
    factor: float | Tensor,
) -> Tensor:
    """Returns `loss` with a backward that gives parameters and inputs the stashed gradients, once.

    Args:
        kept: gradients of parameters; emptied by backward.
        inputs: tensors that the caller has passed to the model, with their gradients.
        factor: factor of all gradients, besides the incoming gradient.
    """
    release = _Release(model, [gradient for _, gradient in kept], list(input_gradients), factor)
    parameters = [parameter for parameter, _ in kept]
    kept.clear()
    # Something of this graph needs a gradient on every rank, also on one that trains nothing.
    return _ReleaseGradients.apply(loss.detach(), release, torch.ones((), requires_grad=True), *inputs, *parameters)


class _Release:
    def __init__(self, model: nn.Module, kept: list[Tensor], inputs: list[Tensor], factor: float | Tensor) -> None:
        self.model, self.kept, self.inputs, self.factor = model, kept, inputs, factor
        self.is_done = False

    def __call__(self, incoming: Tensor) -> list[Tensor]:
        if self.is_done:
            raise RuntimeError("the gradients of this forward have been added already: run another forward")
        self.is_done = True
        factor = incoming * self.factor
        for gradient in self.kept:
            own = local_part(gradient)
            own.mul_(factor.to(own.device, own.dtype))
        released = [gradient * factor for gradient in self.inputs] + self.kept
        self.kept, self.inputs = [], []  # so that autograd need not copy them
        gradients = gradients_of(self.model)
        gradients.note_change()
        Variable._execution_engine.queue_callback(gradients.complete)  # nothing is partial: it says whose they are
        return released


class _ReleaseGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loss: Tensor, release: _Release, anchor: Tensor, *leaves: Tensor) -> Tensor:
        ctx.release = release
        return loss.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        return None, None, None, *ctx.release(gradient)


class _Refused(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, anchor: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        raise UnsupportedError(
            "a gradient of the output of a model in stages other than its loss",
            why="the backward of the stages has run in the forward, or there was no loss to start it from",
            fix="pass labels, and use the loss alone, or shardwise.TrainStep",
        )


def refuse_gradient(x: Tensor) -> Tensor:
    """`x` with a backward that raises UnsupportedError. Non-float values are returned unchanged."""
    if not x.is_floating_point():
        return x
    with torch.enable_grad():
        refused: Tensor = _Refused.apply(x, torch.ones((), requires_grad=True))
    return refused
