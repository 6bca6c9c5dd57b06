"""`pad_model`: attention heads that do not divide by the number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from shardwise.compat.layers.padded_heads import pad_heads

__all__ = ["get_number_of_extra_heads", "pad_model"]


def get_number_of_extra_heads(n_head: int, tp_degree: int) -> int:
    """How many heads are missing to a multiple of the ranks."""
    return -n_head % tp_degree


def pad_model(
    model: nn.Module,
    tp_degree: int,
    n_heads: int,
    wrapped_classes: Sequence[type[nn.Module]] = (),
    pad_hook_fn: Callable[[nn.Module, float], Any] | None = None,
) -> nn.Module:
    """Lets a hand-written model that counts `n_heads` and the extra ones divide them, in place; what it computes stays.

    Args:
        wrapped_classes: whose linears have heads; by default all (which is right, and moves more).
        pad_hook_fn: called with the model and the ratio of heads to padded heads, as theirs.

    Raises:
        UnsupportedError: a linear gathers its output, or is fused.

    Communicates: as `pad_heads`, to which its parameters' sizes are due: they stay true, in checkpoints, too.
    """
    pad_heads(model, n_heads, within=tuple(wrapped_classes))
    if pad_hook_fn is not None:
        pad_hook_fn(model, n_heads / (n_heads + get_number_of_extra_heads(n_heads, tp_degree)))
    return model
