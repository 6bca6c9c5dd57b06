"""Starting ranks on this machine, and bringing home what the first one to fail has to say.

The ranks run the very command that the user gave, found again by torchrun's environment: `shardwise train` inside a
torchrun that somebody else started is the same program.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

from shardwise.errors import RankError
from shardwise.failure import Failure

__all__ = [
    "INTERRUPTED",
    "end_with_launcher",
    "exit_on_terminate",
    "is_rank",
    "launch",
    "leave",
    "local_rank",
    "record_failures",
]

INTERRUPTED = 128 + signal.SIGINT
SECONDS_TO_SHUT_DOWN = 10
LAUNCHER_POLL_SECONDS = 1.0
ERROR_FILE = "TORCHELASTIC_ERROR_FILE"


def is_rank() -> bool:
    """Whether a launcher started this process as a rank."""
    return "WORLD_SIZE" in os.environ


def local_rank() -> int:
    """This process's number on its machine."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def launch(arguments: Sequence[str], *, num_ranks: int, show_traceback: bool) -> int:
    """Runs `shardwise ARGUMENTS` on `num_ranks` ranks of this machine.

    Prints the error of the rank that failed first, once. When this returns, every rank has ended.

    Returns:
        The exit code: 0, 1 after a failure, 128 + the signal's number after one.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    # The agent tells of every failure and signal it passes on; the user gets one line from us instead.
    for name in list(logging.root.manager.loggerDict):  # each of its loggers sets a level of its own
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // num_ranks)))
    # Ranks of one machine meet on its loopback: a host name may not resolve, or resolve to a slow way out.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    logs = tempfile.TemporaryDirectory(prefix="shardwise_")  # the agent would leave a directory of its own after
    config = LaunchConfig(
        logs_specs=DefaultLogsSpecs(logs.name),
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=num_ranks,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        local_addr="localhost",
        max_restarts=0,
        shutdown_timeout=SECONDS_TO_SHUT_DOWN,
    )
    try:
        with logs:
            elastic_launch(config, sys.executable)("-m", "shardwise", *arguments)
    except ChildFailedError as error:
        print(_describe(error.failures, show_traceback=show_traceback), file=sys.stderr)
        return 1
    except SignalException as error:
        if error.sigval == signal.SIGINT:
            raise KeyboardInterrupt from None
        print(f"ended by {error.sigval.name}; nothing half-written was left behind", file=sys.stderr)
        return 128 + error.sigval
    return 0


@contextmanager
def record_failures() -> Iterator[None]:
    """In a rank, ends the process at a failure: without a word, and with what went wrong where the launcher looks.

    Where no launcher asked for a file, errors take their usual way.
    """
    try:
        yield
    except KeyboardInterrupt:
        leave(INTERRUPTED)
    except SystemExit as error:
        leave(error.code if isinstance(error.code, int) else 1)
    except Exception as error:  # recorded whole, and shown by the launcher
        if ERROR_FILE not in os.environ:
            raise
        _record(error)
        leave(1)


class TerminatedError(RankError):
    """This rank was ended by a signal."""


def exit_on_terminate() -> None:
    """Makes SIGTERM unwind this process, so that half-written files are removed; a second one ends it on the spot."""

    def end(number: int, frame: object) -> NoReturn:
        signal.signal(number, lambda number, frame: os._exit(128 + number))
        _record(TerminatedError(f"rank {local_rank()} was ended by {signal.Signals(number).name}"))
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, end)


def end_with_launcher() -> None:
    """Has this rank end when its launcher has: one that is killed cannot end its ranks, which would train for ever.

    They unwind as at SIGTERM, and end on the spot if that takes too long.
    """
    launcher = os.getppid()

    def watch() -> None:
        while os.getppid() == launcher:
            time.sleep(LAUNCHER_POLL_SECONDS)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(SECONDS_TO_SHUT_DOWN)
        os._exit(128 + signal.SIGTERM)

    threading.Thread(target=watch, daemon=True, name="shardwise-launcher").start()


def leave(code: int) -> NoReturn:
    """Ends this process now that its files are in order.

    A regular exit of a rank that failed would tear down communication that others are still in the middle of, and any
    regular exit takes the interpreter from under gloo's threads (see [Note: the last collective], mesh.py).
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _record(error: BaseException) -> None:
    """Notes an error where the launcher looks for it; without one, or when it has gone, nowhere."""
    if (path := os.environ.get(ERROR_FILE)) is None:
        return
    failure = Failure.of(error)
    # The part that torchrun itself reads and shows.
    extra = {"py_callstack": failure.trace, "timestamp": str(int(failure.at_seconds))}
    theirs = {"message": f"{failure.name}: {failure.message}", "extraInfo": extra}
    with suppress(OSError):
        Path(path).write_text(json.dumps({"message": theirs, "failure": failure.to_json()}), encoding="utf-8")


def _describe(failures: dict[int, Any], *, show_traceback: bool) -> str:
    """The failure that came first, as the user should see it.

    Most failures follow from another: a rank that failed or was killed breaks the collectives of the others, and the
    launcher itself ends by SIGTERM, and SIGKILL in the end, whoever still runs. So a rank's own report comes first,
    unless another rank could not even report, and nobody has found out why; the reports of ranks that were ended come
    last.
    """
    reported = {
        rank: Failure.from_json(failure.error_file_data["failure"])
        for rank, failure in failures.items()
        if "failure" in (failure.error_file_data or {})
    }
    own = {rank: failure for rank, failure in reported.items() if failure.name != TerminatedError.__name__}
    is_found = any(failure.name == RankError.__name__ for failure in own.values())
    ended = (-signal.SIGTERM, 128 + signal.SIGTERM)
    silent = [rank for rank, failure in failures.items() if rank not in reported and failure.exitcode not in ended]
    if (silent and not is_found) or not reported:
        rank = min(silent or failures)
        failure = failures[rank]
        has_exited = failure.exitcode >= 0
        how = f"exited with code {failure.exitcode}" if has_exited else f"was ended by {failure.signal_name()}"
        hint = "\n  why: the machine may have run out of memory" if failure.exitcode == -signal.SIGKILL else ""
        return f"error: rank {rank} {how}{hint}"
    rank, first = min((own or reported).items(), key=lambda item: item[1].at_seconds)
    if not first.is_ours or show_traceback:
        return f"rank {rank} failed first:\n{first.trace.rstrip()}"
    return f"error: {first.message}"
