"""Linears split over tp, and norms; see `shardwise.compat.layers.split_module`."""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn import init

from shardwise.comm.collectives import reduce_from_region, scatter_from_region, split_full
from shardwise.compat.layers.split_module import Init, SplitModule, gather_features, new_linear, own_features
from shardwise.errors import ConfigError
from shardwise.mesh import Mesh
from shardwise.runtime.linear import SplitEmbedding
from shardwise.sharding.placement import equal_sections, split_even


class _SplitLinear(SplitModule):
    """Base class of the linears below.

    Args:
        num_sections: number of sections of a fused weight, each split separately.
        sequence_dim: dim along which a rank has a part of the sequence outside of the module; None: it has all of it.
        init_weight: initializes the full weight; default: like `nn.Linear`.
    """

    split_dim: int  # of the weight
    weight: Tensor
    bias: Tensor | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        mesh: Mesh,
        *,
        bias: bool = True,
        num_sections: int = 1,
        sequence_dim: int | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        init_weight: Init | None = None,
    ) -> None:
        super().__init__(mesh)
        self.in_features, self.out_features, self.sequence_dim = in_features, out_features, sequence_dim
        size = (out_features, in_features)[self.split_dim]
        split = equal_sections(self.split_dim, size, num_sections=num_sections, parts=mesh.size("tp"))
        draw = partial(new_linear, out_features, in_features, bias=bias, init_weight=init_weight, dtype=dtype)
        self.start(draw, {"weight": split, "bias": split if self.split_dim == 0 else None}, device)


class ColumnLinear(_SplitLinear):
    """A linear whose output features are split over tp, in parts of any sizes.

    Args:
        gathers: whether the output is full on every rank.

    Communicates: over tp, one all-reduce of the input's gradient ; with `gathers` one all-gather in forward.
    """

    split_dim = 0

    def __init__(
        self, in_features: int, out_features: int, mesh: Mesh, *, gathers: bool = False, **options: Any
    ) -> None:
        super().__init__(in_features, out_features, mesh, **options)
        self.gathers = gathers

    def forward(self, x: Tensor) -> Tensor:
        """Args: x `[..., in]`. Returns `[..., out of this rank]`, or full."""
        out = F.linear(self.enter(x, self.sequence_dim), self.weight, self.bias)
        if self.padded_width:
            out = F.pad(out, (0, self.padded_width - out.shape[-1]))
        return gather_features(out, self.placements["weight"], self._split) if self.gathers else out


class RowLinear(_SplitLinear):
    """A linear whose input features are split over tp, in parts of any sizes; its product is summed.

    Args:
        input_is_split: whether a rank receives its part of the features, or all of them.

    Communicates: over tp, one all-reduce in forward; with a `sequence_dim` a reduce-scatter in forward and an
    all-gather in backward; with a full input also an all-gather of its gradient.
    """

    split_dim = 1

    def __init__(
        self, in_features: int, out_features: int, mesh: Mesh, *, input_is_split: bool = False, **options: Any
    ) -> None:
        super().__init__(in_features, out_features, mesh, **options)
        if self.sequence_dim is not None and not input_is_split:
            raise ConfigError(
                "a row-split linear that puts out parts of the sequence is given all features",
                why="its input would have to be a part of the sequence and all of it",
                fix="pass input_is_parallel=True, after a column-split linear",
            )
        self.input_is_split = input_is_split
        if self.bias is not None and self.sequence_dim is not None:
            self.partial_parameters = ("bias",)

    def forward(self, x: Tensor) -> Tensor:
        """Args: x `[..., in]`, per rank its part if `input_is_split`. Returns `[..., out]`."""
        context = self._split
        if not self.input_is_split:
            x = own_features(x, self.placements["weight"], context)
        elif self.padded_width:
            x = x[..., : self.weight.shape[1]]
        out = F.linear(x, self.weight)
        dtype = out.dtype
        if context.tp.group is not None:
            out = out.float() if dtype.itemsize < 4 else out
            if self.sequence_dim is None:
                out = reduce_from_region(out, context.tp.group)
            else:
                context.tp.equal_sizes(out.shape[self.sequence_dim])
                out = scatter_from_region(out, context.tp.group, dim=self.sequence_dim)
            out = out.to(dtype)
        return out if self.bias is None else out + self.bias


class LayerNorm(nn.LayerNorm):
    """`torch.nn.LayerNorm` that may be used on parts of the sequence; its gradients are then summed over tp."""

    def __init__(self, *args: Any, sequence_parallel_enabled: bool = False, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.sequence_parallel_enabled = sequence_parallel_enabled
        self.partial_parameters = tuple(self._parameters) if sequence_parallel_enabled else ()
        for parameter in self.parameters():
            parameter.sequence_parallel_enabled = sequence_parallel_enabled  # type: ignore[attr-defined]


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
        self.num_embeddings, self.embedding_dim, self.sequence_dim = num_embeddings, embedding_dim, sequence_dim
        size, dim = (embedding_dim, 1) if by_features else (num_embeddings, 0)
        split = split_even(dim, size, parts=mesh.size("tp"))
        padding_idx = self.padding_row = None if padding_idx is None else padding_idx % num_embeddings

        def draw() -> dict[str, Tensor | None]:
            weight = torch.empty(num_embeddings, embedding_dim, dtype=dtype)
            (init_weight or init.normal_)(weight)
            if padding_idx is not None:
                weight[padding_idx].detach().zero_()
            return {"weight": weight}

        self.start(draw, {"weight": split}, device)
        self._vocabulary_size, self._sizes = num_embeddings, split.local_sizes if by_features else None
        self._start = 0 if by_features else sum(split.local_sizes[: mesh.coord("tp")])
        own = None if padding_idx is None else padding_idx - self._start
        self.padding_idx = own if own is not None and 0 <= own < self.weight.shape[0] else None

    def forward(self, ids: Tensor, **options: Any) -> Tensor:
        """Args: ids int `[b, s]`, the same on every tp rank. Returns `[b, s, embedding]`; if `sequence_dim` is 0 or 1,
        this rank's part of the sequence: `[s / tp, b, embedding]` or `[b, s / tp, embedding]`. `options` are ignored.
        """
        ids = ids.transpose(0, 1).contiguous() if self.sequence_dim == 0 else ids
        out = super().forward(ids)
        if self.sequence_dim is None:
            return out
        sizes = self._split.tp.equal_sizes(out.shape[self.sequence_dim])
        return split_full(out, self._split.tp.group, dim=self.sequence_dim, sizes=sizes)

    def own_ids(self, ids: Tensor) -> Tensor:
        """Returns the ids whose rows this rank returns, in the order of the output."""
        if self.sequence_dim is None:
            return ids
        ids = ids.transpose(0, 1) if self.sequence_dim == 0 else ids
        sizes = self._split.tp.even_sizes(ids.shape[self.sequence_dim])
        return ids.split(sizes, self.sequence_dim)[self._split.tp.coord]
