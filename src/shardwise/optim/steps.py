"""Steps over plain local tensors, and steps with infinite or NaN gradients: skipped or an error, on all ranks alike.

An operation on `DTensor`s costs Python time for every tensor. Elementwise optimizers update parts like full tensors, so
a step gets the local parts. Groups and states keep parameters and tensors of their form.

# [Note: left out on the device]
Asking a GPU whether a norm is finite waits for all of its work. torch's fused optimizers accept the answer as a tensor,
`found_inf`, and change neither parameters nor states if it is set; the float16 loss scale is updated on the device too.
So the host reads nothing until its next step. If such a step should raise, all later steps are skipped too: when the
host learns of it, the weights are still those before the bad step. Other optimizers wait for the answer, one read per
step; undoing their updates would need a copy of parameters and states before every step (docs/decisions/0031).
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardwise.errors import GradientError, listed
from shardwise.optim.clip import clip_grad_norm_
from shardwise.optim.gradients import Gradients, HostCopy, gradients_of
from shardwise.parameters.registry import LocalGradient, entry_of, local_part

_HOW = ("foreach", "fused", "capturable", "differentiable")


class _PlainStep(torch.optim.Adam):
    def _init_group(self, group: Any, *lists: list[Any]) -> Any:
        """Returns torch's lists of parameters, gradients and states for a step, with local tensors."""
        has_complex = super()._init_group(group, *lists)
        for values in lists:
            values[:] = [local_part(x) if isinstance(x, DTensor | LocalGradient) else x for x in values]  # type: ignore[arg-type]
        return has_complex

    def __reduce__(self) -> Any:
        return _new, (class_of(self),), self.__getstate__()


class Adam(_PlainStep):
    __module__, __doc__ = torch.optim.Adam.__module__, torch.optim.Adam.__doc__  # checkpoints name torch's class


class AdamW(_PlainStep, torch.optim.AdamW):
    __module__, __doc__ = torch.optim.AdamW.__module__, torch.optim.AdamW.__doc__


_STEPPING: Mapping[Any, Any] = {torch.optim.Adam: Adam, torch.optim.AdamW: AdamW}


def _new(optimizer_class: type[torch.optim.Optimizer]) -> torch.optim.Optimizer:
    made = stepping_class(optimizer_class)
    return made.__new__(made)


def stepping_class(optimizer_class: type[torch.optim.Optimizer]) -> type[torch.optim.Optimizer]:
    """Returns the class that steps over local tensors in place of torch's Adam or AdamW; other classes unchanged."""
    stepping: type[torch.optim.Optimizer] = _STEPPING.get(optimizer_class, optimizer_class)
    return stepping


def class_of(optimizer: torch.optim.Optimizer) -> type[torch.optim.Optimizer]:
    """Returns the class that the user asked for: torch's, if the optimizer's class replaces it."""
    kind = type(optimizer)
    return next((asked for asked, stepping in _STEPPING.items() if kind is stepping), kind)


def inner_of(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Returns the optimizer that updates: the one inside torch's `ZeroRedundancyOptimizer`, or `optimizer` itself."""
    inner = getattr(optimizer, "optim", None)
    return inner if isinstance(inner, torch.optim.Optimizer) else optimizer


def can_skip_on_device(optimizer: torch.optim.Optimizer, device: torch.device) -> bool:
    """Returns whether a scalar on `device` can skip a step of the optimizer; the same on all ranks."""
    optimizer = inner_of(optimizer)
    return (
        isinstance(optimizer, _PlainStep)
        and "grad_scale" not in optimizer.__dict__  # as GradScaler gives it, with a found_inf of its own
        and all(
            group["fused"] and {each.device for each in group["params"]} <= {device} for group in optimizer.param_groups
        )
    )


def skip_step_on_device(optimizer: Any, is_left_out: Tensor) -> None:
    """Makes the optimizer's next step change nothing if the float32 scalar `is_left_out` is 1."""
    optimizer = inner_of(optimizer)
    known = optimizer.__dict__.get("found_inf")  # of another model of its
    optimizer.found_inf = is_left_out if known is None else torch.maximum(known, is_left_out)
    if _forget not in optimizer._optimizer_step_post_hooks.values():
        optimizer.register_step_post_hook(_forget)


def _forget(optimizer: Any, *_: Any) -> None:
    optimizer.__dict__.pop("found_inf", None)


def with_fused(
    optimizer_class: type[torch.optim.Optimizer], options: Mapping[str, Any], parameters: Sequence[Tensor]
) -> dict[str, Any]:
    """Returns `options` with torch's fused implementation, which allocates no temporary tensors, for Adam and AdamW.

    On CPUs the fused form rounds the last few elements of a tensor differently. If several tp ranks hold copies of a
    parameter, perhaps at other positions, the option is another one there, so that copies stay equal.
    """
    asked = any(name in options for name in _HOW) or isinstance(options.get("lr"), Tensor)
    entries = next((entry.registry.entries for each in parameters if (entry := entry_of(each)) is not None), {})
    # Of the whole model: stages that hold copies of a parameter must choose alike.
    is_on_host = any(each.device.type == "cpu" for each in parameters)
    is_shared_on_host = is_on_host and any(each.holders for each in entries.values())
    is_floating = all(parameter.is_floating_point() for parameter in parameters)
    if optimizer_class not in _STEPPING or asked or not parameters or is_shared_on_host or not is_floating:
        return dict(options)
    return {**options, "fused": True}


def check_finite_before_step(model: nn.Module, gradients: Gradients, optimizer: torch.optim.Optimizer) -> None:
    """Raises, drops the gradients, or skips the step on the device, if a gradient is infinite or NaN on any rank.

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
    """Returns the gradients' state, after a check that no step skipped on the device should have raised."""
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


def _culprits(parameters: Iterable[tuple[str, Tensor]]) -> str:
    names = [name for name, p in parameters if p.grad is not None and not bool(local_part(p.grad).isfinite().all())]
    return f"infinite or NaN: the gradients of {listed(names, 3)}" if names else "on another rank"
