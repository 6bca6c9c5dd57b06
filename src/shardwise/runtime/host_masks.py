"""Attention masks whose content the host knows, so that no forward reads the mask back from the device.

# [Note: rows known on the host]
transformers omits the mask if it hides nothing and no positions restart, because the kernel's causal mask is then
enough. To find out, it reads from the device in every forward. A training step has seen the batch on the host and knows
the answer. So it passes each forward a two-dimensional mask that carries a `HostMask`. Our mask function, registered
under our name in transformers' `AttentionMaskInterface`, reads the answer there.
"""

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
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig, PreTrainedModel, masking_utils

from shardwise.runtime.arguments import Arguments, argument_names


def cache_of(arguments: Mapping[str, Any]) -> Any:
    """Returns the cache among a forward's arguments, else None. transformers 5.24 renamed the argument to `cache`."""
    return next((arguments[name] for name in ("cache", "past_key_values") if arguments.get(name) is not None), None)


def leave_out_cache(module: nn.Module, arguments: Arguments) -> None:
    """Sets `use_cache` to False in `arguments`, unless the caller set it."""
    if arguments.get("use_cache") is None:
        _keep_rows_whole(module, arguments)
    arguments["use_cache"] = arguments.get("use_cache") or False


def _keep_rows_whole(module: nn.Module, arguments: Arguments) -> None:
    """Adds a full mask to arguments that have positions and no mask, if the unsplit model would build a cache.

    Without cache and mask, transformers reads positions that restart as several documents, which do not attend to each
    other. With a cache or a mask it reads one document. A caller who does not set `use_cache` must get the unsplit
    model's result.
    """
    config, given = getattr(module, "config", None), arguments.get("input_ids")
    given = arguments.get("inputs_embeds") if given is None else given
    is_plain = arguments.get("position_ids") is not None and arguments.get("attention_mask") is None
    if not (is_plain and isinstance(given, Tensor) and "attention_mask" in argument_names(module)):
        return
    text_config = config.get_text_config() if isinstance(config, PreTrainedConfig) else config
    # The flash kernels read documents off the positions, cache or not.
    if getattr(text_config, "use_cache", False) and "flash" not in str(
        getattr(text_config, "_attn_implementation", "")
    ):
        arguments["attention_mask"] = torch.ones(given.shape[:2], dtype=torch.long, device=given.device)


_NAME = "shardwise"
_CARRIED = "_shardwise_host_mask"


@dataclass(eq=False)
class HostMask:
    """The attention mask of a batch, and what the host knows of it without reading the device.

    Attributes:
        mask: bool [rows, length], the forward's `attention_mask`: False at padding.
        is_full: whether the mask hides nothing.
        segments: int64 [rows, length], index of each token's document in its row; None if each row is one document.
        positions: int64 [rows, length], counted from 0 in every document; None if `segments` is None.
        is_used: whether the model has made its masks from this object.
    """

    mask: Tensor
    is_full: bool
    segments: Tensor | None = None
    positions: Tensor | None = None
    is_used: bool = False


def take_host_masks(model: nn.Module) -> bool:
    """Sets the attention implementation of `model` to Shardwise's, if `can_take_host_masks`; returns whether it did.

    `generate()` and evaluation work as before.
    """
    if not can_take_host_masks(model):
        return False
    if model.config._attn_implementation != _NAME:
        AttentionInterface.register(_NAME, AttentionInterface()["sdpa"])
        AttentionMaskInterface.register(_NAME, _make_mask)
        model.set_attn_implementation(_NAME)
    return True


def can_take_host_masks(model: nn.Module) -> TypeGuard[PreTrainedModel]:
    """Returns whether the model uses transformers' SDPA attention and mask functions, and no attention of its own."""
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
    """Whether a Python module's source compares the attention's name, so that another name would change its result."""
    try:
        return re.search(r"_attn_implementation\s*(==|!=|in\b|not\b)", inspect.getsource(module)) is not None
    except (OSError, TypeError):
        return True


def read_host_mask(batch: Mapping[str, Any], device: torch.device) -> HostMask | None:
    """Reads the `HostMask` of a batch; None if the batch is not on the host, or its mask has more than two dims."""
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
    """Returns the `HostMask` that `batch`'s attention mask carries; None if it carries none."""
    return getattr(batch.get("attention_mask"), _CARRIED, None)


def _carried(rows: HostMask) -> HostMask:
    setattr(rows.mask, _CARRIED, rows)
    return rows


def _segments(positions: NDArray[np.int64]) -> NDArray[np.int64]:
    """Document index of each token in its row. A document begins wherever a position does not follow the one before."""
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
    """Calls transformers' `sdpa_mask`, without device reads if the mask carries a `HostMask`."""
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
    """Restricts `mask_function` to tokens of the same document."""
    if (compatible := getattr(masking_utils, "packed_sequence_compatibility_function", None)) is not None:
        return compatible(mask_function, rows.positions, rows.segments)
    within = masking_utils.packed_sequence_mask_function(rows.segments)  # transformers 5.17
    return masking_utils.and_masks(mask_function, within)
