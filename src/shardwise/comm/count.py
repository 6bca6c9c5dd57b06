"""Counts what is communicated, as c10d operations: exact, and the same on every backend."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["CommunicationCount"]

# c10d operation to (what it is called here, which argument holds the tensors that say its size).
_OPERATIONS = {
    "allreduce_": ("all_reduce", 0),
    "_allgather_base_": ("all_gather", 0),
    "allgather_": ("all_gather", 0),
    "_reduce_scatter_base_": ("reduce_scatter", 1),
    "reduce_scatter_": ("reduce_scatter", 1),
    "broadcast_": ("broadcast", 0),
    "gather_": ("gather", 1),
    "alltoall_base_": ("all_to_all", 0),
    "allreduce_coalesced_": ("all_reduce", 0),
}


@dataclass
class CommunicationCount(TorchDispatchMode):
    """While active, counts this rank's collectives: calls and bytes by (operation, shape).

    Bytes are those of the whole tensor: what is summed in an all-reduce, the joined result of an all-gather, the input of a
    reduce-scatter. Operations of autograd's backward are counted too where it runs inside.

    Attributes:
        calls: (operation, shape of the tensor) to number of calls.
        bytes: operation to bytes.
    """

    calls: Counter[tuple[str, tuple[int, ...]]] = field(default_factory=Counter)
    bytes: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        namespace, _, name = func.name().partition("::")
        name = name.split(".")[0]
        if namespace == "c10d" and name in _OPERATIONS:
            operation, position = _OPERATIONS[name]
            for tensor in _tensors(args[position]):
                self.calls[operation, tuple(tensor.shape)] += 1
                self.bytes[operation] += tensor.nbytes
        return func(*args, **(kwargs or {}))

    def num_calls(self, operation: str | None = None, *, at_least_elements: int = 0) -> int:
        """Calls of one operation, or of all, on tensors of at least so many elements."""
        return sum(
            count
            for (name, shape), count in self.calls.items()
            if operation in (None, name) and torch.Size(shape).numel() >= at_least_elements
        )


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, list | tuple):
        return [tensor for each in value for tensor in _tensors(each)]
    return []
