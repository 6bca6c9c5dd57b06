"""Steps with infinite or NaN gradients: skipped or an error, on all ranks alike.

# [Note: left out on the device]
Asking a GPU whether a norm is finite waits for all of its work. torch's fused optimizers accept the answer as a tensor,
`found_inf`, and change neither parameters nor states if it is set; the float16 loss scale is updated on the device too.
So the host reads nothing until its next step. If such a step should raise, all later steps are skipped too: when the
host learns of it, the weights are still those before the bad step. Other optimizers wait for the answer, one read per
step; undoing their updates would need a copy of parameters and states before every step (docs/decisions/0031).
"""

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from shardwise.errors import GradientError
from shardwise.optim.clip import clip_grad_norm_
from shardwise.optim.gradients import Gradients, HostCopy, gradients_of
from shardwise.optim.plain_step import can_skip_on_device, skip_step_on_device
from shardwise.parameters.registry import local_part


def check_finite_before_step(model: nn.Module, gradients: Gradients, optimizer: torch.optim.Optimizer) -> None:
    """Raises, drops the gradients, or skips the step on the device, if a gradient is infinite or NaN on any rank; see
    `Precision`.

    Called before a step of `optimizer`.

    Communicates: the norm's all-reduce, unless `clip_grad_norm_` has just done it.
    """
    precision, scale = gradients.registry.precision, gradients.loss_scale
    if precision is None or (precision.nonfinite == "ignore" and scale is None):
        return
    check_steps(model)
    raises = precision.nonfinite == "raise" and scale is None
    if gradients.is_bad is None:
        norm = gradients.norm if gradients.norm is not None else clip_grad_norm_(model, math.inf)
        seen = norm + gradients.loss.to(norm.device) if raises and gradients.loss is not None else norm
        gradients.loss = None
        gradients.is_bad = (~torch.isfinite(seen)).float()
        if scale is not None:
            scale.update(gradients.is_bad)
    is_bad = gradients.is_bad
    if gradients.is_late and can_skip_on_device(optimizer, is_bad.device):
        if raises:
            is_bad = gradients.fault = is_bad if gradients.fault is None else torch.maximum(gradients.fault, is_bad)
            gradients.pending_fault = HostCopy(is_bad)
        skip_step_on_device(optimizer, is_bad)
        return
    if not bool(is_bad):
        return
    if raises:
        assert gradients.norm is not None
        raise GradientError(
            f"the gradient norm is {float(gradients.norm)}",
            why=_culprits(model.named_parameters()),
            fix='lower the learning rate, look at the batch, or train with Precision(nonfinite="skip")',
        )
    for parameter in model.parameters():
        parameter.grad = None


def check_steps(model: nn.Module) -> Gradients:
    """State of a model's gradients, after a check that no step skipped on the device should have raised; see [Note:
    left out on the device].
    """
    gradients = gradients_of(model)
    late, gradients.pending_fault = gradients.pending_fault, None
    if late is None or not late.read():
        return gradients
    gradients.fault = None
    raise GradientError(
        "the loss or the gradient norm of an earlier step was infinite or NaN",
        why="the device has skipped that step and all later ones, so the weights are those before it",
        fix='lower the learning rate, look at the batch, or train with Precision(nonfinite="skip")',
    )


def _culprits(parameters: Iterable[tuple[str, Tensor]], most: int = 3) -> str:
    names = [name for name, p in parameters if p.grad is not None and not bool(local_part(p.grad).isfinite().all())]
    if not names:
        return "on another rank"
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return f"infinite or NaN: the gradients of {', '.join(names[:most])}{more}"
