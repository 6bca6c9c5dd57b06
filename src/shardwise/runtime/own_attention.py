"""transformers' attention over torch's kernels under a name of our own, which asks the device nothing.

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
from torch.nn.attention import sdpa_kernel
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel, masking_utils

from shardwise.runtime.attention_kernels import chosen_kernels, is_faster_apart
from shardwise.runtime.positions import cache_of
from shardwise.runtime.varlen import Bounds, attend_apart, find_bounds, mask_of

__all__ = ["OwnRows", "can_take_own_attention", "missed_rows", "own_rows", "take_own_attention"]

_NAME = "shardwise"
_ROWS = "_shardwise_rows"
_SDPA = AttentionInterface()["sdpa"]
_PLAIN = {"module", "query", "key", "value", "attention_mask", "dropout", "scaling", "is_causal", "kwargs"}
_SPECIAL = {"softcap", *inspect.signature(_SDPA).parameters} - _PLAIN
"""What an attention may be asked for that `varlen_attn` does not know."""


@dataclass(eq=False)
class OwnRows:
    """What the host knows of some rows.

    Attributes:
        mask: bool [rows, length], to be the forward's `attention_mask`: True where there is no padding.
        is_full: whether it hides nothing.
        segments: int64 [rows, length], the number of each token's document in its row; None where each row is one.
        positions: int64 [rows, length], from 0 in every document; None with `segments`.
        bounds: the same for `varlen_attn`; None with `segments`.
        was_found: whether a mask has been made of it.
    """

    mask: Tensor
    is_full: bool
    segments: Tensor | None = None
    positions: Tensor | None = None
    bounds: Bounds | None = None
    was_found: bool = False


def take_own_attention(model: nn.Module) -> bool:
    """Has `model` attend under our name, in place, if it computes by transformers' functions for torch's kernels and
    asks for no name itself; whether it does. `generate()` and evaluation work as before.
    """
    if not can_take_own_attention(model):
        return False
    if model.config._attn_implementation != _NAME:
        _register()
        model.set_attn_implementation(_NAME)
    return True


def can_take_own_attention(model: nn.Module) -> TypeGuard[PreTrainedModel]:
    """Whether `take_own_attention` would; not of models with attentions of their own, such as with caps or sinks."""
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


@functools.cache
def _register() -> None:
    AttentionInterface.register(_NAME, _attend)
    AttentionMaskInterface.register(_NAME, _make_mask)


def _attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | Bounds | None, **options: Any
) -> Any:
    """The attention that transformers has for torch's kernels, by these in the order measured; see [Note: kernels by
    measurement], and [Note: bounds in place of a mask].
    """
    if isinstance(attention_mask, Bounds):
        is_plain = not options.get("dropout") and all(options.get(name) is None for name in _SPECIAL)
        is_alike = key.dtype == query.dtype == value.dtype and value.shape == key.shape
        has_window = attention_mask.window is not None
        if is_plain and is_alike and is_faster_apart(query.dtype, query.shape[-1], has_window=has_window):
            return attend_apart(query, key, value, attention_mask, scale=options.get("scaling")), None
        attention_mask = mask_of(attention_mask, query.shape[0], query.shape[2])
    kernels = chosen_kernels(query, has_mask=attention_mask is not None or options.get("position_bias") is not None)
    if kernels is None:
        return _SDPA(module, query, key, value, attention_mask, **options)
    order = None if torch.compiler.is_compiling() else torch._C._get_sdp_priority_order()
    with sdpa_kernel(kernels, set_priority=True):
        output = _SDPA(module, query, key, value, attention_mask, **options)
    if order is not None:  # torch leaves kernels that are switched off at its end
        torch._C._set_sdp_priority_order(order)
    return output


def own_rows(batch: Mapping[str, Any], device: torch.device) -> OwnRows | None:
    """What is known of a batch on the host; None where it is not there, or has a mask of more dims.

    Args:
        batch: inputs of a forward.
        device: where it will run.
    """
    given = batch.get("input_ids")
    given = batch.get("inputs_embeds") if given is None else given
    mask, positions = batch.get("attention_mask"), batch.get("position_ids")
    if not isinstance(given, Tensor) or given.ndim < 2 or cache_of(batch) is not None:
        return None
    shape = given.shape[:2]
    if mask is not None:
        if not (isinstance(mask, Tensor) and mask.shape == shape and mask.device.type == "cpu"):
            return None
        return _carried(OwnRows(_send(mask.bool(), device), is_full=bool(mask.numpy().all())))
    rows = OwnRows(torch.ones(shape, dtype=torch.bool, device=device), is_full=True)
    if positions is not None:
        if not (isinstance(positions, Tensor) and positions.ndim == 2 and positions.device.type == "cpu"):
            return None
        segments = _segments(positions.numpy())
        if segments[:, -1].any():
            bounds = find_bounds(np.broadcast_to(segments, shape))
            rows.bounds = bounds._replace(starts=_send(bounds.starts, device))
            rows.segments = _send(torch.from_numpy(segments).expand(shape), device)
            rows.positions = _send(positions.expand(shape), device)
    return _carried(rows)


def missed_rows(batch: Mapping[str, Any]) -> bool:
    """Whether a forward of `batch`, which has run, took its documents for one, because its own code makes the mask."""
    rows: OwnRows | None = getattr(batch.get("attention_mask"), _ROWS, None)
    return rows is not None and rows.segments is not None and not rows.was_found


def _carried(rows: OwnRows) -> OwnRows:
    setattr(rows.mask, _ROWS, rows)
    return rows


def _segments(positions: NDArray[np.int64]) -> NDArray[np.int64]:
    """Documents counted from 0 in each row; one begins wherever a position does not follow the one before."""
    found = np.zeros_like(positions)
    found[:, 1:] = (np.diff(positions, axis=1) != 1).cumsum(axis=1)
    return found


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
) -> Tensor | Bounds | None:
    """As `sdpa_mask`, which also says what the arguments are; of rows known on the host without a look at them. Of
    documents their bounds, where layers attend by these.
    """
    rows: OwnRows | None = getattr(attention_mask, _ROWS, None)
    if rows is not None:
        rows.was_found = True
        attention_mask = None if rows.is_full else attention_mask
        if allow_is_causal_skip and (bounds := _bounds(rows, mask_function, options)) is not None:
            return bounds
        if rows.segments is not None:
            mask_function = _apart(mask_function, rows)
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


def _apart(mask_function: Any, rows: OwnRows) -> Any:
    """`mask_function` inside of documents, as transformers has it."""
    if (compatible := getattr(masking_utils, "packed_sequence_compatibility_function", None)) is not None:
        return compatible(mask_function, rows.positions, rows.segments)
    own = masking_utils.packed_sequence_mask_function(rows.segments)  # transformers 5.17
    return masking_utils.and_masks(mask_function, own)


def _bounds(rows: OwnRows, mask_function: Any, options: Mapping[str, Any]) -> Bounds | None:
    """What layers are given in place of the mask, where that was measured to be faster; None where it was not, and for
    masks that are not causal, with a window or without.
    """
    window, config, length = options.get("local_size"), options.get("config"), rows.mask.shape[1]
    if rows.bounds is None or config is None or not options["q_length"] == options["kv_length"] == length:
        return None
    causal = masking_utils.causal_mask_function
    if window is not None:
        causal = masking_utils.sliding_window_causal_mask_function(window)
    has_sizes = hasattr(config, "v_head_dim")  # of several heads, which the kernel does not take
    if getattr(config, "attention_dropout", 0) or has_sizes or not _is_same(mask_function, causal):
        return None
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if not is_faster_apart(options["dtype"], size, has_window=window is not None):
        return None
    return rows.bounds._replace(window=window)


def _is_same(one: Any, other: Any) -> bool:
    """Whether functions have the same code and the same values in it."""
    if isinstance(one, tuple) and isinstance(other, tuple):
        return len(one) == len(other) and all(map(_is_same, one, other))
    if not inspect.isfunction(one) or not inspect.isfunction(other):
        return one is other or (type(one) is type(other) is int and one == other)
    cells = [[cell.cell_contents for cell in each.__closure__ or ()] for each in (one, other)]
    return one.__code__ is other.__code__ and len(cells[0]) == len(cells[1]) and all(map(_is_same, *cells))
