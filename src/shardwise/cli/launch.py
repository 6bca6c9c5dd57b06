"""Starting ranks on this machine, and bringing home what the first one to fail has to say.

The ranks run the very command that the user gave, found again by torchrun's environment: `shardwise train` inside a
torchrun that somebody else started is the same program.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import signal
import sys
import tempfile
import time
import traceback
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from shardwise.errors import ShardwiseError

__all__ = ["INTERRUPTED", "exit_on_terminate", "is_rank", "launch", "leave", "local_rank", "record_failures"]

INTERRUPTED = 128 + signal.SIGINT
SECONDS_TO_SHUT_DOWN = 10
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

    _silence_agent()
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // num_ranks)))
    # Ranks of one machine meet on its loopback: a host name may not resolve, or resolve to a slow way out.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    logs = tempfile.TemporaryDirectory(prefix="shardwise_")  # the agent would leave a directory of its own behind
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
    """In a rank that was launched, ends the process: without a word, and with what went wrong where the launcher looks.

    Where no launcher asked for a file, the code goes on and errors take their usual way.
    """
    path = os.environ.get(ERROR_FILE)
    try:
        yield
        if path is not None:
            atexit._run_exitfuncs()
            leave(0)
    except KeyboardInterrupt:
        leave(INTERRUPTED)
    except SystemExit as error:
        leave(error.code if isinstance(error.code, int) else 1)
    except Exception as error:  # recorded whole, and shown by the launcher
        if path is None:
            raise
        Path(path).write_text(json.dumps(_report(error)), encoding="utf-8")
        leave(1)


def exit_on_terminate() -> None:
    """Makes SIGTERM unwind this process, so that half-written files are removed, rather than end it on the spot."""

    def leave(number: int, frame: object) -> NoReturn:
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, leave)


def leave(code: int) -> NoReturn:
    """Ends this process now that its files are in order.

    A regular exit of a rank that failed would tear down communication that others are still in the middle of, and any
    regular exit takes the interpreter from under gloo's threads (see [Note: the last collective], mesh.py).
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _silence_agent() -> None:
    """The agent tells of every failure and signal it passes on; the user gets one line from us instead."""
    for name in list(logging.root.manager.loggerDict):  # each of its loggers sets a level of its own
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).setLevel(logging.CRITICAL)


def _report(error: Exception) -> dict[str, Any]:
    is_ours = isinstance(error, ShardwiseError)
    text = traceback.format_exc()
    return {
        # The part that torchrun itself reads and shows.
        "message": {
            "message": f"{type(error).__name__}: {error}",
            "extraInfo": {"py_callstack": text, "timestamp": str(int(time.time()))},
        },
        # torchrun's time counts whole seconds, in which the first failure has often taken the other ranks with it.
        "at_seconds": time.time(),
        "shown": str(error) if is_ours else text,
        "traceback": text,
        "is_ours": is_ours,
    }


def _describe(failures: dict[int, Any], *, show_traceback: bool) -> str:
    """The failure that came first, as the user should see it."""
    reported = {rank: f.error_file_data for rank, f in failures.items() if "at_seconds" in (f.error_file_data or {})}
    # A rank that could not even report was killed, and whatever others say follows from that; the launcher itself ends
    # the rest by SIGTERM.
    ended = (-signal.SIGTERM, 128 + signal.SIGTERM)
    silent = [rank for rank, failure in failures.items() if rank not in reported and failure.exitcode not in ended]
    if silent or not reported:
        rank = min(silent or failures)
        failure = failures[rank]
        how = (
            f"was ended by {failure.signal_name()}" if failure.exitcode < 0 else f"exited with code {failure.exitcode}"
        )
        hint = "\n  why: the machine may have run out of memory" if failure.exitcode == -signal.SIGKILL else ""
        return f"error: rank {rank} {how}{hint}"
    rank = min(reported, key=lambda rank: float(reported[rank]["at_seconds"]))
    first = reported[rank]
    if not first["is_ours"] or show_traceback:
        return f"rank {rank} failed first:\n{first['traceback'].rstrip()}"
    return f"error: {first['shown']}"
