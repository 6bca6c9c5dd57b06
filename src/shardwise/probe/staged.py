"""Stages that run one after another in one process, and hand each other detached tensors as ranks do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from shardwise.stages.model import Stages
from shardwise.tiny.objective import clone_batch, loss_or_surrogate

__all__ = ["train_in_stages"]


def train_in_stages(stages: Sequence[Stages], batch: Mapping[str, Any]) -> tuple[Any, list[tuple[Tensor, ...]]]:
    """One forward and backward through all stages.

    Returns:
        The output of the last one, and what every cut was crossed by.
    """
    sent: list[tuple[Tensor, ...]] = []
    received: list[tuple[Tensor, ...]] = [()]
    output: Any = None
    for stage, each in enumerate(stages):
        output = each.run(stage, clone_batch(batch), received[-1])
        if stage < len(stages) - 1:
            expected, _ = stages[stage + 1].shapes(stage + 1, clone_batch(batch))
            sent.append(output)
            pairs = zip(output, expected, strict=True)
            received.append(tuple(value.detach().requires_grad_(known.needs_gradient) for value, known in pairs))
    loss_or_surrogate(output).backward()
    for values, copies in zip(reversed(sent), reversed(received), strict=False):
        given = [(x, y.grad) for x, y in zip(values, copies, strict=True) if x.requires_grad and y.grad is not None]
        torch.autograd.backward([x for x, _ in given], [gradient for _, gradient in given])
    return output, sent
