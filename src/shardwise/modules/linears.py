"""Linears that stand alone, divided over tp by output or input features; see `shardwise.modules.split_module`."""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.comm.collectives import reduce_from_region, scatter_from_region
from shardwise.errors import ConfigError, LayoutError
from shardwise.mesh import Mesh
from shardwise.modules.split_module import Init, SplitModule, gather_features, new_linear, own_features
from shardwise.sharding.placement import Split, equal_sections, split_even, split_sections

__all__ = ["ColumnLinear", "GroupedProjections", "RowLinear"]


class ColumnLinear(SplitModule):
    """A linear whose output features are divided over tp, in parts of any sizes.

    Args:
        num_sections: of a fused weight, each divided on its own.
        gathers: whether the output is full on every rank.
        sequence_dim: the dim along which every rank is given a part of the sequence; None where it is given all of it.
        init_weight: of the full weight; by default as `nn.Linear`'s.
        reduce_dtype: in which gradients of narrower dtypes are summed.
        returns_bias: return it beside the output instead of adding it.

    Communicates: over tp, one all-reduce of the input's gradient (see `SplitModule.enter`), and where it `gathers` an
        all-gather forward.
    """

    weight: Tensor
    bias: Tensor | None

    def __init__(  # noqa: PLR0913
        self,
        in_features: int,
        out_features: int,
        mesh: Mesh,
        *,
        bias: bool = True,
        gathers: bool = False,
        num_sections: int = 1,
        sequence_dim: int | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        init_weight: Init | None = None,
        reduce_dtype: torch.dtype | None = torch.float32,
        returns_bias: bool = False,
    ) -> None:
        super().__init__(mesh)
        self.in_features, self.out_features = in_features, out_features
        split = equal_sections(0, out_features, num_sections=num_sections, parts=mesh.size("tp"))
        weight, values = new_linear(out_features, in_features, bias=bias, init_weight=init_weight, dtype=dtype)
        self.add_parameter("weight", weight, split, device=device)
        self.add_parameter("bias", values, split, device=device)
        self.gathers, self.sequence_dim, self.returns_bias = gathers, sequence_dim, returns_bias
        self.reduce_dtype = reduce_dtype

    def forward(self, x: Tensor) -> Any:
        """Args: x `[..., in]`. Returns `[..., out of this rank]`, or full; with `returns_bias` a pair."""
        x = self.enter(x, self.sequence_dim, self.reduce_dtype)
        bias = self.bias
        out = F.linear(x, self.weight, None if self.returns_bias else bias)
        if self.padded_width:
            out = F.pad(out, (0, self.padded_width - out.shape[-1]))
        if self.gathers:
            out = self._gathered(out)
            bias = self._gathered(bias) if self.returns_bias and bias is not None else bias
        return (out, bias) if self.returns_bias else out

    def _gathered(self, x: Tensor) -> Tensor:
        return gather_features(x, self.placements["weight"], self._split)


class RowLinear(SplitModule):
    """A linear whose input features are divided over tp, in parts of any sizes; its product is summed.

    Args:
        input_is_split: whether a rank is given its part of the features, or all of them.
        reduces: whether the partial sums are summed; the bias is in the first rank's otherwise.
        sequence_dim: the dim along which the output is divided; None where it is full.
        others: as `ColumnLinear`'s.

    Raises:
        ConfigError: full features together with parts of the sequence.

    Communicates: over tp, one all-reduce forward; with a `sequence_dim` a reduce-scatter, and an all-gather backward;
        where the input is full, an all-gather of its gradient.
    """

    weight: Tensor
    bias: Tensor | None

    def __init__(  # noqa: PLR0913
        self,
        in_features: int,
        out_features: int,
        mesh: Mesh,
        *,
        bias: bool = True,
        input_is_split: bool = False,
        reduces: bool = True,
        num_sections: int = 1,
        sequence_dim: int | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        init_weight: Init | None = None,
        reduce_dtype: torch.dtype | None = torch.float32,
        returns_bias: bool = False,
    ) -> None:
        if sequence_dim is not None and not input_is_split:
            raise ConfigError(
                "a row-split linear that puts out parts of the sequence is given all features",
                why="its input would have to be a part of the sequence and all of it",
                fix="pass input_is_parallel=True, after a column-split linear",
            )
        super().__init__(mesh)
        self.in_features, self.out_features = in_features, out_features
        split = equal_sections(1, in_features, num_sections=num_sections, parts=mesh.size("tp"))
        weight, values = new_linear(out_features, in_features, bias=bias, init_weight=init_weight, dtype=dtype)
        self.add_parameter("weight", weight, split, device=device)
        self.add_parameter("bias", values, None, device=device)
        self.input_is_split, self.reduces, self.sequence_dim = input_is_split, reduces, sequence_dim
        self.reduce_dtype, self.returns_bias = reduce_dtype, returns_bias

    def forward(self, x: Tensor) -> Any:
        """Args: x `[..., in]`, per rank its part where `input_is_split`. Returns `[..., out]`."""
        context, bias = self._split, self.bias
        if not self.input_is_split:
            x = own_features(x, self.placements["weight"], context)
        elif self.padded_width:
            x = x[..., : self.weight.shape[1]]
        out = F.linear(x, self.weight)
        dtype = out.dtype
        if context.group is not None and self.reduces:
            if self.reduce_dtype is not None and dtype.itemsize < self.reduce_dtype.itemsize:
                out = out.to(self.reduce_dtype)
            if self.sequence_dim is None:
                out = reduce_from_region(out, context.group)
            else:
                out = scatter_from_region(out, context.group, dim=self.sequence_dim)
            out = out.to(dtype)
        if self.returns_bias:
            return out, bias
        if bias is not None and not self.reduces and context.coord:
            bias = bias * 0
        return out if bias is None else out + bias


class GroupedProjections(SplitModule):
    """The query, key and value projections of an attention with fewer key/value heads, in one module.

    Queries are divided over tp in order; keys and values over `tp / copies` parts, each of which `copies` neighbours
    hold, so that a rank has the key/value heads of its query heads. Their gradients are summed by the model's backward.

    Args:
        out_features: of query, and of key and value, full and without copies.
        copies: how many ranks hold the same keys and values: ranks / key/value heads, where these are fewer, else 1.
        num_heads: key/value heads. `copies` are checked against them; where there are copies they must be known before
            forward (see `note_heads`), because other copies would give queries the keys of other ones.
        fused: keep the three weights (and biases) as one, `weight_qkv`; else `weight_q`, `weight_k`, `weight_v`.
        others: as `ColumnLinear`'s.

    Raises:
        ConfigError: tp is not a multiple of `copies`, or the heads do not go with `copies`.

    Communicates: as `ColumnLinear`, with one reduction for all three.
    """

    weight_qkv: Tensor
    bias_qkv: Tensor | None
    weight_q: Tensor
    weight_k: Tensor
    weight_v: Tensor
    bias_q: Tensor | None
    bias_k: Tensor | None
    bias_v: Tensor | None

    def __init__(  # noqa: PLR0913
        self,
        in_features: int,
        out_features: tuple[int, int],
        mesh: Mesh,
        *,
        copies: int = 1,
        num_heads: int | None = None,
        fused: bool = True,
        bias: bool = True,
        gathers: bool = False,
        sequence_dim: int | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        init_weight: Init | None = None,
        reduce_dtype: torch.dtype | None = torch.float32,
    ) -> None:
        parts = mesh.size("tp")
        if copies < 1 or parts % copies:
            raise ConfigError(
                f"{copies} copies of keys and values on {parts} tp ranks",
                why="every part has as many copies as the others",
                fix=f"use a divisor of {parts}",
            )
        super().__init__(mesh)
        self.copies = copies
        self.num_heads: int | None = None
        if num_heads is not None:
            self.note_heads(num_heads)
        query = split_even(0, out_features[0], parts=parts)
        few = split_even(0, out_features[1], parts=parts // copies)
        keys = Split(0, tuple(few.pieces[coord // copies] for coord in range(parts)))
        self.gathers, self.sequence_dim, self.reduce_dtype = gathers, sequence_dim, reduce_dtype
        self.fused, self.splits = fused, (query, keys, keys)
        sizes = (out_features[0], out_features[1], out_features[1])
        made = [new_linear(size, in_features, bias=bias, init_weight=init_weight, dtype=dtype) for size in sizes]
        for name, values in zip(("weight", "bias"), zip(*made, strict=True), strict=True):
            if fused:
                joined = None if values[0] is None else torch.cat(values)
                self.add_parameter(f"{name}_qkv", joined, split_sections(0, self.splits), device=device)
            else:
                for letter, value, split in zip("qkv", values, self.splits, strict=True):
                    self.add_parameter(f"{name}_{letter}", value, split, device=device)

    def note_heads(self, num_heads: int) -> None:
        """Says how many key/value heads there are.

        Raises:
            ConfigError: they do not go with the copies: a rank would have other keys than its queries'.
        """
        parts = self._provisional.mesh.size("tp")
        right = max(1, parts // num_heads) if not (parts % num_heads and num_heads % parts) else None
        if right != self.copies:
            raise ConfigError(
                f"{self.copies} copies (kv_size_multiplier) of {num_heads} key/value heads on {parts} tp ranks",
                why="a rank's queries would meet keys of other heads than in the unsplit model",
                fix=f"use kv_size_multiplier {right}" if right else f"use a divisor or a multiple of {num_heads} ranks",
            )
        self.num_heads = num_heads

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Args: x `[..., in]`. Returns query, key and value, `[..., out of this rank]` or full.

        Raises:
            LayoutError: several ranks hold the same keys, and no model sums their gradients.
        """
        if self.copies > 1 and self.num_heads is None:
            warnings.warn(
                f"kv_size_multiplier {self.copies} is taken at its word: only ranks / heads copies give every query "
                "the keys of its own head, and nothing says how many key/value heads there are. Give the model a "
                "config with num_key_value_heads, or the layer num_heads=.",
                stacklevel=2,
            )
        if self.copies > 1 and self.training and torch.is_grad_enabled() and not self.is_adopted:
            raise LayoutError(
                "gradients of keys and values that several ranks hold are summed by nobody",
                why="the model around this module is not known",
                fix="pass it through move_model_to_device or initialize_parallel_model before it is trained",
            )
        x = self.enter(x, self.sequence_dim, self.reduce_dtype)
        if self.fused:
            sizes = [split.local_size_of(self._split.coord) for split in self.splits]
            query, key, value = F.linear(x, self.weight_qkv, self.bias_qkv).split(sizes, dim=-1)
        else:
            query = F.linear(x, self.weight_q, self.bias_q)
            key, value = F.linear(x, self.weight_k, self.bias_k), F.linear(x, self.weight_v, self.bias_v)
        if not self.gathers:
            return query, key, value
        # Of keys that several ranks hold the first holder's are gathered: it alone has their gradient.
        query = gather_features(query, self.splits[0], self._split)
        key, value = (gather_features(x, self.splits[1], self._split, every=self.copies) for x in (key, value))
        return query, key, value
