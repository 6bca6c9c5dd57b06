"""Chooses the layers of a tiny model: few, and of every kind in the original."""

from collections.abc import Hashable, Mapping
from typing import Any

from shardwise.tiny.families import LAYER_CYCLES, LAYER_FLAGS, LAYER_PERIODS, LAYER_PREFIXES, LAYER_SUFFIXES
from shardwise.tiny.fields import is_count


def choose_layers(values: Mapping[str, Any], num_layers: int, wanted: int, *, repeats: int = 1) -> list[int]:
    """Indices of the original layers that the tiny model keeps, ascending: at least `wanted`, `repeats` of each kind.

    Args:
        values: attributes of the configuration.
        num_layers: number of layers of the original.
        wanted: number of layers of the tiny model if there is only one kind.
    """
    kinds = [_kind(values, num_layers, index) for index in range(num_layers)]
    chosen = {index for index, kind in enumerate(kinds) if kinds[:index].count(kind) < repeats}
    chosen |= set(range(_cycle(values)))
    for index in range(num_layers):
        if len(chosen) >= wanted:
            break
        chosen.add(index)
    return sorted(index for index in chosen if index < num_layers)


def shrink_layer_lists(values: Mapping[str, Any], num_layers: int, chosen: list[int]) -> dict[str, Any]:
    """The attributes that describe each layer, for the chosen layers only."""
    new: dict[str, Any] = {}
    for name, value in values.items():
        if name in LAYER_PREFIXES and is_count(value):
            new[name] = sum(index < value for index in chosen)
        elif name in LAYER_SUFFIXES and is_count(value):
            new[name] = sum(index >= num_layers - value for index in chosen)
        elif name in LAYER_PERIODS and is_count(value) and value > 1:
            new.update(_shrink_period(values, name))
        elif _is_index_list(name, value, num_layers):
            new[name] = type(value)(position for position, index in enumerate(chosen) if index in value)
        elif _is_per_layer(value, num_layers):
            new[name] = type(value)(value[index] for index in chosen)
    return new


def _kind(values: Mapping[str, Any], num_layers: int, index: int) -> tuple[Hashable, ...]:
    """Kind of layer `index`, by lists and counts."""
    kind: list[Hashable] = []
    for name, value in values.items():
        if name in LAYER_PREFIXES and is_count(value):
            kind.append(index < value)
        elif name in LAYER_SUFFIXES and is_count(value):
            kind.append(index >= num_layers - value)
        elif _is_index_list(name, value, num_layers):
            kind.append(index in value)
        elif _is_per_layer(value, num_layers):
            kind.append(repr(value[index]))
    return tuple(kind)


def _cycle(values: Mapping[str, Any]) -> int:
    """Number of layers that a tiny model needs for every phase of its (shrunk) periods."""
    cycles = [len(value) for name, value in values.items() if name in LAYER_CYCLES and value]
    for name, value in values.items():
        if name in LAYER_PERIODS and is_count(value) and value > 1:
            cycles.append(_shrink_period(values, name)[name])
    return max(cycles, default=0)


def _shrink_period(values: Mapping[str, Any], name: str) -> dict[str, int]:
    """A period of at most 2, or 4 with an offset, so that periods of 2 beside it stay visible."""
    period, offset_name = values[name], LAYER_PERIODS[name]
    if offset_name is None:
        return {name: min(period, 2)}
    new = min(period, 4)
    return {name: new, offset_name: values[offset_name] * new // period}


def _is_per_layer(value: object, num_layers: int) -> bool:
    return isinstance(value, list | tuple) and len(value) == num_layers and num_layers > 1


def _is_index_list(name: str, value: object, num_layers: int) -> bool:
    """Whether a list holds indices of layers: ascending distinct integers, named after layers or indices."""
    return (
        isinstance(value, list | tuple)
        and name not in LAYER_FLAGS
        and any(word in name for word in ("layer", "idx", "indexes", "indices"))
        and all(is_count(each) and 0 <= each <= num_layers for each in value)
        and len(set(value)) == len(value)
    )
