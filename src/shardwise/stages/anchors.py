"""Where a tensor is found while a model's forward runs: by the names and places that it has in every stage's run.

An anchor is a string. `input:PATH` is in the arguments of the layer call at which a stage begins;
`output:FQN:NUMBER:PATH` in what call NUMBER of the module FQN returned; `glue:CALLS:NUMBER:PATH` in what operation
NUMBER returned of those on values that depend on parameters, outside of all modules that are watched, after CALLS calls
of layers.
A path is the keys and positions that lead to a tensor, joined by dots; that of a tensor alone is empty.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from shardwise.runtime.arguments import argument_names
from shardwise.stages.absent import FACTORIES

__all__ = ["find_tensor", "is_dropout", "made_by", "named_arguments", "named_tensors", "used_by", "writes"]

_WRITING = frozenset(("__setitem__", "__iadd__", "__imul__", "__isub__", "__itruediv__"))
_OF_FIRST = frozenset(("type_as", "expand_as", "view_as", "reshape_as"))
_BY_SHAPE = frozenset((*FACTORIES, "new_tensor"))


def named_arguments(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call by the names that the module's forward gives them; those of `*args` by their numbers."""
    names = argument_names(module)
    return {
        **{str(at): value for at, value in enumerate(args[len(names) :])},
        **dict(zip(names, args, strict=False)),
        **kwargs,
    }


def used_by(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """The tensors whose values an operation uses, not their shapes or dtypes alone."""
    name = getattr(func, "__name__", "")
    if name in _BY_SHAPE:
        return []
    return [value for _, value in named_tensors(args[0] if name in _OF_FIRST else [args, kwargs])]


def made_by(func: Any, args: Any, out: Any) -> list[tuple[str, Tensor]]:
    """The tensors that an operation makes or changes, with their paths in what it returns."""
    return [("", args[0])] if writes(func) and args else list(named_tensors(out))


def is_dropout(func: Any) -> bool:
    """Whether an operation drops elements of its first argument at random, in training."""
    return "dropout" in getattr(func, "__name__", "")


def writes(func: Any) -> bool:
    """Whether an operation changes its first argument."""
    name = getattr(func, "__name__", "")
    return name in _WRITING or (name.endswith("_") and not name.endswith("__"))


def named_tensors(value: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """Every tensor in tuples, lists and dicts, with its path."""
    if isinstance(value, Tensor):
        yield path, value
    else:
        for key, each in _items(value):
            yield from named_tensors(each, f"{path}.{key}" if path else str(key))


def find_tensor(value: Any, path: str) -> Tensor | None:
    """The tensor at a path, None where there is none."""
    for key in path.split(".") if path else ():
        value = next((each for name, each in _items(value) if str(name) == key), None)
    return value if isinstance(value, Tensor) else None


def _items(value: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(value, Mapping):
        yield from value.items()
    elif isinstance(value, list | tuple):
        yield from enumerate(value)
