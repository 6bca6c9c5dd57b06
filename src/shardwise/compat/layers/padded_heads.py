"""Attention heads that do not divide by the number of ranks, in hand-written models that count padded ones.

# [Note: heads are padded in activations]
Code of this kind has `padded heads / tp` heads on every rank. Ranks hold whole heads, the last ones fewer; what a
column-split module puts out is filled up with zeros, and a row-split one drops them again. So parameters, and
checkpoints, have the true sizes, a head of zeros adds nothing, and its gradient is dropped.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

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
    """Divides column- and row-split linears by whole heads, all of the same width, in place.

    Linears of heads come in pairs: what a column-split one puts out, a row-split one of as many features takes in. Any
    other linear, such as one over the vocabulary, stays as it is.

    Args:
        model: with modules that divide themselves, not known yet (see `shardwise.compat.layers.by_hand`).
        within: classes of modules whose linears are meant; all where there are none.

    Raises:
        UnsupportedError: one of them is gathered, fused, or holds query, key and value together.

    Communicates: over tp, one all-gather of every parameter that is divided otherwise.
    """
    linears: dict[str, SplitModule] = {}
    for name, module in model.named_modules():
        if not within or isinstance(module, within):
            linears |= {
                f"{name}.{own}".strip("."): each
                for own, each in module.named_modules()
                if isinstance(each, ColumnLinear | RowLinear | GroupedProjections)
            }
    chosen = {name: module for name, module in linears.items() if _has_partner(name, module, linears)}
    for name, module in chosen.items():
        _check(name, module)
    for module in chosen.values():
        _divide(module, num_heads)


def _has_partner(name: str, module: SplitModule, linears: Mapping[str, SplitModule]) -> bool:
    """Whether another linear takes in what this one puts out, or the other way around, in the same layer."""
    return any(
        isinstance(other, RowLinear) is not isinstance(module, RowLinear)
        and _width(other) == _width(module)
        and not _is_across_layers(name, partner)
        for partner, other in linears.items()
    )


def _width(module: Any) -> int:
    """Features between the two linears of a pair."""
    if isinstance(module, GroupedProjections):
        return module.out_features[0]
    width: int = module.in_features if isinstance(module, RowLinear) else module.out_features
    return width


def _is_across_layers(first: str, second: str) -> bool:
    """Whether, below what both names share, one leads through an item of a list of blocks, `layers.0.mlp`."""
    ends = [name.split(".") for name in (first, second)]
    while ends[0] and ends[1] and ends[0][0] == ends[1][0]:
        ends = [end[1:] for end in ends]
    return any(part.isdigit() for end in ends for part in end[:-1])


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
