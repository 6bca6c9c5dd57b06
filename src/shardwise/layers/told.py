"""An input that tells its module the size of a rank's part of its features.

Some attentions reshape what their heads computed by the size of what they were given
(`embed_dim = hidden_states.size(2)`), which no attribute says that could be divided. On a rank, what the heads computed
is a part; so the input is made to say the part's size. It computes with all of its features all the same.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.layers.context import SplitContext

__all__ = ["install_told"]

_KEEPING = frozenset({"transpose", "permute", "contiguous"})


class _Told(Tensor):
    """A tensor that tells a part of its last dim; whatever is computed from it, views of the same features aside, is a
    plain tensor.
    """

    _told_size: int

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            out = func(*args, **(kwargs or {}))
            told, name = args[0] if args else None, getattr(func, "__name__", "")
            if not isinstance(told, _Told):
                return out
            if name == "size" or func == Tensor.shape.__get__:  # type: ignore[attr-defined]
                return _with_last(out, told, args[1:], kwargs or {})
            if name in _KEEPING and out.shape[-1] == told.shape[-1]:
                return _tell(out, told._told_size)
            return out


def _with_last(sizes: Any, told: _Told, args: Any, kwargs: Any) -> Any:
    """What was asked of a tensor's sizes, with the size it tells for its last dim."""
    dim = args[0] if args else kwargs.get("dim")
    if dim is None:
        return torch.Size((*sizes[:-1], told._told_size))
    return told._told_size if dim % told.dim() == told.dim() - 1 else sizes


def _tell(x: Tensor, size: int) -> Tensor:
    told = x.as_subclass(_Told)
    told._told_size = size
    return told


def install_told(module: nn.Module, argument: str, context: SplitContext) -> None:
    """Lets the input called `argument` tell `module` 1 / tp of the size of its last dim."""
    position = list(inspect.signature(module.forward).parameters).index(argument)

    def told(value: Any) -> Any:
        return _tell(value, value.shape[-1] // context.size) if isinstance(value, Tensor) else value

    def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        if argument in kwargs:
            return args, {**kwargs, argument: told(kwargs[argument])}
        return tuple(told(value) if at == position else value for at, value in enumerate(args)), kwargs

    module.register_forward_pre_hook(enter, with_kwargs=True)
