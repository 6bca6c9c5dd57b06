"""Counts communication as operations of torch.distributed. Counts are exact and the same on every backend."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from shardwise.errors import sized

# Operation to (what it is called here, which argument holds the tensors that say its size). Plain tensors are
# communicated by c10d operations, DTensors by the functional ones, which do not pass through the former on their way.
_OPERATIONS = {
    "c10d::allreduce_": ("all_reduce", 0),
    "c10d::_allgather_base_": ("all_gather", 0),
    "c10d::allgather_": ("all_gather", 0),
    "c10d::_reduce_scatter_base_": ("reduce_scatter", 1),
    "c10d::reduce_scatter_": ("reduce_scatter", 1),
    "c10d::broadcast_": ("broadcast", 0),
    "c10d::send": ("send", 0),
    "c10d::recv_": ("receive", 0),
    "c10d::gather_": ("gather", 1),
    "c10d::alltoall_base_": ("all_to_all", 0),
    "c10d::allreduce_coalesced_": ("all_reduce", 0),
    "_c10d_functional::all_reduce": ("all_reduce", 0),
    "_c10d_functional::all_reduce_": ("all_reduce", 0),
    "_c10d_functional::all_reduce_coalesced": ("all_reduce", 0),
    "_c10d_functional::all_gather_into_tensor": ("all_gather", 0),
    "_c10d_functional::reduce_scatter_tensor": ("reduce_scatter", 0),
    "_c10d_functional::all_to_all_single": ("all_to_all", 0),
    "_c10d_functional::broadcast": ("broadcast", 0),
}
_LOCAL_INPUT = "_c10d_functional::all_gather_into_tensor"  # its result is as many times larger as it has ranks


@dataclass(frozen=True)
class Traffic:
    """Calls and bytes by kind of operation; `str` gives both in words."""

    calls: Counter[str] = field(default_factory=Counter)
    bytes: Counter[str] = field(default_factory=Counter)

    def __sub__(self, other: "Traffic") -> "Traffic":
        return Traffic(self.calls - other.calls, self.bytes - other.bytes)

    def extrapolate(self, longer: "Traffic", times: int) -> "Traffic":
        """Returns this traffic and `times` what `longer` has more."""
        grown = [(self.calls, longer.calls), (self.bytes, longer.bytes)]
        return Traffic(*(Counter({key: a[key] + times * (b[key] - a[key]) for key in a | b}) for a, b in grown))

    def __str__(self) -> str:
        parts = []
        for operation, count in sorted(self.calls.items()):
            noun = operation.replace("_", "-") + ("s" if count > 1 else "")
            parts.append(f"{count} {noun} ({sized(self.bytes[operation])})")
        return ", ".join(parts) or "nothing"


@dataclass
class CommunicationCount(TorchDispatchMode):
    """Context manager that counts this rank's collectives, sends and receives: calls by (operation, shape), and bytes.

    Bytes are those of the full tensor: the input of an all-reduce, the result of an all-gather, the input of a
    reduce-scatter, the tensor sent or received. Operations of a backward inside are counted too.

    Attributes:
        group: the process group whose collectives count; None: all groups.
        calls: number of calls by (operation, shape of the tensor).
        bytes: number of bytes by operation.
    """

    group: dist.ProcessGroup | None = None
    calls: Counter[tuple[str, tuple[int, ...]]] = field(default_factory=Counter)
    bytes: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if types and any(issubclass(each, DTensor) for each in types):
            return NotImplemented  # DTensor takes the operation apart; what it communicates comes back here
        name = func.name().split(".")[0]
        if name in _OPERATIONS and self._is_counted(args):
            operation, position = _OPERATIONS[name]
            ranks = args[1] if name == _LOCAL_INPUT else 1
            for tensor in _tensors(args[position]):
                shape = (tensor.shape[0] * ranks, *tensor.shape[1:]) if ranks > 1 else tuple(tensor.shape)
                self.calls[operation, shape] += 1
                self.bytes[operation] += tensor.nbytes * ranks
        return func(*args, **(kwargs or {}))

    def _is_counted(self, args: Any) -> bool:
        """Returns whether an operation belongs to `group`. c10d operations take the group, functional ones its name."""
        if self.group is None:
            return True
        objects = (value for value in args if isinstance(value, torch.ScriptObject))
        groups = (value for value in objects if "ProcessGroup" in str(value._type()))
        given = [dist.ProcessGroup.unbox(value).group_name for value in groups]
        named = [value for value in args if isinstance(value, str)]
        return self.group.group_name in (*given, *named)

    def traffic(self) -> Traffic:
        """Calls and bytes counted so far."""
        calls: Counter[str] = Counter()
        for (operation, _), count in self.calls.items():
            calls[operation] += count
        return Traffic(calls, Counter(self.bytes))

    def num_calls(self, operation: str | None = None, *, at_least_elements: int = 0) -> int:
        """Returns the number of calls of `operation` (default: any) on at least `at_least_elements` elements."""
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
