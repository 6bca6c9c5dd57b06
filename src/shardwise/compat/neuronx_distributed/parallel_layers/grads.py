"""`clip_grad_norm`: by the norm of the full gradients."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor, nn

from shardwise.compat.layers.split_module import mark_known
from shardwise.compat.neuronx_distributed.parallel_layers.parallel_state import current_mesh
from shardwise.errors import ConfigError
from shardwise.optim.clip import clip_grad_norm_
from shardwise.optim.summing import average_gradients

__all__ = ["clip_grad_norm", "get_grad_norm"]


def clip_grad_norm(parameters: Any, max_norm: float, norm_type: float | str = 2, *args: Any, **options: Any) -> Tensor:
    """Clips the gradients of `parameters`, an iterable of any kind, one tensor or a model, by the norm of the full
    ones, after averaging over data ranks what nobody has.

    Args:
        norm_type: p of the p-norm; "inf" or `math.inf` for the largest entry.
        args, options: without meaning here: every element counts once, however it is stored.

    Returns:
        The norm before clipping, float32 scalar, the same on every rank.

    Communicates: as `average_gradients`; over all ranks, one all-reduce of one value.
    """
    chosen = _listed(parameters)
    average_gradients(chosen, current_mesh())
    return get_grad_norm(chosen, norm_type, max_norm=max_norm)


def get_grad_norm(parameters: Any, norm_type: float | str = 2, *args: Any, **options: Any) -> Tensor:
    """The norm of the full gradients, as `clip_grad_norm` returns it; gradients stay as they are."""
    if isinstance(norm_type, str) and norm_type.lower() not in ("inf", "infinity"):
        raise ConfigError(f"norm_type is {norm_type!r}", fix='use a positive number, or "inf"')
    chosen = _listed(parameters)
    mark_known(chosen, current_mesh())
    return clip_grad_norm_(chosen, options.get("max_norm", math.inf), float(norm_type))


def _listed(parameters: Any) -> list[Tensor]:
    found = parameters.parameters() if isinstance(parameters, nn.Module) else parameters
    return [found] if isinstance(found, Tensor) else list(found)
