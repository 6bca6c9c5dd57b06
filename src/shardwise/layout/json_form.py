"""Placements and layouts as JSON objects, for manifests and plans; each form reads back to an equal value."""

from collections.abc import Mapping

from shardwise.errors import LayoutError, did_you_mean
from shardwise.layout.boxes import Interval
from shardwise.layout.placement import Chunk, Placement, Replicate, Split
from shardwise.layout.tensor import Layout, Step

__all__ = ["layout_from_json", "layout_to_json", "placement_from_json", "placement_to_json"]


def layout_to_json(layout: Layout) -> dict[str, object]:
    """`layout` as a JSON object; `layout_from_json` reads it back."""
    steps = [
        {"axis": step.axis, "size": step.size, "placement": placement_to_json(step.placement)} for step in layout.steps
    ]
    return {"shape": list(layout.shape), "steps": steps}


def layout_from_json(data: Mapping[str, object]) -> Layout:
    """The layout that `layout_to_json` wrote as `data`.

    Raises:
        LayoutError: `data` is not such an object, or the layout it describes is inconsistent.
    """
    match data:
        case {"shape": list(shape), "steps": list(steps), **rest} if not rest and all(type(n) is int for n in shape):
            return Layout(tuple(shape), tuple(_step(step) for step in steps))
    raise LayoutError(f"not a layout: {dict(data)}", why="it has exactly the keys 'shape' and 'steps', both lists")


def _step(data: object) -> Step:
    match data:
        case {"axis": str(axis), "size": int(size), "placement": dict(placement), **rest} if not rest:
            return Step(axis, size, placement_from_json(placement))
    raise LayoutError(f"not a step of a layout: {data}", why="it has exactly the keys 'axis', 'size' and 'placement'")


def placement_to_json(placement: Placement) -> dict[str, object]:
    """`placement` as a JSON object; `placement_from_json` reads it back."""
    match placement:
        case Replicate():
            return {"kind": "replicate"}
        case Chunk():
            return {"kind": "chunk", "dim": placement.dim}
        case Split():
            pieces = [[list(interval) for interval in intervals] for intervals in placement.pieces]
            return {"kind": "split", "dim": placement.dim, "pieces": pieces}


_JSON_FIELDS: dict[str, frozenset[str]] = {
    "replicate": frozenset({"kind"}),
    "chunk": frozenset({"kind", "dim"}),
    "split": frozenset({"kind", "dim", "pieces"}),
}


def placement_from_json(data: Mapping[str, object]) -> Placement:
    """The placement that `placement_to_json` wrote as `data`.

    Raises:
        LayoutError: `data` is not such an object.
    """
    kind = str(data.get("kind"))
    if kind not in _JSON_FIELDS:
        raise LayoutError(
            f"unknown kind of placement {kind!r}{did_you_mean(kind, _JSON_FIELDS)}",
            why=f"the kinds are {', '.join(_JSON_FIELDS)}",
        )
    if data.keys() != _JSON_FIELDS[kind]:
        raise LayoutError(
            f"a placement of kind {kind!r} has the keys {sorted(data)}",
            why=f"it has exactly the keys {sorted(_JSON_FIELDS[kind])}",
        )
    match kind:
        case "replicate":
            return Replicate()
        case "chunk":
            return Chunk(_integer(data, "dim"))
        case _:
            return Split(_integer(data, "dim"), _json_pieces(data["pieces"]))


def _integer(data: Mapping[str, object], key: str) -> int:
    value = data[key]
    if type(value) is not int:
        raise LayoutError(f"{key} of a placement is {value!r}", why="it is an integer")
    return value


def _json_pieces(value: object) -> tuple[tuple[Interval, ...], ...]:
    def items(of: object) -> list[object]:
        if not isinstance(of, list | tuple):
            raise LayoutError(f"pieces of a placement contain {of!r}", why="they are lists of [start, stop] per coord")
        return list(of)

    def interval(of: object) -> Interval:
        match items(of):
            case [int(start), int(stop)]:
                return start, stop
        raise LayoutError(f"pieces of a placement contain {of!r}", why="an interval is [start, stop]")

    return tuple(tuple(interval(pair) for pair in items(intervals)) for intervals in items(value))
