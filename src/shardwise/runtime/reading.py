"""Parameters that forwards read in another form than they are stored in: cast, or this rank's share of them.

Reading changes nothing that is stored, so code that is compiled or recomputed may do it wherever it likes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.runtime.casting import Casting, cast_values
from shardwise.runtime.linear import apply_mixin

__all__ = ["Read", "cast_in_forward", "read_in_forward", "read_through"]

Read = Callable[[Any], Any]
"""What a forward is given for a stored parameter, which may be None."""

_READS = "_shardwise_reads"


def read_through(module: nn.Module, name: str, read: Read) -> None:
    """Has whoever reads the parameter `name` of `module`, in place, be given what `read` makes of it, after what was
    asked for before. What is stored stays: `parameters()`, `state_dict()` and assignments know nothing of it.
    """
    reads: dict[str, tuple[Read, ...]] = module.__dict__.setdefault(_READS, {})
    if name not in reads:
        apply_mixin(module, _reader(name))
    reads[name] = (*reads.get(name, ()), read)


@dataclass(eq=False)
class _InForward:
    """Reads a parameter by `read` while the forward of its owner is under way."""

    read: Read
    is_on: bool = False

    def __call__(self, parameter: Any) -> Any:
        return self.read(parameter) if self.is_on and parameter is not None else parameter

    @contextmanager
    def under_way(self) -> Iterator[None]:
        before, self.is_on = self.is_on, True
        try:
            yield
        finally:
            self.is_on = before


class ReadsInForward:
    """Mixin of a module whose forward computes with parameters as they are read.

    Attributes:
        _readings: what is under way during the forward, each a context; the last one is entered first.
        _dtype: what floating-point inputs are cast to; None: they stay.
    """

    _readings: tuple[_InForward | Casting, ...] = ()
    _dtype: torch.dtype | None = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the module's own forward."""
        own: Callable[..., Any] = super().forward  # type: ignore[misc]
        if self._dtype is not None:
            args, kwargs = cast_values(args, self._dtype), cast_values(kwargs, self._dtype)
        with ExitStack() as stack:
            for reading in self._readings:
                stack.enter_context(reading.under_way())
            return own(*args, **kwargs)


def read_in_forward(module: nn.Module, names: Iterable[str], read: Read) -> None:
    """Has the module's own forward, and nobody else, read these parameters through `read`; see `read_through`."""
    in_forward = _InForward(read)
    for name in names:
        read_through(module, name, in_forward)
    _add_reading(module, in_forward)


def cast_in_forward(module: nn.Module, casting: Casting) -> None:
    """Has parameters be read by `casting`, where they are read through it, and floating-point inputs be cast, while the
    module's forward is under way.
    """
    _add_reading(module, casting)
    setattr(module, "_dtype", casting.dtype)  # noqa: B010 - no parameter


def _add_reading(module: nn.Module, reading: _InForward | Casting) -> None:
    if not isinstance(module, ReadsInForward):
        apply_mixin(module, ReadsInForward)
    setattr(module, "_readings", (*getattr(module, "_readings"), reading))  # noqa: B009, B010


@functools.cache
def _reader(name: str) -> type:
    """A mixin whose instances read their parameter of this name through `_READS`."""

    def read_parameter(self: Any) -> Tensor | None:
        if name not in self._parameters:
            raise AttributeError(name)  # nn.Module says it better
        value = self._parameters[name]
        for read in self.__dict__[_READS][name]:
            value = read(value)
        return value

    return type("Reader", (), {name: property(read_parameter), "__doc__": "Mixin: reads a parameter changed."})
