"""Query, key and value projections in one module, which is used by itself; see `shardwise.compat.layers.split_module`.

# [Note: copies of key/value heads]
Every key/value head is copied `copies` times, side by side, and what comes of it is divided over tp in order; so are
the queries. A query head then meets the key head of the unsplit model wherever the copies divide among the ranks and
the query heads of one key/value head among its copies. A rank stores every head once, and repeats what it puts out;
what several ranks store counts once in checkpoints and norms, and the model's backward sums its gradients. Ranks that
share a head store the same heads, those of all of them, so that each head belongs to one group of neighbours. How many
heads there are must be known, or keys would be copied in other blocks than queries expect.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.comm.agree import raise_on_all_ranks
from shardwise.comm.collectives import copy_to_region
from shardwise.compat.layers.split_module import Init, SplitModule, gather_features, new_linear
from shardwise.errors import ConfigError
from shardwise.mesh import Mesh
from shardwise.plan.options import check_count
from shardwise.plan.structure import upwards
from shardwise.sharding.placement import Split, split_even, split_sections

__all__ = ["GroupedProjections", "note_heads"]


class GroupedProjections(SplitModule):
    """The query, key and value projections of an attention with fewer key/value heads, in one module.

    Args:
        out_features: of query, and of key and value, full and without copies.
        copies: of every key/value head, with which they divide over tp; see [Note: copies of key/value heads].
            Without meaning where the output is gathered.
        num_heads: key/value heads; where there are copies they must be known before forward (see `note_heads`).
        fused: keep the three weights (and biases) as one, `weight_qkv`; else `weight_q`, `weight_k`, `weight_v`.
        others: as of `shardwise.compat.layers.linears.ColumnLinear`.

    Raises:
        ConfigError: the copies do not divide over tp, or the queries among them.

    Communicates: as `ColumnLinear`, with one reduction for all three.
    """

    bias_names = ("bias_qkv", "bias_q", "bias_k", "bias_v")
    """What PEFT trains where an adapter's config trains biases."""
    weight_qkv: Tensor
    bias_qkv: Tensor | None
    weight_q: Tensor
    weight_k: Tensor
    weight_v: Tensor
    bias_q: Tensor | None
    bias_k: Tensor | None
    bias_v: Tensor | None

    def __init__(
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
        super().__init__(mesh)
        check_count("kv_size_multiplier", copies)
        self.in_features, self.out_features, self.copies, self.num_heads = in_features, out_features, copies, num_heads
        self.gathers, self.sequence_dim, self.reduce_dtype, self.fused = gathers, sequence_dim, reduce_dtype, fused
        self.splits = self._divided()
        sizes = (out_features[0], out_features[1], out_features[1])
        each = partial(new_linear, bias=bias, init_weight=init_weight, dtype=dtype)
        splits: dict[str, Split | None] = {}
        for kind in ("weight", "bias"):
            splits |= {f"{kind}_{letter}": split for letter, split in zip("qkv", self.splits, strict=True)}
            splits[f"{kind}_qkv"] = split_sections(0, self.splits)
        self.start(partial(_new_projections, each, sizes, in_features, fused=fused), splits, device)

    @property
    def is_assumed(self) -> bool:
        """Whether keys are copied in blocks of which nobody has said that they are the heads."""
        return self.num_heads is None and self.copies > 1 and not self.gathers

    @torch.no_grad()
    def note_heads(self, num_heads: int) -> None:
        """Says how many key/value heads there are.

        Raises:
            ConfigError: they do not go with the copies.

        Communicates: over tp, one all-gather of every parameter that is divided otherwise then.
        """
        self.num_heads = num_heads
        splits = self._divided()
        if splits == self.splits:
            return
        self.splits = splits
        joined = split_sections(0, splits)
        for name in tuple(self.placements):
            self.divide_again(name, joined if self.fused else splits["qkv".index(name[-1])])

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Args: x `[..., in]`. Returns query, key and value, `[..., out of this rank]` with its copies, or full.

        Communicates: as the module does; until the model around it is known, an all-reduce of the gradients of keys and
            values that several ranks hold.
        """
        if self.is_assumed:
            warnings.warn(
                f"kv_size_multiplier {self.copies} is taken at its word: nothing says how many key/value heads there "
                f"are, and copies are made of {self._num_blocks()} blocks. Give the model a config with "
                "num_key_value_heads, or the layer num_heads=.",
                stacklevel=2,
            )
        x = self.enter(x, self.sequence_dim, self.reduce_dtype)
        sums_copies = torch.is_grad_enabled() and not self.is_adopted and bool(self.splits[1].shared())
        if self.fused and not sums_copies:
            query, key, value = F.linear(x, self.weight_qkv, self.bias_qkv).split(self._sizes, dim=-1)
        else:
            weights, biases = self._parts("weight"), self._parts("bias")
            if sums_copies:
                weights, biases = ([own, *map(self._summed, others)] for own, *others in (weights, biases))
            query, key, value = (F.linear(x, *each) for each in zip(weights, biases, strict=True))
        if not self.gathers:
            return query, self._copied(key), self._copied(value)
        query, key, value = (
            gather_features(x, split, self._split) for x, split in zip((query, key, value), self.splits, strict=True)
        )
        return query, key, value

    @property
    def _sizes(self) -> list[int]:
        return [split.local_sizes[self._split.tp.coord] for split in self.splits]

    def _parts(self, kind: str) -> Sequence[Any]:
        if self.fused:
            own: Tensor | None = getattr(self, f"{kind}_qkv")
            return (None, None, None) if own is None else own.split(self._sizes)
        return tuple(getattr(self, f"{kind}_{letter}") for letter in "qkv")

    def _summed(self, own: Tensor | None) -> Tensor | None:
        """The same values, whose gradient is the sum over the ranks that hold them."""
        if own is None:
            return None
        ((start, stop),) = self.splits[1].pieces[self._split.tp.coord] or ((0, 0),)
        before, after = own.new_zeros(start, *own.shape[1:]), own.new_zeros(self.splits[1].size - stop, *own.shape[1:])
        return copy_to_region(torch.cat([before, own, after]), self._split.tp.group)[start:stop]

    def _copied(self, x: Tensor) -> Tensor:
        """Keys or values of this rank's heads, as often as it has each."""
        if self.gathers or self.copies == 1:
            return x
        (start, stop), width = (
            self.splits[1].pieces[self._split.tp.coord][0],
            self.out_features[1] // self._num_blocks(),
        )
        heads, stored = self._heads_of(self._split.tp.coord), list(range(start // width, stop // width))
        if heads == stored:
            return x
        return x.unflatten(-1, (len(stored), width))[..., [head - stored[0] for head in heads], :].flatten(-2)

    def _num_blocks(self) -> int:
        """Key/value heads; where nobody has said how many, the fewest whose copies divide over tp."""
        parts = self._split.tp.size
        return self.num_heads if self.num_heads is not None else parts // math.gcd(parts, self.copies)

    def _heads_of(self, coord: int) -> list[int]:
        """The heads of a rank, copies included."""
        number = self._num_blocks() * self.copies // self._split.tp.size
        return [copy // self.copies for copy in range(coord * number, (coord + 1) * number)]

    def _divided(self) -> tuple[Split, Split, Split]:
        parts, size = self._split.tp.size, self.out_features[1]
        query, keys = split_even(0, self.out_features[0], parts=parts), split_even(0, size, parts=parts)
        if not self.gathers and (self.copies != 1 or self.num_heads is not None):
            self.check_heads(self._num_blocks())
            width = size // self._num_blocks()
            heads = [self._heads_of(coord) for coord in range(parts)]
            starts = [coord for coord in range(parts) if not coord or heads[coord][0] > heads[coord - 1][-1]]
            ends = [*starts[1:], parts]
            keys = Split(
                0,
                tuple(
                    ((heads[start][0] * width, (heads[end - 1][-1] + 1) * width),)
                    for start, end in zip(starts, ends, strict=True)
                    for _ in range(start, end)
                ),
            )
        return query, keys, keys

    def check_heads(self, num_heads: int) -> None:
        """Raises `ConfigError` where so many key/value heads do not go with the copies."""
        parts, (query, size), copies = self._split.tp.size, self.out_features, self.copies
        if self.gathers:
            return
        each = query // size if size and query % size == 0 else copies  # query heads of a key/value head
        right = [number for number in range(1, each + 1) if not each % number and not num_heads * number % parts]
        if copies < 1 or size % num_heads or (num_heads * copies) % parts or each % copies:
            raise ConfigError(
                f"{copies} copies (kv_size_multiplier) of {num_heads} key/value heads on {parts} tp ranks",
                why="a rank's queries would meet keys of other heads than in the unsplit model",
                fix=f"use kv_size_multiplier {' or '.join(map(str, right))}"
                if right
                else f"use a number of ranks that divides the {num_heads * each} query heads",
            )


def _new_projections(
    new: Callable[..., dict[str, Tensor | None]], sizes: Sequence[int], in_features: int, *, fused: bool
) -> dict[str, Tensor | None]:
    made = [new(size, in_features) for size in sizes]
    if not fused:
        named = zip("qkv", made, strict=True)
        return {f"{kind}_{letter}": full for letter, each in named for kind, full in each.items()}
    joined = {kind: [full for each in made if (full := each[kind]) is not None] for kind in ("weight", "bias")}
    return {f"{kind}_qkv": torch.cat(values) if values else None for kind, values in joined.items()}


def note_heads(model: nn.Module, mesh: Mesh) -> None:
    """Lets grouped projections in `model` know their key/value heads, where its config says how many there are, of keys
    or of queries, or a module around one has a `head_dim`.

    Raises:
        ConfigError: they do not go with the copies.

    Communicates: one gather of a small object over all ranks, and over tp what `GroupedProjections.note_heads` does.
    """
    with raise_on_all_ranks(mesh.group(), "counting key/value heads"):
        found = _find_heads(model)
        for module, num_heads in found.items():
            module.check_heads(num_heads)
    for module, num_heads in found.items():
        module.note_heads(num_heads)


def _find_heads(model: nn.Module) -> dict[GroupedProjections, int]:
    config: Any = getattr(model, "config", None)
    found: dict[GroupedProjections, int] = {}
    keys, queries = (getattr(config, f"num_{kind}_heads", None) for kind in ("key_value", "attention"))
    widths: dict[str, Any] = {name: getattr(module, "head_dim", None) for name, module in model.named_modules()}
    for name, module in model.named_modules():
        if isinstance(module, GroupedProjections) and module.num_heads is None:
            query, size = module.out_features
            width: int = next((widths[each] for each in (*upwards(name), "") if type(widths[each]) is int), 0)
            if type(keys) is int:
                found[module] = keys
            elif type(queries) is int and queries * size % query == 0:
                found[module] = queries * size // query
            elif width > 0 and size % width == 0:
                found[module] = size // width
    return found
