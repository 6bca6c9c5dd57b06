"""Caches of keys and values under pp: every stage fills its own layers, and the others stay as long as they are.

# [Note: caches of stages]
A model asks its cache how many positions have been, and asks layer 0, or the first layer of a kind; a stage that does
not run that layer would get 0, and its positions and masks would be wrong without a word. So after every forward the
layers that this rank has not filled are advanced by as many positions, of one number each. And where a rank runs
several stages, the later one must not find what the earlier one has added in the same forward: each is given copies of
the layers as they were before.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from transformers import Cache, EncoderDecoderCache, StaticCache

from shardwise.errors import UnsupportedError

__all__ = ["StageCaches", "check_caches"]


def check_caches(arguments: Mapping[str, Any], *, num_stages_per_rank: int) -> None:
    """Raises where a cache cannot be kept in stages.

    Raises:
        UnsupportedError: it is of a kind that stages cannot share.
    """
    for name, cache in _caches(arguments):
        is_shared = any(not hasattr(layer, "keys") or hasattr(layer, "recurrent_states") for layer in cache.layers)
        is_copied = num_stages_per_rank > 1 and (is_shared or isinstance(cache, StaticCache))
        if isinstance(cache, EncoderDecoderCache) or is_copied:
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
        self._before = {name: [_length(layer) for layer in cache.layers] for name, cache in self._given.items()}
        self._fresh = {
            name: [copy.copy(layer) for layer in cache.layers] if self._copies else []
            for name, cache in self._given.items()
        }
        self.rows, self.length = _size(arguments)

    def __bool__(self) -> bool:
        return bool(self._given)

    def arguments(self) -> dict[str, Any]:
        """The caches that one stage is given."""
        if not self._copies:
            return dict(self._given)
        given = {}
        for name, cache in self._given.items():
            given[name] = copy.copy(cache)
            given[name].layers = [copy.copy(layer) for layer in self._fresh[name]]
        return given

    def keep(self, given: Mapping[str, Any]) -> None:
        """Puts what a stage has filled into the caller's caches."""
        for name, cache in self._given.items() if self._copies else ():
            for number, layer in enumerate(given[name].layers):
                if number >= len(cache.layers):
                    cache.layers.append(layer)
                elif _length(layer) != _length(self._fresh[name][number]):
                    cache.layers[number] = layer

    def advance(self) -> None:
        """Makes the layers of other ranks' stages as long as if they had been filled."""
        for name, cache in self._given.items():
            before = self._before[name]
            for number, layer in enumerate(cache.layers):
                was = before[number] if number < len(before) else 0
                if _length(layer) == was and hasattr(layer, "keys"):
                    state = torch.zeros(self.rows, 1, self.length, 1, device=self._device)
                    layer.update(state, state)
                if hasattr(layer, "recurrent_states"):
                    layer.has_previous_state = dict.fromkeys(layer.has_previous_state, True)


def _caches(arguments: Mapping[str, Any]) -> Iterator[tuple[str, Cache]]:
    return ((name, value) for name, value in arguments.items() if isinstance(value, Cache))


def _length(layer: Any) -> int:
    return int(layer.get_seq_length()) if hasattr(layer, "get_seq_length") else 0


def _size(arguments: Mapping[str, Any]) -> tuple[int, int]:
    """Rows and positions of the forward."""
    for name in ("input_ids", "inputs_embeds"):
        if arguments.get(name) is not None:
            rows, length = arguments[name].shape[:2]
            return rows, length
    return 1, 1
