"""Attention heads that do not divide by the number of ranks, in hand-written models that count padded ones.

# [Note: heads are padded in activations]
Code of this kind has `padded heads / tp` heads on every rank. Ranks hold whole heads, the last ones fewer; what a
column-split module puts out is filled up with zeros, and a row-split one drops them again. So parameters, and
checkpoints, have the true sizes, a head of zeros adds nothing, and its gradient is dropped.
"""

from __future__ import annotations

import itertools

import torch
from torch import nn

from shardwise.compat.layers.grouped import GroupedProjections
from shardwise.compat.layers.linears import ColumnLinear, RowLinear
from shardwise.compat.layers.split_module import SplitModule
from shardwise.errors import UnsupportedError
from shardwise.sharding.placement import Split

__all__ = ["pad_heads"]


@torch.no_grad()
def pad_heads(model: nn.Module, num_heads: int, *, within: tuple[type[nn.Module], ...] = ()) -> None:
    """Divides column- and row-split linears, of which every head has as many features, by whole heads, in place.

    Args:
        model: with modules that divide themselves, not known yet (see `shardwise.compat.layers.by_hand`).
        within: classes of modules whose linears are meant; all where there are none.

    Raises:
        UnsupportedError: one of them is gathered, fused, or holds query, key and value together.

    Communicates: over tp, one all-gather of every parameter that is divided otherwise.
    """
    chosen: dict[int, tuple[str, SplitModule]] = {}
    for name, module in model.named_modules():
        if not within or isinstance(module, within):
            chosen |= {
                id(each): (f"{name}.{own}".strip("."), each)
                for own, each in module.named_modules()
                if isinstance(each, ColumnLinear | RowLinear | GroupedProjections)
            }
    for name, module in chosen.values():
        _check(name, module)
    for _, module in chosen.values():
        _divide(module, num_heads)


def _check(name: str, module: SplitModule) -> None:
    why = ""
    if isinstance(module, GroupedProjections):
        why = "it holds query, key and value together"
    elif isinstance(module, ColumnLinear) and module.gathers:
        why = "it gathers its output, which is full"
    elif isinstance(module, RowLinear) and not module.input_is_split:
        why = "it is given full features"
    elif any(len(pieces) > 1 for pieces in module.placements["weight"].pieces):
        why = "its weight is several in one"
    if why:
        raise UnsupportedError(
            f"padding the heads of {name}", why=why, fix="name the classes around the linears of single heads"
        )


def _divide(module: SplitModule, num_heads: int) -> None:
    old = module.placements["weight"]
    if old.size % num_heads or num_heads % old.parts == 0:
        return
    width = -(-num_heads // old.parts) * (old.size // num_heads)
    starts = [min(coord * width, old.size) for coord in range(old.parts + 1)]
    pieces = tuple(((start, stop),) if stop > start else () for start, stop in itertools.pairwise(starts))
    for name in tuple(module.placements):
        module.divide_again(name, Split(module.placements[name].dim, pieces))
    module.padded_width = width
