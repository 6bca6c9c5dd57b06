"""Ranks simulated by threads of one process: exact, without a process group, for deriving and checking splits.

Each thread runs one rank's copy of a model; a collective is an exchange of tensors at a barrier. gloo stays the judge;
this is what makes trying out a split cost milliseconds.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.errors import RankError

__all__ = ["LoneGroup", "SimulatedGroup", "run_ranks"]

Result = TypeVar("Result")


_Base: Any = dist.ProcessGroup  # its types say that every collective returns a work to wait for; here none is left


class SimulatedGroup(_Base):
    """One rank's handle on a group of threads: what `torch.distributed` calls on a process group, by exchanges.

    Attributes:
        num_exchanges: how many collectives this rank has taken part in.
    """

    group_name = ""  # functional collectives find a group by its name, and none of these

    def __init__(self, rank: int, size: int, shared: _Shared) -> None:
        super().__init__(rank, size)
        self.num_exchanges = 0
        self._shared = shared

    @classmethod
    def build(cls, size: int) -> list[SimulatedGroup]:
        """The handles of all ranks of a new group."""
        shared = _Shared(size)
        return [cls(rank, size, shared) for rank in range(size)]

    def exchange(self, x: Tensor) -> list[Tensor]:
        """Copies of every rank's `x`, in rank order. All ranks must call it."""
        shared = self._shared
        self.num_exchanges += 1
        shared.slots[self.rank()] = x.detach().clone()
        shared.wait()
        values = list(shared.slots)
        shared.wait()
        return values

    def subgroup(self, blocks: tuple[tuple[int, ...], ...]) -> SimulatedGroup | None:
        """This rank's handle on its block; None where it is alone in it. All ranks must call it."""
        block = next(block for block in blocks if self.rank() in block)
        with self._shared.lock:
            shared = self._shared.children.setdefault(block, _Shared(len(block)))
        return SimulatedGroup(block.index(self.rank()), len(block), shared) if len(block) > 1 else None

    def abort(self) -> None:
        """Releases everybody who waits, with an error."""
        self._shared.abort()

    def allreduce(self, tensors: list[Tensor], options: Any) -> None:
        """`dist.all_reduce`: the sum, or the largest of every element."""
        (x,) = tensors
        parts = torch.stack(self.exchange(x))
        x.detach().copy_(parts.amax(0) if options.reduceOp == dist.ReduceOp.MAX else parts.sum(0))

    def all_gather_single(self, joined: Tensor, x: Tensor, options: Any) -> None:
        """`dist.all_gather_single`."""
        joined.copy_(torch.cat(self.exchange(x)))

    def reduce_scatter_single(self, mine: Tensor, x: Tensor, options: Any) -> None:
        """`dist.reduce_scatter_single`."""
        mine.copy_(torch.stack(self.exchange(x)).sum(0).chunk(self.size())[self.rank()])

    def allgather(self, parts: list[list[Tensor]], tensors: list[Tensor], options: Any) -> None:
        """`dist.all_gather`."""
        for part, value in zip(parts[0], self.exchange(tensors[0]), strict=True):
            part.copy_(value)

    def gather(self, parts: list[list[Tensor]], tensors: list[Tensor], options: Any) -> None:
        """`dist.gather`."""
        values = self.exchange(tensors[0])
        for part, value in zip(parts[0] if self.rank() == options.rootRank else [], values, strict=False):
            part.copy_(value)

    _allgather_base = all_gather_single  # as torch called them up to 2.12
    _reduce_scatter_base = reduce_scatter_single


class LoneGroup(SimulatedGroup):
    """One rank's handle on a group whose other ranks are not there, and would all hold what it holds: for shapes."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size, _Shared(1))

    def exchange(self, x: Tensor) -> list[Tensor]:
        """As many copies of `x` as there are ranks."""
        self.num_exchanges += 1
        return [x.detach().clone() for _ in range(self.size())]

    def subgroup(self, blocks: tuple[tuple[int, ...], ...]) -> SimulatedGroup | None:
        """This rank's handle on its block."""
        block = next(block for block in blocks if self.rank() in block)
        return LoneGroup(block.index(self.rank()), len(block)) if len(block) > 1 else None


class _Shared:
    def __init__(self, size: int) -> None:
        self.slots: list[Any] = [None] * size  # a tensor each, between the two waits of an exchange
        self.lock = threading.Lock()
        self.children: dict[tuple[int, ...], _Shared] = {}
        self._barrier = threading.Barrier(size, timeout=60)

    def wait(self) -> None:
        try:
            self._barrier.wait()
        except threading.BrokenBarrierError:
            raise RankError("another simulated rank failed") from None

    def abort(self) -> None:
        self._barrier.abort()
        for child in self.children.values():
            child.abort()


def run_ranks(fn: Callable[[SimulatedGroup], Result], size: int) -> list[Result]:
    """Runs `fn` with the handle of each rank in a thread of its own and returns the results in rank order.

    Raises:
        Exception: what the first rank to fail raised.
    """
    groups = SimulatedGroup.build(size)
    results: list[Any] = [None] * size
    failures: list[tuple[int, BaseException]] = []

    def run(group: SimulatedGroup) -> None:
        try:
            results[group.rank()] = fn(group)
        except BaseException as error:  # noqa: BLE001 - raised in the calling thread
            failures.append((group.rank(), error))
            group.abort()

    threads = [threading.Thread(target=run, args=(group,), daemon=True) for group in groups]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        own = [error for _, error in failures if not isinstance(error, RankError)]
        raise own[0] if own else failures[0][1]
    return results
