"""Absent tensors: tensors that another stage computes, of which this rank knows shape and dtype.

# [Note: absent tensors]
On every stage the whole forward of the model runs, but what other stages compute is absent: parameters that only they
hold, and everything computed from those. An absent tensor has the shape, dtype and device of the real one, but no
storage. Results computed from it, on torch's meta device, are absent too. So masks, positions and rotary tables, which
depend only on shapes and the batch, are computed as usual, and everything that depends on parameters costs neither
memory nor time. When the value is received, it is bound to the absent tensor and replaces it wherever the model has
kept it.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils._pytree import tree_leaves, tree_map_only

from shardwise.errors import UnsupportedError

_aten = torch.ops.aten
# What they make depends on the shape of what they are given, not on its values: it is present.
FACTORIES = (
    *("zeros_like", "ones_like", "full_like", "empty_like", "rand_like", "randn_like", "randint_like"),
    *("new_zeros", "new_ones", "new_full", "new_empty", "new_empty_strided"),
)
_FACTORIES = frozenset(getattr(_aten, name) for name in FACTORIES)
_DROPOUTS = frozenset(("dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout"))


class Absent(Tensor):
    """A tensor without values until one is bound to it (see [Note: absent tensors])."""

    meta: Tensor
    value: Tensor | None

    @staticmethod
    def __new__(cls, meta: Tensor, device: torch.device) -> "Absent":
        self = Tensor._make_wrapper_subclass(
            cls,
            meta.shape,
            strides=meta.stride(),
            storage_offset=meta.storage_offset(),
            dtype=meta.dtype,
            device=device,
        )
        self.meta, self.value = meta, None
        return self

    @classmethod
    def of(cls, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> "Absent":
        """Returns a contiguous absent tensor of this shape."""
        return cls(torch.empty(tuple(shape), dtype=dtype, device="meta"), device)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        args, kwargs = _changed(Absent, _bound, (args, dict(kwargs or {})))
        if getattr(func, "__name__", "") in _DROPOUTS and args and isinstance(args[0], Absent):
            return Absent(args[0].meta, args[0].device)  # it draws nothing
        if any(isinstance(each, Absent) for each in args) and "dropout_p" in kwargs:
            kwargs = {**kwargs, "dropout_p": 0.0}
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        among = args if any(isinstance(each, Absent) for each in args) else tree_leaves((args, kwargs))
        device = next(each.device for each in among if isinstance(each, Absent))
        makes = func.overloadpacket in _FACTORIES
        if makes:
            kwargs["device"] = kwargs.get("device") or device
        elif kwargs.get("device") is not None:
            device, kwargs["device"] = torch.device(kwargs["device"]), torch.device("meta")
        if func.overloadpacket in (_aten.index, _aten.index_put_, _aten.index_put):
            args = args[0], [place for index in args[1] for place in _places(index)], *args[2:]
        at = _written_at(func)
        changed = args[at] if at is not None and at < len(args) else None
        try:
            run = _run if makes or changed is not None or func.namespace == "c10d" else _run_once
            out = run(func, args, kwargs)
        except (RuntimeError, NotImplementedError) as error:
            raise UnsupportedError(f"{func} reads a tensor that another stage computes", why=str(error)) from error
        if func.namespace == "c10d":  # on meta nothing is sent; collectives write to their first argument
            tree_map_only(Tensor, lambda each: each if isinstance(each, Absent) else _overwritten(each), args[0])
            return out
        if changed is not None:
            return changed if isinstance(changed, Absent) else _overwritten(changed)
        return out if makes else _changed(Tensor, lambda each: Absent(each, device), out)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Absent":
        copied = memo[id(self)] = Absent(self.meta, self.device)
        copied.value = self.value
        return copied

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Absent({tuple(self.shape)}, {self.dtype}{', bound' if self.value is not None else ''})"


def present(value: Any) -> Any:
    """Replaces the absent tensors inside `value` by the tensors bound to them. Changes lists and dicts in place."""
    if isinstance(value, Absent):
        return _bound(value)
    if isinstance(value, dict):
        for key, each in value.items():
            changed = present(each)
            if changed is not each:
                value[key] = changed
    elif isinstance(value, list):
        value[:] = map(present, value)
    elif isinstance(value, tuple):
        changed = tuple(map(present, value))
        if any(new is not old for new, old in zip(changed, value, strict=True)):
            return type(value)(*changed) if hasattr(value, "_fields") else changed
    return value


def _overwritten(value: Tensor) -> Tensor:
    """Makes `value`, and the tensor that it views, absent, because an absent tensor was written into it."""
    for each in (value, value._base):
        if each is not None and type(each) is Tensor:
            meta = _meta(each)
            bound = Absent(meta, each.device)
            each.__class__ = Absent
            each.meta, each.value = meta, bound  # type: ignore[attr-defined]
    return value


_PLAIN = frozenset((bool, int, float, str, type(None), Tensor, Parameter, torch.dtype, torch.device))


def _changed(kind: type[Tensor], change: Callable[[Any], Any], value: Any) -> Any:
    """`tree_map_only`, with a fast path for common arguments."""
    if isinstance(value, kind):
        return change(value)
    of = type(value)
    if of in _PLAIN:
        return value
    if of is tuple or of is list:
        return of([_changed(kind, change, each) for each in value])
    if of is dict:
        return {name: _changed(kind, change, each) for name, each in value.items()}
    return tree_map_only(kind, change, value)


def _bound(value: Tensor) -> Tensor:
    while isinstance(value, Absent) and value.value is not None:
        value = value.value
    return value


def _places(index: Any) -> Sequence[Any]:
    """Returns the numbers that a mask with values selects, as many as only values can tell; another index as it is."""
    return index.nonzero(as_tuple=True) if type(index) is Tensor and index.dtype is torch.bool else (index,)


def _meta(value: Tensor) -> Tensor:
    if isinstance(value, Absent):
        return value.meta
    if value.is_meta:
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")


@functools.cache
def _written_at(func: Any) -> int | None:
    """Returns the index of the argument that an in-place operation writes to; None for other operations."""
    arguments = enumerate(func._schema.arguments)
    return next((at for at, each in arguments if each.alias_info is not None and each.alias_info.is_write), None)


def _run(func: Any, args: Any, kwargs: Any) -> Any:
    return func(*_changed(Tensor, _meta, args), **_changed(Tensor, _meta, kwargs))


_MAX_SEEN = 4096
_seen: dict[Any, Any] = {}
"""What operations return on the meta device: torch takes a hundred times as long to find out as to look here."""


def _run_once(func: Any, args: Any, kwargs: Any) -> Any:
    """Returns the cached `_run` for equal metadata, of operations that write nothing and make nothing real."""
    if torch._C._len_torch_dispatch_stack():
        return _run(func, args, kwargs)  # a mode may make other tensors of it
    key = func, _looks(args), _looks(tuple(kwargs.items())), torch.get_default_dtype()
    try:
        out = _seen.get(key)
    except TypeError:  # it cannot be looked up by one of its arguments
        return _run(func, args, kwargs)
    if out is None:
        if len(_seen) == _MAX_SEEN:
            _seen.clear()
        out = _seen[key] = _run(func, args, kwargs)
    return _changed(Tensor, _aten.alias.default, out)  # its shape may be changed in place


def _looks(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.shape, value.stride(), value.storage_offset(), value.dtype
    if type(value) in (tuple, list):
        return tuple([_looks(each) for each in value])
    return type(value), value
