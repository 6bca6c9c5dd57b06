"""Marks on autograd's nodes, by which a gradient's path tells where it is summed over ranks or taken apart."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shardwise.comm.collectives import PART_NODES

__all__ = ["ends_stack", "is_of_head", "mark_loss", "mark_stack_end", "takes_parts"]

_STACK_END, _HEAD = "shardwise.stack_end", "shardwise.head"


def mark_stack_end(x: Tensor) -> None:
    """Marks the node of what leaves a stack of layers, in which gradients are summed over tp."""
    if x.grad_fn is not None and not torch.compiler.is_compiling():
        _metadata(x)[_STACK_END] = True


def mark_loss(loss: Tensor, *, takes_parts: bool) -> None:
    """Marks the node of a loss that a head computes from this rank's classes.

    Args:
        takes_parts: whether it is given logits, whose gradient it takes apart.
    """
    if loss.grad_fn is not None and not torch.compiler.is_compiling():
        _metadata(loss)[_HEAD] = takes_parts


def _metadata(x: Tensor) -> Any:
    node: Any = x.grad_fn
    return node.metadata


def ends_stack(node: Any) -> bool:
    """Whether gradients are summed over tp in a node, where a stack of layers ends."""
    return _STACK_END in node.metadata


def takes_parts(node: Any) -> bool:
    """Whether a node gives each rank its part of a gradient."""
    return isinstance(node, PART_NODES) or bool(node.metadata.get(_HEAD))


def is_of_head(node: Any) -> bool:
    """Whether a node is one of a split head and its loss."""
    return isinstance(node, PART_NODES) or _HEAD in node.metadata
