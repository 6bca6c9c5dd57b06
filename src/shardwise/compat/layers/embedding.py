"""An embedding split over tp; see `shardwise.compat.layers.split_module`."""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import init

from shardwise.comm.collectives import split_full
from shardwise.compat.layers.split_module import Init, SplitModule, gather_features
from shardwise.mesh import Mesh
from shardwise.runtime.embedding import SplitEmbedding
from shardwise.sharding.placement import split_even


class _LookUp(SplitModule):
    weight: Tensor
    padding_idx: int | None = None

    def forward(self, ids: Tensor) -> Tensor:
        """The rows of this rank's table."""
        return F.embedding(ids, self.weight, self.padding_idx)


class StandaloneEmbedding(SplitEmbedding, _LookUp):
    """An embedding split over tp by vocabulary (of any size) or by features.

    Args:
        by_features: split features instead of the vocabulary; outputs are gathered.
        sequence_dim: dim of the output along which every rank keeps its part; None: every rank keeps all. With 0 the
            output starts with the sequence, which is the second dim of the ids.
        init_weight: initializes the full weight; default: normal.

    Communicates: over tp, one all-reduce of the rows in forward, or one all-gather of the features; with a
    `sequence_dim` an all-gather of the gradient in backward.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        mesh: Mesh,
        *,
        padding_idx: int | None = None,
        by_features: bool = False,
        sequence_dim: int | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        init_weight: Init | None = None,
    ) -> None:
        super().__init__(mesh)
        self.num_embeddings, self.embedding_dim, self.by_features = num_embeddings, embedding_dim, by_features
        self.sequence_dim = sequence_dim
        size, dim = (embedding_dim, 1) if by_features else (num_embeddings, 0)
        split = split_even(dim, size, parts=mesh.size("tp"))
        padding_idx = self.padding_row = None if padding_idx is None else padding_idx % num_embeddings
        draw = partial(_new_table, num_embeddings, embedding_dim, dtype, init_weight or init.normal_, padding_idx)
        self.start(draw, {"weight": split}, device)
        self._vocabulary_size = num_embeddings
        self._start = 0 if by_features else sum(split.local_sizes[: mesh.coord("tp")])
        own = None if padding_idx is None else padding_idx - self._start
        self.padding_idx = own if own is not None and 0 <= own < self.weight.shape[0] else None

    def forward(self, ids: Tensor, **options: Any) -> Tensor:
        """Args: ids int `[b, s]`, the same on every tp rank. Returns `[b, s, embedding]`, or this rank's part of the
        sequence: `[s / tp, b, embedding]` or `[b, s / tp, embedding]`.
        """
        ids = ids.transpose(0, 1).contiguous() if self.sequence_dim == 0 else ids
        if self.by_features:
            out = gather_features(_LookUp.forward(self, ids), self.placements["weight"], self._split)
        else:
            out = super().forward(ids)
        if self.sequence_dim is None:
            return out
        sizes = self._split.tp.equal_sizes(out.shape[self.sequence_dim])
        return split_full(out, self._split.tp.group, dim=self.sequence_dim, sizes=sizes)

    def own_ids(self, ids: Tensor) -> Tensor:
        """The ids whose rows this rank returns, in the order of the output."""
        if self.sequence_dim is None:
            return ids
        ids = ids.transpose(0, 1) if self.sequence_dim == 0 else ids
        return ids.split(self._split.tp.even_sizes(ids.shape[self.sequence_dim]), self.sequence_dim)[
            self._split.tp.coord
        ]


def _new_table(
    num_rows: int, num_features: int, dtype: torch.dtype | None, init_weight: Init, padding_idx: int | None
) -> dict[str, Tensor]:
    weight = torch.empty(num_rows, num_features, dtype=dtype)
    init_weight(weight)
    if padding_idx is not None:
        with torch.no_grad():
            weight[padding_idx].zero_()
    return {"weight": weight}
