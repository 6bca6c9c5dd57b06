"""`pad_model`: attention heads that do not divide among the ranks, in models whose code counts padded heads.

# [Note: heads are padded in activations]
Such code has `padded heads / tp` heads on every rank. Here ranks hold whole heads, the last ones fewer. The output of a
column-split module is padded with zeros, and a row-split module drops the padding again. So parameters and checkpoints
have the true sizes. A head of zeros adds nothing, and its gradient is dropped.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from shardwise.compat.layers.grouped import GroupedProjections
from shardwise.compat.layers.linears import ColumnLinear, RowLinear
from shardwise.errors import UnsupportedError
from shardwise.sharding.placement import Split

__all__ = ["get_number_of_extra_heads", "pad_model"]


def get_number_of_extra_heads(n_head: int, tp_degree: int) -> int:
    """Returns the number of heads missing to a multiple of the ranks."""
    return -n_head % tp_degree


@torch.no_grad()
def pad_model(
    model: nn.Module,
    tp_degree: int,
    n_heads: int,
    wrapped_classes: Sequence[type[nn.Module]] = (),
    pad_hook_fn: Callable[[nn.Module, float], Any] | None = None,
) -> nn.Module:
    """Splits column- and row-split linears by whole heads, in place. The model's result stays the same.

    Linears of heads come in pairs: a row-split one takes the output of a column-split one of as many features. Other
    linears, such as one over the vocabulary, stay unchanged.

    Args:
        model: model with parallel layers, before `move_model_to_device`.
        wrapped_classes: classes whose linears have heads; default: all (which is correct, and moves more).
        pad_hook_fn: called with the model and the ratio of heads to padded heads.

    Raises:
        UnsupportedError: a linear gathers its output, or is fused.

    Communicates: over tp, one all-gather of every parameter whose split changes.
    """
    linears: dict[str, Any] = {}
    for name, module in model.named_modules():
        if not wrapped_classes or isinstance(module, tuple(wrapped_classes)):
            for own, each in module.named_modules():
                if isinstance(each, ColumnLinear | RowLinear | GroupedProjections):
                    linears[f"{name}.{own}".strip(".")] = each
    chosen = {name: module for name, module in linears.items() if _has_partner(name, module, linears)}
    for name, module in chosen.items():
        is_parallel = module.input_is_split if isinstance(module, RowLinear) else not module.gathers
        is_fused = isinstance(module, GroupedProjections) or max(map(len, module.placements["weight"].pieces)) > 1
        if is_fused or not is_parallel:
            raise UnsupportedError(
                f"padding the heads of {name}",
                why="it is fused, or has full features on every rank",
                fix="name the classes around the linears of single heads",
            )
    for module in chosen.values():
        _divide(module, n_heads)
    if pad_hook_fn is not None:
        pad_hook_fn(model, n_heads / (n_heads + get_number_of_extra_heads(n_heads, tp_degree)))
    return model


def _has_partner(name: str, module: Any, linears: Mapping[str, Any]) -> bool:
    """Returns whether another linear of the same layer takes this one's output, or the other way around."""
    return any(
        isinstance(other, RowLinear) is not isinstance(module, RowLinear)
        and _width(other) == _width(module)
        and not _is_across_layers(name, partner)
        for partner, other in linears.items()
    )


def _width(module: Any) -> int:
    """Returns the number of features between the two linears of a pair."""
    width: Any = module.in_features if isinstance(module, RowLinear) else module.out_features
    return int(width[0] if isinstance(module, GroupedProjections) else width)


def _is_across_layers(first: str, second: str) -> bool:
    """Whether a name, below the common prefix, leads through an item of a list of blocks, such as `layers.0.mlp`."""
    ends = [name.split(".") for name in (first, second)]
    while ends[0] and ends[1] and ends[0][0] == ends[1][0]:
        ends = [end[1:] for end in ends]
    return any(part.isdigit() for end in ends for part in end[:-1])


def _divide(module: Any, num_heads: int) -> None:
    old = module.placements["weight"]
    if old.size % num_heads or num_heads % old.parts == 0:
        return
    width = -(-num_heads // old.parts) * (old.size // num_heads)
    starts = [min(coord * width, old.size) for coord in range(old.parts + 1)]
    pieces = tuple(((start, stop),) if stop > start else () for start, stop in itertools.pairwise(starts))
    for name in tuple(module.placements):
        module.divide_again(name, Split(module.placements[name].dim, pieces))
    module.padded_width = width
