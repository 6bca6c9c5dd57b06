"""Embeddings split over tp ranks, by vocabulary or by feature."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from shardwise.comm.collectives import gather_full, reduce_from_region
from shardwise.runtime.checks import check_index
from shardwise.runtime.context import SplitContext

__all__ = ["FeatureEmbedding", "VocabularyEmbedding"]


class VocabularyEmbedding:
    """Mixin of an embedding, or of the adapters around one, that holds rows `[start, start + rows)` of a vocabulary of
    any size.

    Communicates: over tp, one all-reduce of the looked-up rows forward, nothing backward. Nothing at all where the
    entry of the layer stack sums them (`SplitContext.defer_embedding`).
    """

    _split: SplitContext
    _start: int
    _vocabulary_size: int
    _may_defer = False

    def forward(self, ids: Tensor, **options: Any) -> Tensor:
        """Args: ids int `[...]`, the same on every tp rank. Returns `[..., hidden]`.

        Raises:
            IndexError: an id is outside the vocabulary (checked on the device where there is one).
        """
        self._check_ids(ids)
        rows = self.weight.shape[0]  # type: ignore[attr-defined]
        local = ids - self._start
        outside = (local < 0) | (local >= rows)
        if rows == 0:
            found = self.weight.new_zeros(*ids.shape, self.weight.shape[1]) + self.weight.sum()  # type: ignore[attr-defined]
        else:
            found = super().forward(local.masked_fill(outside, 0), **options)  # type: ignore[misc]
            found = found.masked_fill(outside.unsqueeze(-1), 0)
        if self._split.state.defer_embedding and self._may_defer:
            self._split.state.holds_partial_rows = True
            return found
        return reduce_from_region(found, self._split.group)

    def _check_ids(self, ids: Tensor) -> None:
        # Outside ids are somebody else's rows here, so an id of no rank would come back as silent zeros.
        valid = ((ids >= 0) & (ids < self._vocabulary_size)).all()
        size = self._vocabulary_size
        check_index(
            valid,
            "an id is outside the vocabulary",
            lambda: f"ids from {int(ids.min())} to {int(ids.max())}, but the vocabulary has {size} entries",
        )


class FeatureEmbedding:
    """Mixin of an embedding that holds some features of every row.

    Communicates: over tp, one all-gather of the looked-up features forward, nothing backward.
    """

    _split: SplitContext
    _sizes: tuple[int, ...]

    def forward(self, ids: Tensor, **options: Any) -> Tensor:
        """Args: ids int `[...]`, the same on every tp rank. Returns `[..., hidden]`."""
        found = super().forward(ids, **options)  # type: ignore[misc]
        return gather_full(found, self._split.group, dim=found.ndim - 1, sizes=self._sizes)
