"""Forwards with positions or a cache, when no cache should be built."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from shardwise.runtime.arguments import Arguments, argument_names


def cache_of(arguments: Mapping[str, Any]) -> Any:
    """The cache among a forward's arguments; None without one. transformers 5.24 renamed the argument to `cache`."""
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
