"""Key/value caches with pp: every stage fills its own layers, and the other layers keep the right length.

# [Note: caches of stages]
A model asks its cache for the number of past positions, usually at layer 0 or the first layer of a kind. On a stage
that does not run that layer the answer would be 0, and positions and masks would be silently wrong. So after every
forward, the layers that this rank has not filled are advanced by the same number of positions. If a rank runs several
stages, a later stage must not see what an earlier one has added in the same forward: each stage gets copies of the
layers as they were before. The cache of an encoder-decoder consists of two: the decoder's self-attention cache, which
is advanced, and the cross-attention cache, which only its own layers read.
"""

import functools
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, StaticCache

from shardwise.errors import UnsupportedError
from shardwise.stages.absent import Absent
from shardwise.stages.model import cache_parts, copy_cache


def check_caches(arguments: Mapping[str, Any], *, num_stages_per_rank: int) -> None:
    """Raises if a cache cannot be used with stages."""
    for name, cache in _caches(arguments):
        parts = cache_parts(cache)
        layers = [layer for part in parts for layer in part.layers]
        is_shared = any(not hasattr(layer, "keys") or hasattr(layer, "recurrent_states") for layer in layers)
        is_static = any(isinstance(part, StaticCache) for part in parts)
        if (num_stages_per_rank > 1 and (is_shared or is_static)) or (len(parts) > 1 and is_static):
            raise UnsupportedError(
                f"{name} is a {type(cache).__name__}, and the model is in stages",
                why="every stage fills its own layers of a cache, and the others must be as long",
                fix="use_cache=False, or a DynamicCache",
            )


class StageCaches:
    """The caches among the arguments of one forward; see [Note: caches of stages]."""

    def __init__(self, arguments: Mapping[str, Any], *, num_stages_per_rank: int, device: torch.device) -> None:
        self._device = device
        self._given = dict(_caches(arguments))
        self._copies = num_stages_per_rank > 1
        self._before = {
            name: [_length(each) for each in cache_parts(cache)[0].layers] for name, cache in self._given.items()
        }
        self._fresh = {name: copy_cache(cache) for name, cache in self._given.items()}
        self.rows, self.length = _size(arguments)

    def __bool__(self) -> bool:
        return bool(self._given)

    def before(self) -> dict[str, Any]:
        """The caches as they were before the forward; read-only."""
        return self._fresh

    def arguments(self) -> dict[str, Any]:
        """The caches for one stage."""
        return {name: copy_cache(self._fresh[name]) if self._copies else cache for name, cache in self._given.items()}

    def keep(self, given: Mapping[str, Any]) -> None:
        """Stores what a stage has filled in the caller's caches."""
        for name, cache in self._given.items() if self._copies else ():
            parts = zip(cache_parts(cache), cache_parts(given[name]), cache_parts(self._fresh[name]), strict=True)
            for own, filled, before in parts:
                for number, layer in enumerate(filled.layers):
                    was = _length(before.layers[number]) if number < len(before.layers) else 0
                    is_own = _length(layer) != was and not isinstance(getattr(layer, "keys", None), Absent)
                    if number >= len(own.layers):
                        own.layers.append(layer)
                    elif is_own:
                        own.layers[number] = layer
            if len(cache_parts(cache)) > 1:
                updated = given[name].is_updated.items()
                cross = cache_parts(cache)[1].layers
                cache.is_updated |= {number: is_new for number, is_new in updated if _length(cross[number])}

    def advance(self) -> None:
        """Advances the layers of other ranks' stages as if they had been filled."""
        for name, cache in self._given.items():
            before, own = self._before[name], cache_parts(cache)[0]
            state = torch.zeros(self.rows, 1, self.length, 1, device=self._device)
            if not own.layers:  # which nobody here has filled
                own.update(state, state, 0)
            for number, layer in enumerate(own.layers):
                was = before[number] if number < len(before) else 0
                if _length(layer) == was and hasattr(layer, "keys"):
                    type(layer).update(layer, state, state)
                    layer.update = functools.partial(_extend, layer)
                if hasattr(layer, "recurrent_states"):
                    layer.has_previous_state = dict.fromkeys(layer.has_previous_state, True)


def _extend(layer: Any, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    """Replacement of a layer's `update` on other stages, where absent tensors flow through."""
    made = ((*x.shape[:-2], _length(layer) + x.shape[-2], x.shape[-1]) for x in (key, value))
    keys, values = (Absent.of(shape, key.dtype, key.device) for shape in made)
    return keys, values


def _caches(arguments: Mapping[str, Any]) -> Iterator[tuple[str, Cache]]:
    return ((name, value) for name, value in arguments.items() if isinstance(value, Cache))


def _length(layer: Any) -> int:
    return int(layer.get_seq_length()) if hasattr(layer, "get_seq_length") else 0


def _size(arguments: Mapping[str, Any]) -> tuple[int, int]:
    """Rows and positions of the forward."""
    for name in ("decoder_input_ids", "decoder_inputs_embeds", "input_ids", "inputs_embeds"):
        if arguments.get(name) is not None:
            rows, length = arguments[name].shape[:2]
            return rows, length
    return 1, 1
