"""Query, key and value projections in one module; see `shardwise.compat.layers.split_module`.

# [Note: copies of key/value heads]
With fewer key/value heads than tp ranks, `copies` neighbouring ranks hold each head, and their query heads belong to
it. Heads times copies is the number of ranks, so a rank has one key/value head, and queries keep their order. Copies
count once in checkpoints and norms, and the model's backward sums their gradients. The number of heads must be known,
or queries might meet the keys of other heads.
"""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.comm.agree import raise_on_all_ranks
from shardwise.compat.layers.split_module import Init, SplitModule, gather_features, new_linear
from shardwise.errors import ConfigError
from shardwise.mesh import Mesh
from shardwise.parameters.registry import entries_of
from shardwise.plan.options import check_count
from shardwise.plan.structure import upwards
from shardwise.sharding.placement import Split, split_even, split_sections


class GroupedProjections(SplitModule):
    """Query, key and value projections of an attention with fewer key/value heads, in one module.

    Args:
        out_features: features of query, and of key and value, full and without copies.
        copies: number of ranks that hold every key/value head; see [Note: copies of key/value heads]. Unused if the
            output is gathered.
        num_heads: number of key/value heads, which must fit the copies, if known (see `note_heads`).
        fused: keep the three weights (and biases) as one, `weight_qkv`; else `weight_q`, `weight_k`, `weight_v`.

    Communicates: like `ColumnLinear`, with one reduction for all three.
    """

    bias_names = ("bias_qkv", "bias_q", "bias_k", "bias_v")  # what PEFT trains where an adapter's config trains biases
    weight_qkv: Tensor
    bias_qkv: Tensor | None

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
    ) -> None:
        super().__init__(mesh)
        check_count("kv_size_multiplier", copies)
        self.in_features, self.out_features, self.copies, self.num_heads = in_features, out_features, copies, num_heads
        self.gathers, self.sequence_dim, self.fused = gathers, sequence_dim, fused
        parts, (query, size) = mesh.size("tp"), out_features
        keys = split_even(0, size, parts=parts)
        if copies > 1 and not gathers:
            if parts % copies or size % (parts // copies):
                raise self._misfit(num_heads or 0)
            blocks = split_even(0, size, parts=parts // copies).pieces
            keys = Split(0, tuple(blocks[coord // copies] for coord in range(parts)))
        if num_heads is not None:
            self.check_heads(num_heads)
        self.splits = (split_even(0, query, parts=parts), keys, keys)
        by_name = dict(zip("qkv", self.splits, strict=True)) | {"qkv": split_sections(0, self.splits)}
        splits = {f"{kind}_{name}": split for kind in ("weight", "bias") for name, split in by_name.items()}
        self.start(partial(self._draw_all, bias=bias, init_weight=init_weight, dtype=dtype), splits, device)

    def _draw_all(self, **options: Any) -> dict[str, Tensor | None]:
        query, size = self.out_features
        made = [new_linear(each, self.in_features, **options) for each in (query, size, size)]
        if not self.fused:
            return {f"{kind}_{letter}": each[kind] for letter, each in zip("qkv", made, strict=True) for kind in each}
        joined = {kind: [full for each in made if (full := each[kind]) is not None] for kind in ("weight", "bias")}
        return {f"{kind}_qkv": torch.cat(values) if values else None for kind, values in joined.items()}

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Args: x `[..., in]`. Returns query, key and value, `[..., out of this rank]` or full."""
        is_known = any(entry.registry is not self._provisional for entry in entries_of(self).values())
        if self.copies > 1 and not self.gathers and self.training and torch.is_grad_enabled() and not is_known:
            raise ConfigError(
                "a layer with copies of key/value heads in a model that is not known",
                why="the gradients of heads that several ranks hold would not be summed",
                fix="call move_model_to_device(model, device) first, or initialize_parallel_model",
            )
        x = self.enter(x, self.sequence_dim)
        if self.fused:
            sizes = [split.local_sizes[self._split.tp.coord] for split in self.splits]
            out = F.linear(x, self.weight_qkv, self.bias_qkv).split(sizes, dim=-1)
        else:
            out = tuple(F.linear(x, getattr(self, f"weight_{each}"), getattr(self, f"bias_{each}")) for each in "qkv")
        if self.gathers:
            out = tuple(gather_features(x, split, self._split) for x, split in zip(out, self.splits, strict=True))
        query, key, value = out
        return query, key, value

    def check_heads(self, num_heads: int) -> None:
        """Records the number of key/value heads, which must fit the copies."""
        self.num_heads, parts, (query, size) = num_heads, self._split.tp.size, self.out_features
        fits = num_heads % parts == 0 if self.copies == 1 else num_heads * self.copies == parts
        if not self.gathers and (not fits or size % num_heads or (query % size == 0 and query // size % self.copies)):
            raise self._misfit(num_heads)

    def _misfit(self, num_heads: int) -> ConfigError:
        parts = self._split.tp.size
        return ConfigError(
            f"{self.copies} copies (kv_size_multiplier) of {num_heads or 'some'} key/value heads on {parts} tp ranks",
            why="heads times copies must be the number of ranks, or a rank's queries would meet keys of other heads",
            fix="use ranks / heads as kv_size_multiplier, or 1 where the heads divide by the ranks",
        )


def note_heads(model: nn.Module, mesh: Mesh) -> None:
    """Tells grouped projections in `model` their number of key/value heads, from the config (of keys or of queries), or
    from the `head_dim` of an enclosing module.

    Communicates: one gather of a small object over all ranks.
    """
    config: Any = getattr(model, "config", None)
    config = getattr(config, "get_text_config", lambda: config)()
    keys, queries = (getattr(config, f"num_{kind}_heads", None) for kind in ("key_value", "attention"))
    widths: dict[str, Any] = {name: getattr(module, "head_dim", None) for name, module in model.named_modules()}
    with raise_on_all_ranks(mesh.group(), "counting key/value heads"):
        for name, module in model.named_modules():
            if isinstance(module, GroupedProjections) and module.num_heads is None:
                query, size = module.out_features
                width: int = next((widths[each] for each in (*upwards(name), "") if type(widths[each]) is int), 0)
                if type(keys) is int:
                    module.check_heads(keys)
                elif type(queries) is int and queries * size % query == 0:
                    module.check_heads(queries * size // query)
                elif width > 0 and size % width == 0:
                    module.check_heads(size // width)
