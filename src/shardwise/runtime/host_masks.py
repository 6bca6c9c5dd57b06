"""Attention masks that the host knows, so that no forward asks the device what a mask hides.

# [Note: rows known on the host]
transformers looks whether positions restart in a row, or whether a mask hides anything, to leave the mask out where the
kernel's own causal one will do: it waits for the device in every forward. A step has its batch on the host before and
knows. It gives each forward a mask of two dims which carries that knowledge; the function that makes masks for our
name, registered as transformers' `AttentionMaskInterface` has it, finds it there.
"""

from __future__ import annotations

import functools
import inspect
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeGuard

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel, masking_utils

from shardwise.runtime.positions import cache_of

__all__ = ["HostMask", "can_take_host_masks", "host_mask_of", "read_host_mask", "take_host_masks"]

_NAME = "shardwise"
_CARRIED = "_shardwise_host_mask"


@dataclass(eq=False)
class HostMask:
    """What the host knows of some rows.

    Attributes:
        mask: bool [rows, length], the forward's `attention_mask`: False where there is padding.
        is_full: whether it hides nothing.
        segments: int64 [rows, length], the number of each token's document in its row; None where each row is one.
        positions: int64 [rows, length], from 0 in every document; None with `segments`.
        is_used: whether the model has made its masks from this one.
    """

    mask: Tensor
    is_full: bool
    segments: Tensor | None = None
    positions: Tensor | None = None
    is_used: bool = False


def take_host_masks(model: nn.Module) -> bool:
    """Has `model` attend under our name, in place, if it computes by transformers' functions for torch's kernels and
    asks for no name itself; whether it does. `generate()` and evaluation work as before.
    """
    if not can_take_host_masks(model):
        return False
    if model.config._attn_implementation != _NAME:
        AttentionInterface.register(_NAME, AttentionInterface()["sdpa"])
        AttentionMaskInterface.register(_NAME, _make_mask)
        model.set_attn_implementation(_NAME)
    return True


def can_take_host_masks(model: nn.Module) -> TypeGuard[PreTrainedModel]:
    """Whether `take_host_masks` would; not of models with attentions of their own, such as with caps or sinks."""
    config = getattr(model, "config", None)
    if not isinstance(model, PreTrainedModel) or config is None or config.is_encoder_decoder:
        return False
    takes_mask = "attention_mask" in inspect.signature(model.forward).parameters
    if config._attn_implementation not in (_NAME, "sdpa") or config.get_text_config() is not config or not takes_mask:
        return False
    modules = {sys.modules[type(each).__module__] for each in model.modules() if isinstance(each, PreTrainedModel)}
    return type(model)._can_set_attn_implementation() and not any(map(_asks_for_names, modules))


@functools.cache
def _asks_for_names(module: Any) -> bool:
    """Whether code of a module compares the attention's name, so that another name would change what it does."""
    try:
        return re.search(r"_attn_implementation\s*(==|!=|in\b|not\b)", inspect.getsource(module)) is not None
    except (OSError, TypeError):
        return True


def read_host_mask(batch: Mapping[str, Any], device: torch.device) -> HostMask | None:
    """What a batch on the host says of its rows; None where it is not there, or has a mask of more dims.

    Args:
        batch: inputs of a forward.
        device: where the forward will run.
    """
    tokens = batch.get("input_ids")
    tokens = batch.get("inputs_embeds") if tokens is None else tokens
    mask, positions = batch.get("attention_mask"), batch.get("position_ids")
    if not isinstance(tokens, Tensor) or tokens.ndim < 2 or cache_of(batch) is not None:
        return None
    shape = tokens.shape[:2]
    if mask is not None:
        if not (isinstance(mask, Tensor) and mask.shape == shape and mask.device.type == "cpu"):
            return None
        return _carried(HostMask(_send(mask.bool(), device), is_full=bool(mask.numpy().all())))
    rows = HostMask(torch.ones(shape, dtype=torch.bool, device=device), is_full=True)
    if positions is not None:
        if not (isinstance(positions, Tensor) and positions.ndim == 2 and positions.device.type == "cpu"):
            return None
        segments = _segments(positions.numpy())
        if segments[:, -1].any():
            rows.segments = _send(torch.from_numpy(segments).expand(shape), device)
            rows.positions = _send(positions.expand(shape), device)
    return _carried(rows)


def host_mask_of(batch: Mapping[str, Any]) -> HostMask | None:
    """The `HostMask` whose mask a forward of `batch` is given."""
    return getattr(batch.get("attention_mask"), _CARRIED, None)


def _carried(rows: HostMask) -> HostMask:
    setattr(rows.mask, _CARRIED, rows)
    return rows


def _segments(positions: NDArray[np.int64]) -> NDArray[np.int64]:
    """Documents counted from 0 in each row; one begins wherever a position does not follow the one before."""
    segments = np.zeros_like(positions)
    segments[:, 1:] = (np.diff(positions, axis=1) != 1).cumsum(axis=1)
    return segments


def _send(value: Tensor, device: torch.device) -> Tensor:
    if device.type == "cuda":
        value = value.contiguous().pin_memory()
    return value.to(device, non_blocking=True)


def _make_mask(
    *args: Any,
    mask_function: Any = masking_utils.causal_mask_function,
    attention_mask: Tensor | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    **options: Any,
) -> Tensor | None:
    """Transformers' `sdpa_mask`, which says what the arguments are; of a `HostMask` without a look at the device."""
    rows: HostMask | None = getattr(attention_mask, _CARRIED, None)
    if rows is not None:
        rows.is_used = True
        attention_mask = None if rows.is_full else attention_mask
        if rows.segments is not None:
            mask_function = _block_diagonal(mask_function, rows)
        is_plain = rows.is_full and rows.segments is None
        allow_is_causal_skip = allow_is_causal_skip and is_plain
        allow_is_bidirectional_skip = allow_is_bidirectional_skip and is_plain
    return masking_utils.sdpa_mask(
        *args,
        mask_function=mask_function,
        attention_mask=attention_mask,
        allow_is_causal_skip=allow_is_causal_skip,
        allow_is_bidirectional_skip=allow_is_bidirectional_skip,
        **options,
    )


def _block_diagonal(mask_function: Any, rows: HostMask) -> Any:
    """`mask_function` inside of documents, as transformers has it."""
    if (compatible := getattr(masking_utils, "packed_sequence_compatibility_function", None)) is not None:
        return compatible(mask_function, rows.positions, rows.segments)
    within = masking_utils.packed_sequence_mask_function(rows.segments)  # transformers 5.17
    return masking_utils.and_masks(mask_function, within)
