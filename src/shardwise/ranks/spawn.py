"""Run a function on N gloo ranks of this machine, from a test or a script; the first traceback wins.

```python
from shardwise.ranks.spawn import spawn

def sum_of_ranks(start):
    with shardwise.Mesh.open("tp2") as mesh:
        ...
    return total

assert spawn(sum_of_ranks, 2, 10.0) == [11.0, 11.0]
```

Ranks are forked from a process that has imported torch, transformers and this package once. They import everything else
again, inherit the caller's environment, directory, import path and warning filters, and start from the same seeds.
"""

import multiprocessing
import multiprocessing.forkserver
import os
import pickle
import random
import signal
import socket
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing.connection import wait
from typing import TypeVar

from shardwise.errors import ConfigError, RankError
from shardwise.ranks.rank import Case, RankProcess, Report, check_not_importing, local_variables, run_rank

Result = TypeVar("Result")

PORTS = range(20000, 32000)  # below the ports that kernels use for outgoing connections
SHOWN_CHARS = 6000
STACK_SECONDS = 1.0  # how long ranks may take to print their stacks when the time is up
BLAME_SECONDS = 0.1  # how long to wait for further failures after the first one, which may be their consequence
TEARDOWN_SECONDS = 10.0


def spawn(
    fn: Callable[..., Result],
    world_size: int,
    *args: object,
    timeout: float = 60.0,
    env: Mapping[str, str] | None = None,
    **kwargs: object,
) -> list[Result]:
    """Runs `fn(*args, **kwargs)` on `world_size` ranks and returns their results in rank order.

    Each rank has torchrun's variables (`RANK`, `LOCAL_RANK`, `WORLD_SIZE`, `LOCAL_WORLD_SIZE`, `MASTER_ADDR`,
    `MASTER_PORT`), one thread (`OMP_NUM_THREADS`) and `SHARDWISE_DEVICE=cpu`, unless the caller sets another. `fn`
    joins the process group itself, through `Mesh.open`. A group that it leaves open is destroyed when all ranks have
    returned. The ranks' output is printed afterwards, or shown in the error.

    Args:
        fn: a module-level function. Arguments and results are pickled, so tensors must be on the CPU.
        timeout: seconds until ranks that have not returned are killed.
        env: additional environment variables of the ranks. Variables that torch reads at import have no effect.

    Raises:
        ConfigError: `fn` is not a module-level function, or a script calls `spawn` while it is imported, without `if
            __name__ == "__main__":`.
        RankError: a rank exited without a result, did not return in time, or raised an error that cannot be pickled.
        Exception: the error of the first rank to fail. Its `__cause__` is a RankError that names the rank and shows the
            remote traceback and output. The other ranks are killed.
    """
    check_not_importing()
    if "<" in fn.__qualname__:  # <lambda>, <locals>
        raise ConfigError(f"{fn!r} cannot be imported by ranks", fix="pass a function of the top level of a module")
    with _reserved_port() as port:
        case = Case(
            module=fn.__module__,
            file=getattr(sys.modules[fn.__module__], "__file__", None),
            qualname=fn.__qualname__,
            env={
                **os.environ,
                **local_variables(world_size, "127.0.0.1", port),
                "OMP_NUM_THREADS": "1",
                "SHARDWISE_DEVICE": os.environ.get("SHARDWISE_DEVICE") or "cpu",
                **(env or {}),
            },
            payload=pickle.dumps((args, kwargs, warnings.filters)),
            seconds=timeout,
        )
        ranks: list[_Rank] = []
        try:
            for number in range(world_size):
                ranks.append(_Rank(number, world_size, case))
            _await_reports(ranks, timeout + STACK_SECONDS)
            _raise_for(ranks, timeout)
            _release(ranks)
            for rank in ranks:
                for line in rank.printed().splitlines():
                    print(f"[rank {rank.number}] {line}")
        finally:
            for rank in ranks:
                rank.end()
        return [pickle.loads(rank.report.result) for rank in ranks if rank.report is not None]


class _Rank:
    """The caller's view of a rank.

    Attributes:
        is_gone: whether it ended without a report.
    """

    def __init__(self, number: int, world_size: int, case: Case) -> None:
        self.number = number
        self.name = f"rank {number} of {world_size}"
        self.place = f"{case.module}.{case.qualname}"
        self.report: Report | None = None
        self.is_gone = False
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 - closed in end
        self.connection, theirs = multiprocessing.Pipe()
        with theirs:
            output = self._output.fileno()
            self.process = RankProcess(run_rank, number, case, theirs, output=(output, output))

    def update(self) -> None:
        """Reads the report, or records that there will be none."""
        try:
            if self.connection.poll():
                self.report = pickle.loads(self.connection.recv_bytes())
            else:
                self.is_gone = self.process.exit_code is not None
        except (EOFError, OSError):
            self.is_gone = True

    def end(self) -> None:
        """Kills the rank and its children."""
        self.connection.close()
        self.process.send(signal.SIGKILL)
        self.process.wait(TEARDOWN_SECONDS)
        self._output.close()

    def printed(self) -> str:
        """Returns the end of its output."""
        self._output.seek(0)
        text = self._output.read().decode(errors="replace")
        return text if len(text) <= SHOWN_CHARS else f"... {text[-SHOWN_CHARS:]}"

    def shown(self, verb: str = "printed") -> str:
        """Returns its output as part of an error."""
        printed = self.printed().rstrip()
        return f"\nrank {self.number} {verb}:\n{printed}" if printed else ""


def _await_reports(ranks: Sequence[_Rank], seconds: float) -> None:
    """Waits until every rank has reported or is gone, one has failed, or the time is up."""
    deadline = time.monotonic() + seconds
    has_failed = False
    while waiting := [rank for rank in ranks if rank.report is None and not rank.is_gone]:
        sources = [source for rank in waiting for source in (rank.connection, rank.process.sentinel)]
        if not wait(sources, max(0.0, deadline - time.monotonic())):
            return
        for rank in waiting:
            rank.update()
        if not has_failed and any(rank.is_gone or (rank.report and rank.report.failure) for rank in waiting):
            has_failed = True
            deadline = min(deadline, time.monotonic() + BLAME_SECONDS)


def _raise_for(ranks: Sequence[_Rank], timeout: float) -> None:
    """Raises for the rank that failed first, or those that did not return."""
    gone = [rank for rank in ranks if rank.is_gone]
    if gone:  # first of all: the exceptions of its peers (connection closed) follow from that
        raise _exit_error(gone[0], "without a result")
    failed = [(rank, rank.report.failure) for rank in ranks if rank.report and rank.report.failure]
    if failed:
        rank, failure = min(failed, key=lambda item: item[1].at_seconds)
        cause = RankError(
            f"{rank.name} raised {failure.name}",
            at=rank.place,
            why=f"its traceback:\n{failure.trace.rstrip()}{rank.shown()}",
        )
        error = failure.restore()
        if error is None:
            raise cause
        raise error from cause
    missing = [rank for rank in ranks if rank.report is None]
    if missing:
        returned = ", ".join(str(rank.number) for rank in ranks if rank.report is not None)
        raise RankError(
            f"rank(s) {', '.join(str(rank.number) for rank in missing)} of {len(ranks)} did not return within"
            f" {timeout:g} seconds",
            at=missing[0].place,
            why=(f"rank(s) {returned} had returned" if returned else "no rank had returned")
            + "".join(rank.shown("printed, and was here at last") for rank in missing),
            fix="look for a collective that not every rank reaches, or raise timeout",
        )


def _release(ranks: Sequence[_Rank]) -> None:
    """Lets ranks that have all reported destroy their process groups, and checks that they exit."""
    for rank in ranks:
        rank.connection.close()
    for rank in ranks:
        if rank.process.wait(TEARDOWN_SECONDS) != 0:
            raise _exit_error(rank, "after it had returned its result")


def _exit_error(rank: _Rank, when: str) -> RankError:
    code = rank.process.wait(TEARDOWN_SECONDS)
    if code is None:
        how = "did not exit"
    else:
        how = f"was ended by signal {-code}" if code < 0 else f"exited with code {code}"
    return RankError(f"{rank.name} {how} {when}", at=rank.place, why=rank.shown().strip())


@contextmanager
def _reserved_port() -> Iterator[int]:
    """Context manager: a free TCP port for rank 0, reserved on this machine by the UDP port of the same number."""
    ports = random.SystemRandom()  # not seeded: two suites on one machine would try the same ports
    while True:
        address = "127.0.0.1", ports.choice(PORTS)
        with socket.socket(type=socket.SOCK_DGRAM) as reservation, socket.socket() as probe:
            try:
                reservation.bind(address)
                probe.bind(address)
            except OSError:
                continue
            probe.close()
            yield address[1]
            return
