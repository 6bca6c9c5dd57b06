"""Run a function on N gloo ranks of this machine, from a test or a script; the first traceback wins.

```python
from shardwise.testing.spawn import spawn

def sum_of_ranks(start):
    with shardwise.Mesh.open("tp2") as mesh:
        ...
    return total

assert spawn(sum_of_ranks, 2, 10.0) == [11.0, 11.0]
```

Ranks are forks of one warm process that has torch, transformers and Shardwise imported, so a case costs a fraction of
a second. They import everything else fresh, inherit the caller's environment, directory, import path and warning
filters, and start from the same seeds. Needs `fork` and `waitid`: Linux, or macOS with Python 3.13 or newer.
"""

from __future__ import annotations

import os
import pickle
import random
import socket
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from shardwise.errors import ConfigError, RankError
from shardwise.failure import Failure
from shardwise.testing.pool import SINGLE_THREADED, Outcome, Pool, default_pool

__all__ = ["spawn"]

Result = TypeVar("Result")

# Below the range from which kernels take the ports of outgoing connections, so that none of those can be in the way.
PORTS = range(20000, 32000)
SHOWN_CHARS = 6000


def spawn(
    fn: Callable[..., Result],
    world_size: int,
    *args: object,
    timeout: float = 60.0,
    env: Mapping[str, str] | None = None,
    pool: Pool | None = None,
    **kwargs: object,
) -> list[Result]:
    """Run `fn(*args, **kwargs)` on `world_size` ranks and return their results in rank order.

    Each rank finds torchrun's variables (`RANK`, `LOCAL_RANK`, `WORLD_SIZE`, `LOCAL_WORLD_SIZE`, `MASTER_ADDR`,
    `MASTER_PORT`) and one thread (`OMP_NUM_THREADS`). `fn` joins the process group itself, through `Mesh.open`; a group
    it leaves open is taken down after all ranks have returned. What ranks print is passed on afterwards, or shown in
    the error.

    Args:
        fn: a module-level function; arguments and results travel by pickle, so tensors must be on the CPU.
        world_size: number of ranks.
        timeout: seconds until ranks that have not returned are killed.
        env: variables for the ranks, over the caller's. Too late for those that torch or transformers read when they
            are imported.
        pool: where ranks are forked; the process-wide warm pool by default.

    Raises:
        ConfigError: `fn` is not a module-level function, or `world_size` or `timeout` is not positive.
        RankError: a rank exited without a result, did not return in time, or raised something that cannot be pickled.
        Exception: whatever the first rank to fail raised, with a RankError as its `__cause__` that names the rank and
            shows the remote traceback and output. The other ranks are killed.
    """
    _check_request(fn, world_size, timeout)
    with tempfile.TemporaryDirectory(prefix="shardwise-ranks-") as name, _reserved_port() as port:
        case = _Case(fn, world_size, Path(name), timeout)
        case.write(args, kwargs, {**_rank_variables(world_size, port), **(env or {})})
        outcome = (pool or default_pool()).run(case.directory, world_size=world_size, timeout=timeout)
        case.check(outcome)
        return case.read_results()


def _check_request(fn: Callable[..., object], world_size: int, timeout: float) -> None:
    problems = []
    found: Any = sys.modules.get(getattr(fn, "__module__", None) or "")
    for part in getattr(fn, "__qualname__", "?").split("."):
        found = getattr(found, part, None)
    if found is not fn:
        problems.append(
            f"{fn!r} cannot be found again by its name: pass a function defined at the top level of a module"
        )
    if world_size < 1:
        problems.append(f"world_size is {world_size}, must be at least 1")
    if not timeout > 0:
        problems.append(f"timeout is {timeout} seconds, must be positive")
    if problems:
        raise ConfigError("cannot spawn ranks", why="; ".join(problems))


class _Case:
    """One call of spawn: the directory it exchanges with its ranks, and what stands in there afterwards."""

    def __init__(self, fn: Callable[..., object], world_size: int, directory: Path, timeout: float) -> None:
        self.fn = fn
        self.world_size = world_size
        self.directory = directory
        self.timeout = timeout
        self.place = f"{fn.__module__}.{fn.__qualname__}"

    def write(self, args: tuple[object, ...], kwargs: Mapping[str, object], env: Mapping[str, str]) -> None:
        case = {
            "module": self.fn.__module__,
            "file": getattr(sys.modules[self.fn.__module__], "__file__", None),
            "qualname": self.fn.__qualname__,
            "cwd": str(Path.cwd()),
            "sys_path": [entry or str(Path.cwd()) for entry in sys.path],
            "env": {**os.environ, **env},
            # Pickled on its own: its classes can only be found once the path above is in place.
            "payload": pickle.dumps((args, dict(kwargs), _warning_filters())),
        }
        (self.directory / "case.pkl").write_bytes(pickle.dumps(case))

    def check(self, outcome: Outcome) -> None:
        """Raise for the rank that failed first, if any did."""
        if outcome.outcome == "timeout":
            raise self._timeout_error(outcome)
        # A rank that vanished comes first: the exceptions of its peers (connection closed) follow from that.
        for rank, code in enumerate(outcome.exit_codes):
            if code != 0 and rank not in outcome.killed and not isinstance(self._report(rank), Failure):
                raise self._exit_error(rank, code)
        if outcome.outcome == "finished" and outcome.killed:
            rank = outcome.killed[0]
            raise RankError(
                f"rank {rank} of {self.world_size} returned but did not exit",
                at=self.place,
                why=f"seconds after every rank had returned it still took down its process group{self._log(rank)}",
            )
        failures = {rank: r for rank in range(self.world_size) if isinstance(r := self._report(rank), Failure)}
        if failures:
            self._raise_first(failures)

    def read_results(self) -> list[Any]:
        """Each rank's result in rank order; what ranks printed goes to standard output, marked with the rank."""
        for rank in range(self.world_size):
            for line in self._read(rank, "log").splitlines():
                print(f"[rank {rank}] {line}")
        reports = [self._report(rank) for rank in range(self.world_size)]
        return [pickle.loads(report) for report in reports if isinstance(report, bytes)]

    def _raise_first(self, failures: Mapping[int, Failure]) -> None:
        rank = min(failures, key=lambda r: failures[r].at_seconds)
        first = failures[rank]
        cause = RankError(
            f"rank {rank} of {self.world_size} raised {first.name}",
            at=self.place,
            why=f"its traceback:\n{first.trace.rstrip()}{self._log(rank)}",
        )
        error = first.restore()
        if error is None:
            raise cause
        raise error from cause

    def _exit_error(self, rank: int, code: int) -> RankError:
        how = f"was ended by signal {-code}" if code < 0 else f"exited with code {code}"
        when = "without a result" if self._report(rank) is None else "after it had returned its result"
        others = [r for r in range(self.world_size) if isinstance(self._report(r), Failure)]
        also = f"; rank(s) {', '.join(map(str, others))} raised, probably because of it" if others else ""
        why = f"the function or something it called ended the process{also}{self._log(rank)}"
        return RankError(f"rank {rank} of {self.world_size} {how} {when}", at=self.place, why=why)

    def _timeout_error(self, outcome: Outcome) -> RankError:
        unfinished = ", ".join(map(str, outcome.unfinished))
        finished = [str(rank) for rank in range(self.world_size) if rank not in outcome.unfinished]
        stacks = "".join(
            f"\nrank {rank} was here:\n{self._read(rank, 'stacks').rstrip()}{self._log(rank)}"
            for rank in outcome.unfinished
        )
        return RankError(
            f"rank(s) {unfinished} of {self.world_size} did not return within {self.timeout:g} seconds",
            at=self.place,
            why=f"rank(s) {', '.join(finished)} had returned{stacks}" if finished else f"no rank had returned{stacks}",
            fix="look for a collective that not every rank reaches, or raise timeout",
        )

    def _report(self, rank: int) -> bytes | Failure | None:
        """The pickled result or the failure that a rank reported, None where it did not."""
        path = self.directory / f"rank{rank}.report"
        return pickle.loads(path.read_bytes()) if path.exists() else None

    def _read(self, rank: int, kind: str) -> str:
        path = self.directory / f"rank{rank}.{kind}"
        text = path.read_text(errors="replace") if path.exists() else ""
        return text if len(text) <= SHOWN_CHARS else f"... {text[-SHOWN_CHARS:]}"

    def _log(self, rank: int) -> str:
        printed = self._read(rank, "log").rstrip()
        return f"\nrank {rank} printed:\n{printed}" if printed else ""


def _rank_variables(world_size: int, port: int) -> dict[str, str]:
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    return {
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": loopback,  # otherwise gloo resolves the host's name, which may be slow or lead elsewhere
        **SINGLE_THREADED,
    }


@contextmanager
def _reserved_port() -> Iterator[int]:
    """A free TCP port that no other caller of `spawn` on this machine gets meanwhile.

    Rank 0 will listen there, so we cannot hold the port itself. We hold the UDP port of the same number, and so does
    every other caller with its own.
    """
    ports = random.SystemRandom()  # not the seeded one: two suites on one machine would try the same ports
    while True:
        address = "127.0.0.1", ports.choice(PORTS)
        with socket.socket(type=socket.SOCK_DGRAM) as reservation:
            try:
                reservation.bind(address)
                with socket.socket() as probe:
                    probe.bind(address)
            except OSError:
                continue
            yield address[1]
            return


def _warning_filters() -> list[tuple[str, str, Any, str, int]]:
    def pattern(
        value: Any,
    ) -> str:  # compiled by warnings.filterwarnings, plain text in the interpreter's own first filters
        return getattr(value, "pattern", value) or ""

    return [
        (action, pattern(message), category, pattern(module), line)
        for action, message, category, module, line in warnings.filters
    ]
