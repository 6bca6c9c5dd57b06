"""Norms of hand-written models."""

from __future__ import annotations

from typing import Any

from torch import nn

__all__ = ["LayerNorm"]


class LayerNorm(nn.LayerNorm):
    """`torch.nn.LayerNorm`, which may be used on parts of the sequence: its gradients are then summed over tp."""

    def __init__(self, *args: Any, sequence_parallel_enabled: bool = False, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for parameter in self.parameters():
            parameter.sequence_parallel_enabled = sequence_parallel_enabled  # type: ignore[attr-defined]
