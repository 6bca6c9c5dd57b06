"""Forwards that are given positions or a cache, and build no cache where the unsplit model would."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from shardwise.runtime.arguments import Arguments, argument_names

__all__ = ["cache_of", "leave_out_cache"]


def cache_of(arguments: Mapping[str, Any]) -> Any:
    """The cache in a forward's arguments, None without one. transformers 5.24 renamed the argument to `cache`."""
    return next((arguments[name] for name in ("cache", "past_key_values") if arguments.get(name) is not None), None)


def leave_out_cache(module: nn.Module, arguments: Arguments) -> None:
    """Has a forward with these `arguments` build no cache of keys and values, unless they ask for one."""
    if arguments.get("use_cache") is None:
        _keep_rows_whole(module, arguments)
    arguments["use_cache"] = arguments.get("use_cache") or False


def _keep_rows_whole(module: nn.Module, arguments: Arguments) -> None:
    """Adds a mask that hides nothing where `arguments` have positions and no mask, and the model would build a cache.

    Without a cache transformers takes a row whose positions restart for several documents, which do not see each other;
    beside one, or a mask, it is one. So whoever leaves `use_cache` out is given what the unsplit model computes.
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
