"""Ranks simulated by threads of one process: exact, without a process group, for deriving and checking splits.

Each thread runs one rank's copy of a model; a collective is an exchange of tensors at a barrier. gloo stays the judge;
this is what makes trying out a split cost milliseconds.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

from shardwise.errors import RankError

__all__ = ["SimulatedGroup", "run_ranks"]

Result = TypeVar("Result")


class SimulatedGroup:
    """One rank's handle on a group of threads.

    Attributes:
        rank: position in the group.
        size: number of ranks.
        num_exchanges: how many collectives this rank has taken part in.
    """

    def __init__(self, rank: int, size: int, shared: _Shared) -> None:
        self.rank = rank
        self.size = size
        self.num_exchanges = 0
        self._shared = shared

    @classmethod
    def build(cls, size: int) -> list[SimulatedGroup]:
        """The handles of all ranks of a new group."""
        shared = _Shared(size)
        return [cls(rank, size, shared) for rank in range(size)]

    def exchange(self, value: Any) -> list[Any]:
        """Every rank's value, in rank order. All ranks must call it."""
        shared = self._shared
        self.num_exchanges += 1
        shared.slots[self.rank] = value
        shared.wait()
        values = list(shared.slots)
        shared.wait()
        return values

    def subgroup(self, blocks: tuple[tuple[int, ...], ...]) -> SimulatedGroup | None:
        """This rank's handle on its block; None where it is alone in it. All ranks must call it."""
        block = next(block for block in blocks if self.rank in block)
        with self._shared.lock:
            shared = self._shared.children.setdefault(block, _Shared(len(block)))
        return SimulatedGroup(block.index(self.rank), len(block), shared) if len(block) > 1 else None

    def abort(self) -> None:
        """Releases everybody who waits, with an error."""
        self._shared.abort()


class _Shared:
    def __init__(self, size: int) -> None:
        self.slots: list[Any] = [None] * size
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
            results[group.rank] = fn(group)
        except BaseException as error:  # noqa: BLE001 - raised in the calling thread
            failures.append((group.rank, error))
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
