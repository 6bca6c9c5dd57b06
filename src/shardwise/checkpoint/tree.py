"""Values of a user or a scheduler as JSON and tensors, and back: nothing that would have to run code to be read."""

from __future__ import annotations

import collections
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.errors import ConfigError, LoadError
from shardwise.weights.tensor_file import DTYPES

__all__ = ["decode_tree", "encode_tree"]

_TAG = "$"
_MOST_DEEP = 100
_MOST_DEEP_JSON = 3 * _MOST_DEEP  # a dict whose keys are no text takes three levels of JSON
_MOST_BITS = 10_000


def encode_tree(value: Any, at: str, tensors: dict[str, Tensor], depth: int = 0) -> Any:
    """`value` as what `json.dumps` takes. Tensors go into `tensors`, detached, by their place.

    Args:
        value: JSON values, tuples, sets, dicts with keys of any of these, Counters, floats that are not finite,
            tensors.
        at: what it is, for keys and messages: `extra`.
        tensors: is added to.

    Raises:
        ConfigError: something else is in it.
    """
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int) and type(value) is int:
        if value.bit_length() > _MOST_BITS:
            raise ConfigError(f"{at} is a number of {value.bit_length():,} bits", fix=f"save at most {_MOST_BITS:,}")
        return value
    if isinstance(value, float) and type(value) is float:
        return value if math.isfinite(value) else {_TAG: "float", "is": repr(value)}
    if depth > _MOST_DEEP:
        raise ConfigError(f"{at} is nested more than {_MOST_DEEP} times", why="it may hold itself")
    if isinstance(value, Tensor):
        _check_tensor(value, at)
        at = at.encode(errors="backslashreplace").decode()  # safetensors' names are UTF-8
        while at in tensors:  # a dot in a key: {"a.b": …, "a": {"b": …}}
            at += "'"
        tensors[at] = value.detach().resolve_conj().resolve_neg()
        return {_TAG: "tensor", "is": at}
    if isinstance(value, Mapping):
        kinds = {dict: "dict", collections.OrderedDict: "dict", collections.Counter: "counter"}
        kind = kinds.get(type(value), "dict")
        if kind == "dict" and all(isinstance(key, str) for key in value) and _TAG not in value:
            return {key: encode_tree(each, f"{at}.{key}", tensors, depth + 1) for key, each in value.items()}
        pairs = [
            [encode_tree(key, f"{at} key", tensors, depth + 1), encode_tree(each, f"{at}.{key}", tensors, depth + 1)]
            for key, each in value.items()
        ]
        return {_TAG: kind, "is": pairs}
    if isinstance(value, list | tuple | set | frozenset):
        items = [encode_tree(each, f"{at}.{number}", tensors, depth + 1) for number, each in enumerate(value)]
        return items if isinstance(value, list) else {_TAG: "tuple" if isinstance(value, tuple) else "set", "is": items}
    if hasattr(value, "item") and getattr(value, "ndim", None) == 0:  # a number of numpy's
        return encode_tree(value.item(), at, tensors, depth + 1)
    raise ConfigError(
        f"{at} is a {type(value).__name__}",
        why="a checkpoint holds JSON values and tensors; anything else would have to be pickled, and run to be read",
        fix="save numbers, text, lists, dictionaries and tensors (of an object, its state_dict())",
    )


def _check_tensor(value: Tensor, at: str) -> None:
    """Raises unless it is a tensor that a file can hold."""
    kind = type(value).__name__
    if value.layout != torch.strided or value.is_quantized or value.dtype not in DTYPES:
        what = f"a tensor of {value.dtype} and layout {value.layout}"
    elif value.is_meta:
        what = "a tensor without values, on the meta device"
    elif type(value) not in (Tensor, nn.Parameter, nn.Buffer):
        what = f"a {kind}"
    else:
        return
    raise ConfigError(f"{at} is {what}", fix="save a plain tensor, such as .to_dense() or .full_tensor() makes")


def decode_tree(data: Any, tensors: Mapping[str, Tensor], depth: int = 0) -> Any:
    """The value that `encode_tree` wrote as `data`.

    Raises:
        LoadError: `data` is no such value.
    """
    if depth > _MOST_DEEP_JSON:
        raise LoadError("the checkpoint holds a value of no known kind", why=f"nested more than {depth - 1} times")
    if isinstance(data, list):
        return [decode_tree(each, tensors, depth + 1) for each in data]
    if not isinstance(data, dict):
        return data
    if _TAG not in data:
        return {key: decode_tree(each, tensors, depth + 1) for key, each in data.items()}
    kind: Any = data[_TAG]
    inner: Any = data.get("is")
    try:
        if kind == "float":
            return float(inner)
        if kind == "tensor":
            return tensors[inner]
        items = [decode_tree(each, tensors, depth + 1) for each in inner]
        if kind in ("dict", "counter"):
            found = dict(items)
            return found if kind == "dict" else collections.Counter(found)
        return {"tuple": tuple, "set": set}[kind](items)
    except (KeyError, TypeError, ValueError) as error:
        raise LoadError("the checkpoint holds a value of no known kind", at=str(data)[:100], why=repr(error)) from error
