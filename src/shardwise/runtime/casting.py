"""Casts parameters when a forward reads them, for mixed precision without FSDP2.

# [Note: cast where it is read]
Modules keep their parameters in the stored dtype. While a unit's forward runs or is recomputed, reading a parameter
returns a cast copy. Reading writes nothing, so compiled and recomputed blocks may do it. Autograd casts gradients back
to the stored dtype. A unit casts each parameter once per forward; backward keeps the cast copies alive, like FSDP2's
gathered parameters at ZeRO stage 2. The microbatches of a pipeline step share the copies.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass(eq=False)
class Casting:
    """The dtype in which a model computes, and the parameters that are already cast.

    Attributes:
        dtype: the dtype of computation.
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
    """Casts the floating-point tensors in `value`, also inside tuples, lists and dicts. Other objects, such as caches,
    are returned unchanged.
    """
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if type(value) in (tuple, list):
        return type(value)(cast_values(each, dtype) for each in value)
    if type(value) is dict:
        return {name: cast_values(each, dtype) for name, each in value.items()}
    return value
