"""A decided plan as JSON, and back to an equal value: what ranks compare, and what files may keep."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from types import NoneType
from typing import Any, get_args, get_origin, get_type_hints

from shardwise.errors import PlanError
from shardwise.layout.json_form import layout_from_json, layout_to_json
from shardwise.layout.tensor import Layout
from shardwise.plan.decision import SplitPlan
from shardwise.topology.shape import MeshShape

__all__ = ["plan_from_json", "plan_to_json"]


def plan_to_json(plan: SplitPlan) -> dict[str, Any]:
    """`plan` as a JSON object, by the names of its attributes."""
    encoded = _encode(plan)
    assert isinstance(encoded, dict)
    return encoded


def plan_from_json(data: Mapping[str, Any]) -> SplitPlan:
    """The plan that `plan_to_json` wrote as `data`.

    Raises:
        PlanError: `data` is no such object.
    """
    try:
        plan = _decode(SplitPlan, data)
    except (TypeError, KeyError, AttributeError, ValueError) as error:
        raise PlanError("not a decided plan", why=f"{type(error).__name__}: {error}") from error
    assert isinstance(plan, SplitPlan)
    return plan


def _encode(value: Any) -> Any:
    if isinstance(value, Layout):
        return layout_to_json(value)
    if isinstance(value, MeshShape):
        return str(value)
    if is_dataclass(value):
        return {each.name: _encode(getattr(value, each.name)) for each in fields(value)}
    if isinstance(value, Mapping):
        return {name: _encode(each) for name, each in value.items()}
    if isinstance(value, frozenset):
        return sorted(value)
    return [_encode(each) for each in value] if isinstance(value, tuple) else value


def _decode(hint: Any, data: Any) -> Any:
    """The value of the type `hint` that `_encode` made `data` of."""
    origin, arguments = get_origin(hint), get_args(hint)
    if hint is Layout:
        return layout_from_json(data)
    if hint is MeshShape:
        return MeshShape.parse(data)
    if is_dataclass(hint):
        hints: dict[str, Any] = get_type_hints(hint)
        if data.keys() != {each.name for each in fields(hint)}:
            raise KeyError(f"{hint} has the attributes {', '.join(each.name for each in fields(hint))}")
        made: Any = hint
        return made(**{name: _decode(hints[name], each) for name, each in data.items()})
    if origin is not None and NoneType in arguments:
        inner = next(each for each in arguments if each is not NoneType)
        return None if data is None else _decode(inner, data)
    if origin is Mapping:
        return {name: _decode(arguments[1], each) for name, each in data.items()}
    if origin is frozenset:
        return frozenset(data)
    if origin is tuple:
        hinted = [arguments[0]] * len(data) if arguments[-1] is Ellipsis else arguments
        return tuple(_decode(each, value) for each, value in zip(hinted, data, strict=True))
    if type(data) is not hint:
        raise TypeError(f"{data!r} is no {hint.__name__}")
    return data
