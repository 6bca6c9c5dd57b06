"""Training forwards build no cache of keys and values.

transformers' models build one unless they are told not to. It holds keys and values a second time, grows twice where a
block is computed again, and makes `torch.compile` compile every layer anew, since its state differs from layer to
layer.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from shardwise.errors import ConfigError

__all__ = ["train_without_cache"]


def train_without_cache(model: nn.Module, *, recomputes: bool) -> None:
    """Makes forwards with gradients of a model in training mode run with `use_cache=False` unless the caller says more.

    Args:
        recomputes: whether blocks are computed again in backward, where a cache cannot be had at all.
    """
    for module, position in _cache_builders(model):
        _install(module, position, recomputes=recomputes)


def _install(module: nn.Module, position: int, *, recomputes: bool) -> None:
    def without_cache(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        if len(args) > position or not torch.is_grad_enabled() or not (module.training or recomputes):
            return args, kwargs
        if recomputes and kwargs.get("use_cache"):
            raise ConfigError("use_cache=True under recomputation", fix="leave it out, or run under torch.no_grad()")
        return args, {**kwargs, "use_cache": kwargs.get("use_cache") or False}

    module.register_forward_pre_hook(without_cache, with_kwargs=True)


def _cache_builders(module: nn.Module) -> Iterator[tuple[nn.Module, int]]:
    """The outermost modules that can be told whether to build a cache, and the models in them, which may be called on
    their own; with the place of that among their arguments. A head may hand it on unnamed.
    """
    names = list(inspect.signature(module.forward).parameters)
    if "use_cache" in names:
        yield module, names.index("use_cache")
    for child in module.children():
        if "use_cache" not in names or isinstance(child, PreTrainedModel):
            yield from _cache_builders(child)
