"""Ranks simulated by threads of one process, without a process group, to derive and check splits.

Each thread runs one rank's copy of a model, with its own random streams. One thread runs at a time, until it waits in a
collective. So runs are deterministic, and ranks that would wait forever are detected at once. Trying a split costs
milliseconds. gloo remains the reference.
"""

import random
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import numpy
import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.errors import RankError

Result = TypeVar("Result")


_Base: Any = dist.ProcessGroup  # its types say that every collective returns a work to wait for; here none is left


class SimulatedGroup(_Base):
    """One rank's handle on a group of threads. Implements what `torch.distributed` calls on it.

    Attributes:
        num_exchanges: number of collectives this rank has taken part in.
    """

    group_name = ""  # functional collectives find a group by its name, and none of these

    def __init__(self, rank: int, size: int, shared: "_Shared", turns: "_Turns", thread: int) -> None:
        super().__init__(rank, size)
        self.num_exchanges = 0
        self._shared, self._turns, self._thread = shared, turns, thread

    @classmethod
    def build(cls, size: int) -> "list[SimulatedGroup]":
        """Handles of all ranks of a new group."""
        shared, turns = _Shared(size), _Turns(size)
        return [cls(rank, size, shared, turns, rank) for rank in range(size)]

    def exchange(self, x: Tensor) -> list[Tensor]:
        """Copies of every rank's `x`, in rank order. All ranks must call it."""
        shared, number = self._shared, self.num_exchanges
        self.num_exchanges += 1
        shared.slots[self.rank()] = x.detach().clone()
        shared.num_arrived += 1
        if shared.num_arrived == self.size():
            shared.values, shared.num_arrived, shared.num_done = list(shared.slots), 0, number + 1
        else:
            self._turns.wait(self._thread, lambda: shared.num_done > number)
        return list(shared.values)

    def subgroup(self, blocks: tuple[tuple[int, ...], ...]) -> "SimulatedGroup | None":
        """Returns this rank's handle on the subgroup of its block; None if it is alone in the block.

        All ranks of the group must call this. `blocks`: the group's rank numbers, each in one tuple, on all ranks.
        """
        block = next(block for block in blocks if self.rank() in block)
        if len(block) == 1:
            return None
        known = self._shared.handles.setdefault((self.rank(), block), [])
        if not known:
            shared = self._shared.children.setdefault(block, _Shared(len(block)))
            known.append(SimulatedGroup(block.index(self.rank()), len(block), shared, self._turns, self._thread))
        return known[0]

    def run(self, fn: "Callable[[SimulatedGroup], Result]") -> Result:
        """Calls `fn` with this handle, in the calling thread."""
        return self._turns.run(self._thread, lambda: fn(self))

    def allreduce(self, tensors: list[Tensor], options: Any) -> None:
        """Implements `dist.all_reduce` with SUM or MAX."""
        (x,) = tensors
        parts = torch.stack(self.exchange(x))
        x.detach().copy_(parts.amax(0) if options.reduceOp == dist.ReduceOp.MAX else parts.sum(0))

    def all_gather_single(self, out: Tensor, x: Tensor, options: Any) -> "_Done":
        """Implements `dist.all_gather_single`, also asynchronous."""
        out.copy_(torch.cat(self.exchange(x)))
        return _Done()

    def reduce_scatter_single(self, mine: Tensor, x: Tensor, options: Any) -> None:
        """Implements `dist.reduce_scatter_single`."""
        mine.copy_(torch.stack(self.exchange(x)).sum(0).chunk(self.size())[self.rank()])

    def allgather(self, parts: list[list[Tensor]], tensors: list[Tensor], options: Any) -> None:
        """Implements `dist.all_gather`."""
        for part, value in zip(parts[0], self.exchange(tensors[0]), strict=True):
            part.copy_(value)

    def broadcast(self, tensors: list[Tensor], options: Any) -> None:
        """Implements `dist.broadcast`."""
        (x,) = tensors
        x.copy_(self.exchange(x)[options.rootRank])

    _allgather_base = all_gather_single  # as torch called them up to 2.12
    _reduce_scatter_base = reduce_scatter_single


class LoneGroup(SimulatedGroup):
    """One rank's handle on a group whose other ranks do not run, as if all held equal tensors; for shapes."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size, _Shared(1), _Turns(1), 0)

    def exchange(self, x: Tensor) -> list[Tensor]:
        """Returns one copy of `x` for each rank of the group, in place of what the ranks would send."""
        self.num_exchanges += 1
        return [x.detach().clone() for _ in range(self.size())]

    def subgroup(self, blocks: tuple[tuple[int, ...], ...]) -> SimulatedGroup | None:
        """Returns this rank's handle on the subgroup of its block."""
        block = next(block for block in blocks if self.rank() in block)
        return LoneGroup(block.index(self.rank()), len(block)) if len(block) > 1 else None


class _Done:
    def wait(self) -> None:
        """Nothing: it is done already."""

    def is_completed(self) -> bool:
        """True."""
        return True


class _Shared:
    """State that the handles on one group share: inputs of the running exchange and results of the last."""

    def __init__(self, size: int) -> None:
        self.slots: list[Any] = [None] * size
        self.values: list[Any] = []
        self.num_arrived = self.num_done = 0
        self.children: dict[tuple[int, ...], _Shared] = {}
        self.handles: dict[tuple[int, tuple[int, ...]], list[SimulatedGroup]] = {}


class _Turns:
    """Scheduler that runs one thread at a time, each with its own random states."""

    def __init__(self, size: int) -> None:
        self._changed = threading.Condition()
        self._running = 0
        self._is_ready: list[Callable[[], bool] | None] = [lambda: True] * size  # None of a thread that has ended
        self._states = [_random_states()] * size
        self._is_broken = False

    def run(self, thread: int, work: Callable[[], Result]) -> Result:
        """Runs a thread's work in its turns."""
        self._take_turn(thread)
        try:
            found = work()
        except BaseException:
            with self._changed:
                self._is_broken = True
                self._changed.notify_all()
            raise
        self._pass_on(thread, None)
        return found

    def wait(self, thread: int, is_over: Callable[[], bool]) -> None:
        """Lets other threads run until `is_over` returns true."""
        self._pass_on(thread, is_over)
        self._take_turn(thread)

    def _take_turn(self, thread: int) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._running == thread or self._is_broken)
            if self._is_broken:
                raise RankError("another simulated rank failed, or never comes to this collective")
            self._is_ready[thread] = lambda: True
        _set_random_states(self._states[thread])

    def _pass_on(self, thread: int, is_over: Callable[[], bool] | None) -> None:
        self._states[thread] = _random_states()
        with self._changed:
            self._is_ready[thread] = is_over
            others = (*range(thread + 1, len(self._is_ready)), *range(thread + 1))
            ready = [each for each in others if (is_ready := self._is_ready[each]) is not None and is_ready()]
            if ready:
                self._running = ready[0]
            else:
                self._is_broken = any(is_ready is not None for is_ready in self._is_ready)
            self._changed.notify_all()


def _random_states() -> tuple[Any, ...]:
    return torch.get_rng_state(), numpy.random.get_state(), random.getstate()


def _set_random_states(states: tuple[Any, ...]) -> None:
    torch.set_rng_state(states[0])
    numpy.random.set_state(states[1])
    random.setstate(states[2])


def run_ranks(fn: Callable[[SimulatedGroup], Result], size: int) -> list[Result]:
    """Runs `fn` once per simulated rank, each in its own thread, and returns the results in rank order.

    All ranks start from the caller's random states, which are restored.
    """
    groups, states = SimulatedGroup.build(size), _random_states()
    results: list[Any] = [None] * size
    failures: list[tuple[int, BaseException]] = []

    def run(group: SimulatedGroup) -> None:
        try:
            results[group.rank()] = group.run(fn)
        except BaseException as error:  # noqa: BLE001 - raised in the calling thread
            failures.append((group.rank(), error))

    threads = [threading.Thread(target=run, args=(group,), daemon=True) for group in groups]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    _set_random_states(states)
    if failures:
        own = [error for _, error in failures if not isinstance(error, RankError)]
        raise own[0] if own else failures[0][1]
    return results
