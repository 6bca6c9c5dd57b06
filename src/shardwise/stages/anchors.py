"""Anchors: names of tensors in a model's forward, the same in every stage's run.

An anchor is a string. `input:PATH`: in the arguments of the layer call at which a stage begins.
`output:FQN:NUMBER:PATH`: in the output of call NUMBER of the module FQN. `glue:CALLS:NUMBER:PATH`: in the output of
operation NUMBER, counting those on values that depend on parameters outside of all watched modules, after CALLS calls
of layers. A path joins the keys and indices that lead to a tensor by dots; it is empty for a tensor itself.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from shardwise.runtime.arguments import argument_names
from shardwise.stages.absent import FACTORIES

_WRITING = frozenset(("__setitem__", "__iadd__", "__imul__", "__isub__", "__itruediv__"))
_OF_FIRST = frozenset(("type_as", "expand_as", "view_as", "reshape_as"))
_BY_SHAPE = frozenset((*FACTORIES, "new_tensor"))


def named_arguments(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of a call by the names of the module's forward; those of `*args` by their numbers."""
    names = argument_names(module)
    return {
        **{str(at): value for at, value in enumerate(args[len(names) :])},
        **dict(zip(names, args, strict=False)),
        **kwargs,
    }


def used_by(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """Tensors whose values an operation uses, not only their shapes or dtypes."""
    name = getattr(func, "__name__", "")
    if name in _BY_SHAPE:
        return []
    return [value for _, value in named_tensors(args[0] if name in _OF_FIRST else [args, kwargs])]


def made_by(func: Any, args: Any, out: Any) -> list[tuple[str, Tensor]]:
    """Tensors that an operation makes or changes, with their paths in its output."""
    return [("", args[0])] if writes(func) and args else list(named_tensors(out))


def is_dropout(func: Any) -> bool:
    """Whether an operation randomly drops elements of its first argument."""
    return "dropout" in getattr(func, "__name__", "")


def writes(func: Any) -> bool:
    """Whether an operation changes its first argument."""
    name = getattr(func, "__name__", "")
    return name in _WRITING or (name.endswith("_") and not name.endswith("__"))


def named_tensors(value: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yields every tensor in tuples, lists and dicts, with its path."""
    if isinstance(value, Tensor):
        yield path, value
    else:
        for key, each in _items(value):
            yield from named_tensors(each, f"{path}.{key}" if path else str(key))


def find_tensor(value: Any, path: str) -> Tensor | None:
    """The tensor at a path; None if there is none."""
    for key in path.split(".") if path else ():
        value = next((each for name, each in _items(value) if str(name) == key), None)
    return value if isinstance(value, Tensor) else None


def _items(value: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(value, Mapping):
        yield from value.items()
    elif isinstance(value, list | tuple):
        yield from enumerate(value)
