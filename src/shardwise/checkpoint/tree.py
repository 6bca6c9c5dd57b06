"""Converts values of a user or a scheduler to JSON and tensors, and back, without running code when reading."""

import collections
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.errors import ConfigError, LoadError
from shardwise.weights.tensor_file import DTYPES

_TAG = "$"


def encode_tree(value: Any, at: str, tensors: dict[str, Tensor]) -> Any:
    """Converts `value` to JSON values. Tensors are detached and stored in `tensors` by their path.

    Args:
        value: JSON values, tuples, sets, dicts with keys of any of these, Counters, nonfinite floats, tensors, numpy
            numbers.
        at: path of `value`, for keys and messages, such as `extra`.
        tensors: receives the tensors.
    """
    if value is None or isinstance(value, bool | str):
        return value
    if type(value) is int:
        return value
    if type(value) is float:
        return value if math.isfinite(value) else {_TAG: "float", "is": repr(value)}
    if isinstance(value, Tensor):
        is_plain = value.layout == torch.strided and value.dtype in DTYPES and not value.is_meta
        if not is_plain or type(value) not in (Tensor, nn.Parameter, nn.Buffer):
            raise ConfigError(
                f"{at} is a {type(value).__name__} of {value.dtype} and layout {value.layout} on {value.device}",
                fix="save a plain tensor, such as .to_dense() or .full_tensor() makes",
            )
        at = at.encode(errors="backslashreplace").decode()  # safetensors' names are UTF-8
        while at in tensors:  # a dot in a key: {"a.b": …, "a": {"b": …}}
            at += "'"
        tensors[at] = value.detach().resolve_conj().resolve_neg()
        return {_TAG: "tensor", "is": at}
    if isinstance(value, Mapping):
        kind = "counter" if isinstance(value, collections.Counter) else "dict"
        if kind == "dict" and all(isinstance(key, str) for key in value) and _TAG not in value:
            return {key: encode_tree(each, f"{at}.{key}", tensors) for key, each in value.items()}
        pairs = [
            [encode_tree(key, f"{at} key", tensors), encode_tree(each, f"{at}.{key}", tensors)]
            for key, each in value.items()
        ]
        return {_TAG: kind, "is": pairs}
    if isinstance(value, list | tuple | set | frozenset):
        items = [encode_tree(each, f"{at}.{number}", tensors) for number, each in enumerate(value)]
        return items if isinstance(value, list) else {_TAG: "tuple" if isinstance(value, tuple) else "set", "is": items}
    if hasattr(value, "item") and getattr(value, "ndim", None) == 0:  # a number of numpy's
        return encode_tree(value.item(), at, tensors)
    raise ConfigError(
        f"{at} is a {type(value).__name__}",
        why="a checkpoint holds JSON values and tensors; anything else would have to be pickled, and run to be read",
        fix="save numbers, text, lists, dictionaries and tensors (of an object, its state_dict())",
    )


def decode_tree(data: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Converts the result of `encode_tree` back."""
    if isinstance(data, list):
        return [decode_tree(each, tensors) for each in data]
    if not isinstance(data, dict):
        return data
    if _TAG not in data:
        return {key: decode_tree(each, tensors) for key, each in data.items()}
    kind, inner = data[_TAG], data["is"]
    if kind == "float":
        return float(inner)
    if kind == "tensor":
        return tensors[inner]
    made: dict[Any, Any] = {"tuple": tuple, "set": set, "dict": dict, "counter": lambda x: collections.Counter(dict(x))}
    if kind not in made:
        raise LoadError("the checkpoint holds a value of no known kind", at=str(data)[:100])
    return made[kind](decode_tree(each, tensors) for each in inner)
