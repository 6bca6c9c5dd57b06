"""`clip_grad_norm`: by the norm of the full gradients."""

from typing import Any

import torch
from torch import Tensor, nn

from shardwise.compat.layers.split_module import mark_known
from shardwise.compat.neuronx_distributed.parallel_layers.parallel_state import current_mesh
from shardwise.optim.clip import clip_grad_norm_
from shardwise.optim.summing import average_gradients

__all__ = ["clip_grad_norm"]


def clip_grad_norm(parameters: Any, max_norm: float, norm_type: float | str = 2, **options: Any) -> Tensor:
    """Clips the gradients of `parameters` (an iterable, one tensor or a model) by the norm of the full gradients.

    First averages gradients of unregistered parameters over data ranks.

    Args:
        norm_type: p of the p-norm; "inf" or `math.inf` for the largest entry.
        options: NxD's options, without effect: every element counts once, however it is stored.

    Returns:
        The norm before clipping, float32 scalar, the same on every rank.

    Communicates: like `average_gradients`; over all ranks, one all-reduce of one value.
    """
    found = parameters.parameters() if isinstance(parameters, nn.Module) else parameters
    chosen = [found] if isinstance(found, Tensor) else list(found)
    chosen = chosen or [torch.empty(0)]  # a stage without any takes part in the sum
    average_gradients(chosen, current_mesh())
    mark_known(chosen, current_mesh())
    return clip_grad_norm_(chosen, max_norm, float(norm_type))
