"""Converts frozen values to JSON and back: layouts for manifests, decided plans for ranks to compare.

A dataclass becomes an object of its fields, or defines its own `to_json` and `from_json`. A placement names its kind in
`kind`.
"""

import functools
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from types import NoneType
from typing import Any, get_args, get_origin, get_type_hints

from shardwise.errors import LayoutError
from shardwise.sharding.placement import Chunk, OnCoords, Placement, Replicate, Split
from shardwise.topology.shape import MeshShape

_PLAIN = frozenset((str, int, float, bool, NoneType))
_KINDS: dict[str, type] = {"replicate": Replicate, "held": OnCoords, "chunk": Chunk, "split": Split}
_NAMES = {kind: name for name, kind in _KINDS.items()}


def to_json(value: Any) -> Any:
    """Converts `value` (a layout, a placement, a decided plan) to JSON values; `from_json` reverses it."""
    if type(value) in _PLAIN:
        return value
    if isinstance(value, MeshShape):
        return str(value)
    if hasattr(value, "to_json"):
        return value.to_json()
    if is_dataclass(value):
        kind = {"kind": _NAMES[type(value)]} if isinstance(value, Placement) else {}
        return kind | {each.name: to_json(getattr(value, each.name)) for each in fields(value)}
    if isinstance(value, Mapping):
        return {name: to_json(each) for name, each in value.items()}
    if isinstance(value, frozenset):
        return sorted(value)
    return [to_json(each) for each in value] if isinstance(value, tuple) else value


def from_json(form: Any, data: Any) -> Any:
    """Converts the JSON value `data` of `to_json` back to a value of the type `form`."""
    try:
        return _decode(form, data)
    except (TypeError, LookupError, AttributeError, ValueError) as error:
        name = getattr(form, "__name__", "Placement")
        raise LayoutError(f"no {name} in JSON", why=f"{type(error).__name__}: {error}") from error


def _decode(form: Any, data: Any) -> Any:
    origin, arguments = get_origin(form), get_args(form)
    if form is MeshShape:
        return MeshShape.parse(data)
    if hasattr(form, "from_json"):
        return form.from_json(data)
    if isinstance(form, type) and is_dataclass(form):
        hints = _hints_of(form)
        if data.keys() != hints.keys():
            raise KeyError(f"{form} has the attributes {', '.join(hints)}")
        return form(**{name: _decode(hints[name], each) for name, each in data.items()})
    if form == Placement:
        return _decode(_KINDS[data["kind"]], {name: each for name, each in data.items() if name != "kind"})
    if NoneType in arguments:
        inner = next(each for each in arguments if each is not NoneType)
        return None if data is None else _decode(inner, data)
    if origin is Mapping:
        return {name: _decode(arguments[1], each) for name, each in data.items()}
    if origin is frozenset:
        return frozenset(data)
    if origin is tuple:
        hinted = [arguments[0]] * len(data) if arguments[-1] is Ellipsis else arguments
        return tuple(_decode(each, value) for each, value in zip(hinted, data, strict=True))
    if type(data) is not form:
        raise TypeError(f"{data!r} is no {form.__name__}")
    return data


@functools.cache
def _hints_of(form: Any) -> dict[str, Any]:
    hints = get_type_hints(form)
    return {each.name: hints[each.name] for each in fields(form)}
