"""Training forwards build no cache of keys and values.

transformers' models build one unless `use_cache=False`. The cache stores keys and values a second time, and grows twice
if a block is recomputed. `torch.compile` would compile every layer separately, because the cache's state differs
between layers.
"""

import inspect
from collections.abc import Iterator

import torch
from torch import nn
from transformers import PreTrainedModel

from shardwise.errors import ConfigError
from shardwise.runtime.arguments import Arguments, edit_arguments
from shardwise.runtime.positions import leave_out_cache


def train_without_cache(model: nn.Module, *, recomputes: bool) -> None:
    """Makes training forwards with gradients run with `use_cache=False`, unless the caller passes `use_cache`.

    Args:
        recomputes: whether blocks are recomputed in backward. Then `use_cache=True` is impossible.
    """

    def without_cache(module: nn.Module, arguments: Arguments) -> None:
        if torch.is_grad_enabled() and (module.training or recomputes):
            if recomputes and arguments.get("use_cache"):
                raise ConfigError(
                    "use_cache=True under recomputation", fix="leave it out, or run under torch.no_grad()"
                )
            leave_out_cache(module, arguments)

    for module in _cache_builders(model):
        edit_arguments(module, without_cache)


def _cache_builders(module: nn.Module) -> Iterator[nn.Module]:
    """Yields the outermost modules that take `use_cache`, and the models inside them, which may be called directly."""
    takes_it = "use_cache" in inspect.signature(module.forward).parameters
    if takes_it:
        yield module
    for child in module.children():
        if not takes_it or isinstance(child, PreTrainedModel):
            yield from _cache_builders(child)
