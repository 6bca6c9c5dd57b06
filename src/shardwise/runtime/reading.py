"""Parameters that a forward reads in another form than they are stored in: cast, or divided by the number of ranks.

Reading writes nothing, so compiled and recomputed code may do it.

# [Note: cast where it is read]
Modules keep their parameters in the stored dtype. While a unit's forward runs or is recomputed, reading a parameter
returns a cast copy. Reading writes nothing, so compiled and recomputed blocks may do it. Autograd casts gradients back
to the stored dtype. A unit casts each parameter once per forward; backward keeps the cast copies alive, like FSDP2's
gathered parameters at ZeRO stage 2. The microbatches of a pipeline step share the copies.
"""

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.runtime.linear import apply_mixin


@dataclass(eq=False)
class Casting:
    """The dtype in which a model computes, and the parameters that are already cast.

    Attributes:
        is_on: whether a unit's forward is running.
        shared: cast parameters that the microbatches of a pipeline step share; None outside of such a step.
    """

    dtype: torch.dtype
    is_on: bool = False
    shared: dict[tuple[int, bool], tuple[Tensor, Tensor]] | None = None
    _known: dict[tuple[int, bool], tuple[Tensor, Tensor]] = field(default_factory=dict)

    def __call__(self, parameter: Any) -> Any:
        """The value that a module reads for `parameter`: cast while a unit's forward runs, else as it is stored."""
        if not self.is_on or parameter is None:
            return parameter
        if torch.compiler.is_compiling():
            return parameter.to(self.dtype)
        key = id(parameter), torch.is_grad_enabled()
        known = self.shared if self.shared is not None and key[1] else self._known
        if key not in known or known[key][0] is not parameter:
            known[key] = parameter, parameter.to(self.dtype)
        return known[key][1]

    @contextmanager
    def under_way(self) -> Iterator[None]:
        """Context manager around a unit's forward."""
        before, self.is_on = self.is_on, True
        if torch.compiler.is_compiling():
            try:
                yield
            finally:
                self.is_on = before
            return
        known, self._known = self._known, {}
        try:
            yield
        finally:
            self.is_on, self._known = before, known


def cast_values(value: Any, dtype: torch.dtype) -> Any:
    """Returns `value` with its floating-point tensors cast to `dtype`. Looks only into tuples, lists and dicts."""
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if type(value) in (tuple, list):
        return type(value)(cast_values(each, dtype) for each in value)
    if type(value) is dict:
        return {name: cast_values(each, dtype) for name, each in value.items()}
    return value


Read = Callable[[Any], Any]  # what a forward is given for a stored parameter, which may be None

_READS = "_shardwise_reads"


def read_through(module: nn.Module, name: str, read: Read) -> None:
    """Makes every access to `module.name` return `read(parameter)`, after the reads that were added before.

    `parameters()`, `state_dict()` and assignments still see the stored parameter.
    """
    reads: dict[str, tuple[Read, ...]] = module.__dict__.setdefault(_READS, {})
    if name not in reads:
        apply_mixin(module, _reader(name))
    reads[name] = (*reads.get(name, ()), read)


@dataclass(eq=False)
class _InForward:
    """Applies `read` to a parameter while the forward of its module runs."""

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
    """Mixin of a module whose forward reads its parameters in another form.

    Attributes:
        _readings: context managers that are active during the forward; the last one is entered first.
        _dtype: dtype to which floating-point inputs are cast; None leaves them.
    """

    _readings: tuple[_InForward | Casting, ...] = ()
    _dtype: torch.dtype | None = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the module's own forward."""
        return run_reading(self, super().forward, args, kwargs)  # type: ignore[misc]


def run_reading(module: Any, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Calls `function` in place of the module's own forward: inputs are cast, parameters read in another form."""
    dtype: torch.dtype | None = getattr(module, "_dtype", None)
    if dtype is not None:
        args, kwargs = cast_values(args, dtype), cast_values(kwargs, dtype)
    with ExitStack() as stack:
        for reading in getattr(module, "_readings", ()):
            stack.enter_context(reading.under_way())
        return function(*args, **kwargs)


def read_in_forward(module: nn.Module, names: Iterable[str], read: Read) -> None:
    """Makes only the module's own forward read these parameters through `read`; see `read_through`."""
    in_forward = _InForward(read)
    for name in names:
        read_through(module, name, in_forward)
    _add_reading(module, in_forward)


def cast_in_forward(module: nn.Module, casting: Casting) -> None:
    """Activates `casting` during the module's forward, and casts the forward's floating-point inputs."""
    _add_reading(module, casting)
    setattr(module, "_dtype", casting.dtype)  # noqa: B010 - no parameter


def _add_reading(module: nn.Module, reading: _InForward | Casting) -> None:
    if not isinstance(module, ReadsInForward):
        apply_mixin(module, ReadsInForward)
    setattr(module, "_readings", (*getattr(module, "_readings"), reading))  # noqa: B009, B010


@functools.cache
def _reader(name: str) -> type:
    """Mixin class whose property `name` reads the parameter through `_READS`."""

    def read_parameter(self: Any) -> Tensor | None:
        if name in self.__dict__:  # a pipeline stage has hidden the parameter: it belongs to another segment
            return self.__dict__[name]
        if name not in self._parameters:
            raise AttributeError(name)  # nn.Module says it better
        value = self._parameters[name]
        for read in self.__dict__[_READS][name]:
            value = read(value)
        return value

    return type("Reader", (), {name: property(read_parameter), "__doc__": "Mixin: reads a parameter changed."})
