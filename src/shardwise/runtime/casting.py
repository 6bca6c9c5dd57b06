"""Parameters that are read in another dtype than they are stored in.

# [Note: cast where it is read]
Modules keep their parameters, and read them cast while a forward of a unit is under way, or a part of one is computed
again. Nothing is written where that happens, so compiled and recomputed blocks may hold it. Autograd takes gradients
back to the parameters at rest. What a unit has read once it reads again from here until its forward ends; the casts
live as long as backward needs them, as FSDP2's gathered parameters do between forward and backward at ZeRO stage 2. In
a pipeline the microbatches of a step share them: there are as many between forward and backward as there are stages.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

__all__ = ["Casting", "cast_values"]


@dataclass(eq=False)
class Casting:
    """The dtype that a model computes in, and what has been cast.

    Attributes:
        is_on: whether a forward of a unit is under way.
        shared: what has been cast, while the microbatches of a pipeline share it; else None.
    """

    dtype: torch.dtype
    is_on: bool = False
    shared: dict[tuple[int, bool], tuple[Tensor, Tensor]] | None = None
    _known: dict[tuple[int, bool], tuple[Tensor, Tensor]] = field(default_factory=dict)

    def __call__(self, parameter: Any) -> Any:
        """What is read of a parameter."""
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
        """Inside, a unit computes."""
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
    """`value` with its floating-point tensors cast, also those in plain containers; caches and the like stay."""
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if type(value) in (tuple, list):
        return type(value)(cast_values(each, dtype) for each in value)
    if type(value) is dict:
        return {name: cast_values(each, dtype) for name, each in value.items()}
    return value
