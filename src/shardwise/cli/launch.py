"""Starting ranks on this machine, and showing what the first one to fail has to say.

The ranks run the command that the user gave and find torchrun's environment: `shardwise train` inside of a torchrun is
the same program. The launcher is not torchrun's own, which waits half a minute for ranks to end after a failure,
whatever its shutdown_timeout says.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NoReturn

from shardwise.errors import RankError
from shardwise.failure import ERROR_FILE, Failure, record
from shardwise.job.gpu_defaults import set_gpu_defaults
from shardwise.ranks.process import ENDING, RankProcess, check_room, warm

__all__ = [
    "INTERRUPTED",
    "end_with_launcher",
    "exit_on_terminate",
    "is_rank",
    "launch",
    "leave",
    "local_rank",
    "prepare",
    "record_failures",
]

INTERRUPTED = 128 + signal.SIGINT
SECONDS_TO_SHUT_DOWN = 10
LAUNCHER_POLL_SECONDS = 1.0
RANKS_POLL_SECONDS = 0.1


def is_rank() -> bool:
    """Whether a launcher started this process as a rank."""
    return "WORLD_SIZE" in os.environ


def local_rank() -> int:
    """This process's number on its machine."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def prepare(num_ranks: int) -> None:
    """Sets what ranks of this machine find in the environment, and starts the process that they are forked from.

    Raises:
        ConfigError: the machine cannot hold so many ranks.
    """
    check_room(num_ranks)
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // num_ranks)))
    # Ranks of one machine meet on its loopback: a host name may not resolve, or resolve to a slow way out.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    set_gpu_defaults()
    warm("shardwise.cli.training")


def launch(
    arguments: Sequence[str],
    *,
    num_ranks: int,
    show_traceback: bool,
    max_restarts: int = 0,
    seconds_to_end: float = SECONDS_TO_SHUT_DOWN,
) -> int:
    """Runs `shardwise ARGUMENTS` on `num_ranks` ranks of this machine.

    Prints the error of the rank that failed first, once. When this returns, every rank has ended.

    Args:
        arguments: of the command.
        num_ranks: on this machine.
        show_traceback: also of errors that say all there is to say.
        max_restarts: how often all ranks are started again when one has failed.
        seconds_to_end: how long ranks may take to end after a signal, until they are killed.

    Returns:
        The exit code: 0, 1 after a failure, 128 + the signal's number after one.
    """
    prepare(num_ranks)
    for number in range(max_restarts + 1):
        code = _launch_once(arguments, num_ranks, show_traceback=show_traceback, seconds_to_end=seconds_to_end)
        if code != 1 or number == max_restarts:
            break
        print(f"starting the ranks again ({number + 1} of {max_restarts})", file=sys.stderr, flush=True)
    return code


def _launch_once(arguments: Sequence[str], num_ranks: int, *, show_traceback: bool, seconds_to_end: float) -> int:
    with tempfile.TemporaryDirectory(prefix="shardwise_") as directory:
        codes, ended_by = _run_ranks(arguments, num_ranks, Path(directory), seconds_to_end)
        if ended_by == signal.SIGINT:
            raise KeyboardInterrupt
        if ended_by is not None:
            print(f"ended by {ended_by.name}; nothing half-written was left behind", file=sys.stderr)
            return 128 + ended_by
        failed = {rank: code for rank, code in enumerate(codes) if code}
        if failed:
            print(_describe(failed, _read_failures(Path(directory)), show_traceback=show_traceback), file=sys.stderr)
        return int(bool(failed))


def _run_ranks(
    arguments: Sequence[str], num_ranks: int, directory: Path, seconds_to_end: float
) -> tuple[list[int], signal.Signals | None]:
    """Runs ranks until all have ended, or one has failed; returns their exit codes, and the signal that ended this."""
    import torch.distributed as dist

    # Kept here, so that ranks can still read what one of them wrote before it ended.
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    shared = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    shared |= {"WORLD_SIZE": str(num_ranks), "LOCAL_WORLD_SIZE": str(num_ranks)}
    ranks: list[RankProcess] = []
    ended_by = None
    with _signals_raised():
        try:
            for rank in range(num_ranks):
                variables = {"RANK": str(rank), "LOCAL_RANK": str(rank), ERROR_FILE: str(directory / str(rank))}
                environment = {**os.environ, **shared, **variables}
                ranks.append(RankProcess(_run_command, list(arguments), environment, output=(1, 2)))
            while None in (codes := [rank.exit_code for rank in ranks]) and not any(codes):
                time.sleep(RANKS_POLL_SECONDS)
        except _SignalledError as error:
            ended_by = error.number
        finally:
            if ended_by is None:
                _end(ranks, signal.SIGTERM)
            else:
                _end(ranks, ended_by, seconds=seconds_to_end)
    return [rank.exit_code or 0 for rank in ranks], ended_by


def _run_command(words: list[str], environment: dict[str, str]) -> NoReturn:
    """In a rank: what `shardwise WORDS` does in a process of its own."""
    from shardwise.cli.main import command  # which imports this module

    os.environ.clear()
    os.environ.update(environment)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.argv = ["shardwise", *words]
    command()


class _SignalledError(BaseException):
    def __init__(self, number: int) -> None:
        self.number = signal.Signals(number)


@contextmanager
def _signals_raised() -> Iterator[None]:
    """Has signals that would end this process raise instead; those that it ignores, as under nohup, stay ignored."""

    def end(number: int, frame: object) -> NoReturn:
        raise _SignalledError(number)

    former = {number: signal.getsignal(number) for number in (signal.SIGINT, *ENDING)}
    for number, handler in former.items():
        signal.signal(number, handler if handler == signal.SIG_IGN else end)
    try:
        yield
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)


def _end(ranks: Sequence[RankProcess], number: signal.Signals, *, seconds: float = SECONDS_TO_SHUT_DOWN) -> None:
    """Has ranks end by a signal, stopped ones too; by SIGKILL if that takes too long, or when a second signal comes."""
    _send(ranks, number)
    _send(ranks, signal.SIGCONT)
    deadline = time.monotonic() + seconds
    with suppress(_SignalledError):
        for rank in ranks:
            rank.wait(max(0.0, deadline - time.monotonic()))
    _send(ranks, signal.SIGKILL)
    for rank in ranks:
        rank.wait(SECONDS_TO_SHUT_DOWN)


def _send(ranks: Sequence[RankProcess], number: signal.Signals) -> None:
    """Sends a signal to the ranks that still run."""
    for rank in ranks:
        if rank.exit_code is None:
            rank.send(number)


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
    except Exception as error:  # recorded in full, and shown by the launcher
        if ERROR_FILE not in os.environ:
            raise
        record(error)
        leave(1)


class TerminatedError(RankError):
    """This rank was ended by a signal."""


def exit_on_terminate() -> None:
    """Makes signals of `ENDING` unwind this process, so that half-written files are removed; a second one ends it at
    once. What it ignores, as under nohup, stays ignored.
    """

    def end(number: int, frame: object) -> NoReturn:
        signal.signal(number, lambda number, frame: os._exit(128 + number))
        record(TerminatedError(f"rank {local_rank()} was ended by {signal.Signals(number).name}"))
        raise SystemExit(128 + number)

    for ending in ENDING:
        if signal.getsignal(ending) != signal.SIG_IGN:
            signal.signal(ending, end)


def end_with_launcher() -> None:
    """Has this rank end when its launcher has: one that is killed cannot end its ranks, which would train for ever.

    They unwind as at SIGTERM, and end on the spot if that takes too long.
    """
    launcher, parent = multiprocessing.parent_process(), os.getppid()  # of `launch`; torchrun or srun

    def watch() -> None:
        if launcher is not None:
            launcher.join()
        while launcher is None and os.getppid() == parent:
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


def _read_failures(directory: Path) -> dict[int, Failure]:
    """What ranks recorded, by rank."""
    return {
        int(path.name): Failure.from_json(json.loads(path.read_text(encoding="utf-8"))["failure"])
        for path in directory.iterdir()
        if path.name.isdigit()
    }


def _describe(failed: Mapping[int, int], reported: Mapping[int, Failure], *, show_traceback: bool) -> str:
    """The failure that came first, as the user should see it.

    Most failures follow from another: a rank that failed or was killed breaks the collectives of the others, and the
    launcher then ends the ranks that still run. So the earliest report counts, unless a rank ended without one and no
    report explains that.

    Args:
        failed: the exit codes of the ranks that failed, as `subprocess` gives them.
        reported: what ranks recorded.
    """
    is_explained = any(failure.name == RankError.__name__ for failure in reported.values())
    ended = (-signal.SIGTERM, 128 + signal.SIGTERM)
    silent = [rank for rank, code in failed.items() if rank not in reported and code not in ended]
    if (silent and not is_explained) or not reported:
        rank = min(silent or failed)
        code = failed[rank]
        number = -code if code < 0 else code - 128
        is_signal = number in (*ENDING, signal.SIGINT) or code < 0
        how = f"was ended by {signal.Signals(number).name}" if is_signal else f"exited with code {code}"
        hint = "\n  why: the machine may have run out of memory" if code == -signal.SIGKILL else ""
        return f"error: rank {rank} {how}{hint}"
    rank, first = min(reported.items(), key=lambda item: item[1].at_seconds)
    if not first.is_ours or show_traceback:
        return f"rank {rank} failed first:\n{first.trace.rstrip()}"
    return f"error: {first.message}"
