"""Gradient norms and clipping over every rank that holds a part."""

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from shardwise.errors import ConfigError
from shardwise.optim.gradients import PIPELINED, gradients_of
from shardwise.optim.summing import multiply
from shardwise.parameters.local_gradient import complete_norms, norm_of_owned
from shardwise.parameters.registry import (
    ParameterEntry,
    Registry,
    entry_of,
    find_parameters,
    local_part,
    registry_of,
    reshard,
)


def clip_grad_norm_(
    parameters: nn.Module | Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    *,
    error_if_nonfinite: bool = False,
    model: nn.Module | None = None,
) -> Tensor:
    """Clips the gradients to a global norm, like `torch.nn.utils.clip_grad_norm_` on the unsplit model.

    Every canonical element counts once, however many ranks hold it.

    Args:
        parameters: a split model, or some of its parameters: the same ones on every rank, as far as it holds them.
        max_norm: maximum norm; `math.inf` only computes the norm.
        norm_type: p of the p-norm, `math.inf` for the largest entry.
        error_if_nonfinite: raise if the norm is infinite or NaN.
        model: the split model of these parameters. Pipelines of several models need it where a stage may have none of
            them.

    Returns:
        The norm before clipping, float32 scalar, the same on every rank.

    Raises:
        ConfigError: `norm_type` is not positive; `max_norm` is negative, NaN or no number; or `model` is needed.
        RuntimeError: the norm is infinite or NaN and `error_if_nonfinite` is set; on every rank.

    Communicates: over all ranks, one all-reduce of one value.
    """
    if not isinstance(norm_type, int | float) or not norm_type > 0:
        raise ConfigError(f"norm_type must be positive or math.inf, got {norm_type!r}", fix="2 is the usual one")
    if not isinstance(max_norm, int | float | Tensor) or not max_norm >= 0:
        raise ConfigError(f"max_norm must be at least 0, got {max_norm!r}", fix="math.inf clips nothing")
    gradients, registry = _gradients(parameters, model)
    total = norm_of_owned(gradients, norm_type)
    if registry is not None:
        total = complete_norms(total, registry, norm_type)
    if isinstance(parameters, nn.Module):
        gradients_of(parameters).norm = total
    if error_if_nonfinite and not bool(torch.isfinite(total)):
        raise RuntimeError(f"the gradient norm of order {norm_type} is {float(total)}, so it cannot be clipped")
    if registry is not None and isinstance(max_norm, int | float):  # no tensor, which would be read
        registry.context.steps.add(f"clip_grad_norm_ to {max_norm}")
    if gradients and math.isfinite(max_norm):
        factor = torch.clamp(max_norm / (total + 1e-6), max=1.0)
        multiply([value for value, _ in gradients], factor)
    return total


def _gradients(
    parameters: nn.Module | Tensor | Iterable[Tensor], model: nn.Module | None
) -> tuple[list[tuple[Tensor, ParameterEntry | None]], Registry | None]:
    """Returns the local tensors of complete gradients, each with its parameter's entry; None if it has none."""
    if isinstance(parameters, nn.Module):
        model = parameters
        reshard(model)
        gradients_of(model).sync_if_partial()
        tensors: list[Tensor] = [parameter for _, parameter, _ in find_parameters(model)]  # marked with their entries
    else:
        tensors = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    entries = (entry for parameter in tensors if (entry := entry_of(parameter)) is not None)
    registry = next((entry.registry for entry in entries), None)
    if registry is None and model is not None:  # a stage without any takes part in the sum
        registry = registry_of(model)
    if not tensors and model is None and PIPELINED:
        registry, *others = (each.registry for each in PIPELINED)
        if others:
            raise ConfigError(
                "a norm of no parameters, with several models in pipelines",
                why="other stages of one of them may wait for this one",
                fix="pass model=",
            )
    return [(local_part(each.grad), entry_of(each)) for each in tensors if each.grad is not None], registry
