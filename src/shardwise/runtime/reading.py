"""Parameters that forwards read in another form than they are stored in: cast, or this rank's share of them.

Reading changes nothing that is stored, so code that is compiled or recomputed may do it wherever it likes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from shardwise.runtime.linear import apply_mixin

__all__ = ["Read", "read_in_forward", "read_through"]

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


class _Reads:
    _in_forward: _InForward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As the module's own, of its parameters as they are read."""
        self._in_forward.is_on = True
        try:
            return super().forward(*args, **kwargs)  # type: ignore[misc]
        finally:
            self._in_forward.is_on = False


def read_in_forward(module: nn.Module, names: Iterable[str], read: Read) -> None:
    """As `read_through` of parameters that are there, for the module's own forward alone."""
    in_forward = _InForward(read)
    for name in names:
        read_through(module, name, in_forward)
    apply_mixin(module, _Reads, _in_forward=in_forward)


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
