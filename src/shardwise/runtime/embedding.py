"""Embeddings split over tp ranks, by vocabulary or by feature."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from shardwise.comm.collectives import gather_full, reduce_from_region
from shardwise.runtime.context import Axis


def check_index(valid: Tensor, rule: str, say: Callable[[], str]) -> None:
    """Raises if `valid` is false.

    Args:
        valid: bool scalar. A fake tensor is not checked.
        rule: error message on the device.
        say: builds the error message with values, on the host.
    """
    if valid.device.type != "cpu":
        torch._assert_async(valid, rule)
    elif not isinstance(valid, FakeTensor) and not valid:
        raise IndexError(say())


class SplitEmbedding:
    """Mixin of an embedding, or of its adapters, that is split by vocabulary rows or by features.

    A rank holds either rows `[start, start + rows)` of the vocabulary or some features of every row.

    Communicates: over tp. Split by rows: one all-reduce of the embedded tokens in forward. Split by features: one
    all-gather in forward. Nothing in backward.
    """

    _axis: Axis
    _sizes: tuple[int, ...] | None = None  # of features on each rank; None: rows are split
    _start: int
    _vocabulary_size: int

    def forward(self, ids: Tensor, **options: Any) -> Tensor:
        """Args: ids int `[...]`, the same on every tp rank. Returns `[..., hidden]`."""
        look_up: Callable[..., Tensor] = super().forward  # type: ignore[misc]
        if self._sizes is not None:
            values = look_up(ids, **options)
            return gather_full(values, self._axis.group, dim=values.ndim - 1, sizes=self._sizes)
        self._check_ids(ids)
        weight: Tensor = self.weight  # type: ignore[attr-defined]
        local = ids - self._start
        outside = (local < 0) | (local >= weight.shape[0])
        if weight.shape[0] == 0:
            values = weight.new_zeros(*ids.shape, weight.shape[1]) + weight.sum()
        else:
            values = look_up(local.masked_fill(outside, 0), **options).masked_fill(outside.unsqueeze(-1), 0)
        return reduce_from_region(values, self._axis.group)

    def _check_ids(self, ids: Tensor) -> None:
        # Outside ids are somebody else's rows here, so an id of no rank would come back as silent zeros.
        valid = ((ids >= 0) & (ids < self._vocabulary_size)).all()
        size = self._vocabulary_size
        check_index(
            valid,
            "an id is outside the vocabulary",
            lambda: f"ids from {int(ids.min())} to {int(ids.max())}, but the vocabulary has {size} entries",
        )
