"""Counts the moments in which the host asks the device for a value, and so waits for all that it was given to do."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["ReadCount"]

_READS = frozenset(
    {
        torch.ops.aten._local_scalar_dense,  # item(), float(), int(), bool(), `if tensor`
        torch.ops.aten.equal,
        torch.ops.aten.is_nonzero,
        torch.ops.aten.item,
        torch.ops.aten.masked_select,
        torch.ops.aten.nonzero,
        torch.ops.aten._unique2,
        torch.ops.aten.unique_consecutive,
        torch.ops.aten.unique_dim,
    }
)
"""Operations whose result, or its shape, depends on values."""

_LIBRARY = Path(torch.__file__).parent


class ReadCount(TorchDispatchMode):
    """While active, counts reads of values, on CPUs too, where they cost nothing and so can be counted without a GPU.

    `tolist()` and `numpy()` of tensors on the host are no operations and are not seen: what is on the host already may
    be read by them.

    Attributes:
        places: where in Python values were read ("file:line, function", outside of torch), and how often.
    """

    def __init__(self) -> None:
        super().__init__()
        self.places: Counter[str] = Counter()

    @property
    def total(self) -> int:
        """All of them."""
        return self.places.total()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in _READS or _selects(func, args):
            self.places[_place()] += 1
        return func(*args, **(kwargs or {}))


def _selects(func: Any, args: Any) -> bool:
    """Whether an index is a mask, of which the device must say how many elements it chooses."""
    if func.overloadpacket not in (torch.ops.aten.index, torch.ops.aten.index_put_, torch.ops.aten.index_put):
        return False
    return any(isinstance(each, Tensor) and each.dtype in (torch.bool, torch.uint8) for each in args[1])


def _place() -> str:
    """The innermost caller outside of torch and of this file."""
    frame = sys._getframe(2)
    while frame.f_back is not None:
        path = Path(frame.f_code.co_filename)
        if _LIBRARY not in path.parents and path != Path(__file__):
            break
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}, {frame.f_code.co_name}"
