"""Stashed gradients of a forward through a pipeline, released by the loop's backward.

# [Note: gradients released by backward]
Parameters enter the loss's graph as if the loss had been computed from them here. So autograd handles their gradients
as usual: `backward()` adds them to `.grad`, `inputs=` selects some, `torch.autograd.grad` returns them, and hooks on
parameters receive the gradient of the whole batch, once. The schedule's own backwards, of single microbatches, call
none of these hooks.
"""

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

Kept = list[tuple[Tensor, Tensor]]


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


def emit_stashed_grads(loss: Tensor, model: nn.Module, kept: Kept, *, factor: float | Tensor) -> Tensor:
    """`loss`, whose backward gives parameters and inputs the gradients that were kept, once.

    Args:
        kept: what is given a gradient, with the gradient; it is emptied.
        factor: what all gradients are multiplied by, beside the gradient that comes in.
    """
    leaves, gradients = [leaf for leaf, _ in kept], [gradient for _, gradient in kept]
    kept.clear()
    # Something of this graph needs a gradient on every rank, also on one that trains nothing.
    anchor = torch.ones((), requires_grad=True)
    return _ReleaseGradients.apply(loss.detach(), model, gradients, factor, anchor, *leaves)


class _ReleaseGradients(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        loss: Tensor,
        model: nn.Module,
        kept: list[Tensor],
        factor: float | Tensor,
        anchor: Tensor,
        *leaves: Tensor,
    ) -> Tensor:
        ctx.model, ctx.kept, ctx.factor = model, kept, factor
        return loss.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, incoming: Tensor) -> tuple[Any, ...]:
        if ctx.kept is None:
            raise RuntimeError("the gradients of this forward have been added already: run another forward")
        factor = incoming * ctx.factor
        for gradient in ctx.kept:
            own = local_part(gradient)
            own.mul_(factor.to(own.device, own.dtype))
        released, ctx.kept = ctx.kept, None  # so that autograd need not copy them
        gradients = gradients_of(ctx.model)
        gradients.note_change()
        Variable._execution_engine.queue_callback(gradients.complete)  # nothing is partial: it says whose they are
        return None, None, None, None, None, *released


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
