"""Starts ranks on this machine, and prints the error of the first one that fails.

Each rank runs the user's command in torchrun's environment. torchrun's own launcher is not used because it waits half a
minute for the other ranks to end after a failure, whatever its shutdown_timeout says.
"""

import json
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

from shardwise.errors import RankError, ShardwiseError
from shardwise.failure import ERROR_FILE, Failure, record
from shardwise.job.environment import read_slurm_environment, set_gpu_defaults
from shardwise.ranks.rank import ENDING, RankProcess, local_variables, warm

INTERRUPTED = 128 + signal.SIGINT
SECONDS_TO_SHUT_DOWN = 10
LAUNCHER_POLL_SECONDS = 1.0
RANKS_POLL_SECONDS = 0.1


def is_rank() -> bool:
    """Returns whether a launcher started this process as a rank."""
    return "WORLD_SIZE" in os.environ


def local_rank() -> int:
    """Returns this process's number on its machine."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def prepare(num_ranks: int) -> None:
    """Divides the cores among the ranks, and starts the process that they are forked from."""
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // num_ranks)))
    warm("shardwise.cli.training")


def launch(
    arguments: Sequence[str],
    *,
    num_ranks: int,
    show_traceback: bool,
    max_restarts: int = 0,
    seconds_to_end: float = SECONDS_TO_SHUT_DOWN,
) -> int:
    """Runs `shardwise ARGUMENTS` on `num_ranks` ranks of this machine. When it returns, every rank has ended.

    Args:
        show_traceback: print the traceback even of a `ShardwiseError`.
        max_restarts: how often all ranks are restarted after a failure.
        seconds_to_end: how long ranks may take to end after a signal, before they are killed.

    Returns:
        The exit code: 0, 1 after a failure, 128 + the number of the signal that ended the run.
    """
    for attempt in range(max(0, max_restarts) + 1):
        if attempt:
            print(f"restarting the ranks ({attempt} of {max_restarts})", file=sys.stderr, flush=True)
        try:
            error = _launch_once(arguments, num_ranks, show_traceback=show_traceback, seconds_to_end=seconds_to_end)
        except SystemExit as end:  # from the handler of `exit_on_terminate`
            code = int(end.code or 0)
            name = signal.Signals(code - 128).name
            print(f"ended by {name}; no partly written files were left behind", file=sys.stderr)
            return code
        if error is None:
            return 0
        print(error, file=sys.stderr)
    return 1


def run_as_rank(body: Callable[[], None]) -> bool:
    """Runs `body` if a launcher has started this process as a rank; returns whether it has."""
    exit_on_terminate()
    read_slurm_environment()
    set_gpu_defaults()
    if not is_rank():
        return False
    end_with_launcher()
    with record_failures():
        body()
    return True


def run_ranks(words: Sequence[str], body: Callable[[], None], *, num_ranks: int, show_traceback: bool) -> int:
    """Runs `body` on every rank, which runs `shardwise WORDS`; on one rank, and under a launcher, in this process.

    Returns the exit code.
    """
    if run_as_rank(body):
        return 0
    if num_ranks > 1:
        prepare(num_ranks)
        return launch(words, num_ranks=num_ranks, show_traceback=show_traceback)
    body()
    return 0


def _launch_once(
    arguments: Sequence[str], num_ranks: int, *, show_traceback: bool, seconds_to_end: float
) -> str | None:
    """Runs ranks until all have ended or one has failed; returns the error to print, None after success."""
    import torch.distributed as dist

    # The launcher keeps the store, so that ranks can still read it after one of them has ended.
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    shared = {**os.environ, **local_variables(num_ranks, "localhost", store.port)}
    shared["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    ranks: list[RankProcess] = []
    with tempfile.TemporaryDirectory(prefix="shardwise_") as directory:
        try:
            for rank in range(num_ranks):
                own = {"RANK": str(rank), "LOCAL_RANK": str(rank), ERROR_FILE: str(Path(directory, str(rank)))}
                ranks.append(RankProcess(_run_command, list(arguments), {**shared, **own}, output=(1, 2)))
            while None in (codes := [rank.exit_code for rank in ranks]) and not any(codes):
                time.sleep(RANKS_POLL_SECONDS)
        except (KeyboardInterrupt, SystemExit) as end:
            number = int(end.code or 0) - 128 if isinstance(end, SystemExit) else signal.SIGINT
            _end(ranks, signal.Signals(number), seconds=seconds_to_end)
            raise
        finally:
            _end(ranks, signal.SIGTERM, seconds=SECONDS_TO_SHUT_DOWN)
        failed = {number: code for number, rank in enumerate(ranks) if (code := rank.exit_code)}
        return _describe(failed, _read_failures(Path(directory)), show_traceback=show_traceback) if failed else None


def _run_command(words: list[str], environment: dict[str, str]) -> NoReturn:
    """Runs `shardwise WORDS` in a rank."""
    from shardwise.cli.main import command  # which imports this module

    os.environ.clear()
    os.environ.update(environment)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.argv = ["shardwise", *words]
    command()


def _end(ranks: Sequence[RankProcess], number: signal.Signals, *, seconds: float) -> None:
    """Sends a signal to the ranks that still run, and kills them after `seconds` or at a second signal."""
    deadline = time.monotonic() + seconds
    running = [rank for rank in ranks if rank.exit_code is None]
    try:
        for rank in running:
            rank.send(number)
            rank.send(signal.SIGCONT)  # a stopped process would not notice
        for rank in running:
            rank.wait(max(0.0, deadline - time.monotonic()))
    finally:
        for rank in running:
            if rank.exit_code is None:
                rank.send(signal.SIGKILL)
                rank.wait(SECONDS_TO_SHUT_DOWN)


@contextmanager
def record_failures() -> Iterator[None]:
    """Ends this rank after an error, and records the error for the launcher, which prints it.

    If no launcher asked for a file, errors propagate.
    """
    try:
        yield
    except KeyboardInterrupt:
        leave(INTERRUPTED)
    except SystemExit as error:
        leave(error.code if isinstance(error.code, int) else 1)
    except Exception as error:
        if ERROR_FILE not in os.environ:
            raise
        record(error)
        if "TORCHELASTIC_RUN_ID" in os.environ:  # torchrun prints it only if it does not restart, nor lose its store
            print(f"error: {error}" if isinstance(error, ShardwiseError) else traceback.format_exc(), file=sys.stderr)
        leave(1)


class TerminatedError(RankError):
    """This rank was ended by a signal."""


def exit_on_terminate() -> None:
    """Makes the signals of `ENDING` raise SystemExit, a second one end at once; ignored ones stay ignored."""

    def end(number: int, frame: object) -> NoReturn:
        signal.signal(number, lambda number, frame: os._exit(128 + number))
        record(TerminatedError(f"rank {local_rank()} was ended by {signal.Signals(number).name}"))
        raise SystemExit(128 + number)

    for ending in ENDING:
        if signal.getsignal(ending) != signal.SIG_IGN:
            signal.signal(ending, end)


def end_with_launcher() -> None:
    """Ends this rank like SIGTERM when its launcher has ended, because a killed launcher cannot end its ranks."""
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
    """Ends this process without the interpreter's teardown, which would destroy process groups that other ranks still
    use, and which can abort gloo's threads (see [Note: the last collective], job/processes.py).
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _read_failures(directory: Path) -> dict[int, Failure]:
    """Returns the errors that ranks recorded, by rank."""
    return {
        int(path.name): Failure(**json.loads(path.read_text(encoding="utf-8"))["failure"])
        for path in directory.iterdir()
        if path.name.isdigit()
    }


def _describe(failed: Mapping[int, int], recorded: Mapping[int, Failure], *, show_traceback: bool) -> str:
    """Returns the error of the rank that failed first.

    Most errors follow from another one: a rank that fails breaks the collectives of the others, and the launcher then
    ends the rest. So the earliest recorded error counts, unless a rank ended without a record and no record explains
    that.

    Args:
        failed: exit codes of the ranks that failed; minus the signal's number after a signal.
        recorded: what ranks recorded.
    """
    is_explained = any(failure.name == RankError.__name__ for failure in recorded.values())
    ended = (-signal.SIGTERM, 128 + signal.SIGTERM)  # by `_end`
    silent = [rank for rank, code in failed.items() if rank not in recorded and code not in ended]
    if (silent and not is_explained) or not recorded:
        rank = min(silent or failed)
        code = failed[rank]
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
        hint = "\n  why: the machine may have run out of memory" if code == -signal.SIGKILL else ""
        return f"error: rank {rank} {how}{hint}"
    rank, first = min(recorded.items(), key=lambda item: item[1].at_seconds)
    if not first.is_ours or show_traceback:
        return f"rank {rank} failed first:\n{first.trace.rstrip()}"
    return f"error: {first.message}"
