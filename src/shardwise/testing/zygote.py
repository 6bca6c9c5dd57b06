"""The warm process that ranks are forked from: run by path, standard library only, never imported by the package.

# [Note: why a zygote]

Importing torch and transformers takes seconds; a suite with hundreds of cases on 2-4 ranks cannot pay that for every
rank. So one process imports them once and every rank is a fork of it. Three rules make that sound:

- It holds no code under test. It is started by its path (not as `-m shardwise...`), so neither `shardwise` nor a test
  module is in it; every rank imports both fresh, as the caller would.
- It has a single thread when it forks: a lock held by another thread would stay locked in the fork for ever. Nothing
  is computed with torch before the fork (that would start its thread pool), and a preloaded module that starts a
  thread is refused.
- It ends with its client. It reads requests from standard input; end of file there, however it comes about, kills the
  ranks and ends it.

A case is a directory: `case.pkl` from the client, then `rank<N>.report`, `.log` and `.stacks` from every rank. Requests
and replies are one line of JSON each. The zygote itself never unpickles anything.
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import importlib
import importlib.util
import json
import os
import pickle
import random
import select
import shutil
import signal
import sys
import threading
import time
import traceback
import types
import warnings
from pathlib import Path
from typing import Any, NoReturn

POLL_SECONDS = 0.01
STACK_SECONDS = 2.0
TEARDOWN_SECONDS = 10.0
PR_SET_PDEATHSIG = 1


# What the zygote does


def serve(preload: list[str]) -> None:
    """Import `preload`, say so, then run one case for every request line until standard input ends."""
    # Ctrl-C belongs to the client: it closes our standard input, and that is what ends a case.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a preloaded module prints must not be read as a reply
    for name in preload:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    _reply(replies, {"ready": os.getpid(), "threads": _num_threads()})
    while line := _read_line():
        _reply(replies, Case(json.loads(line)).run())


def _reply(stream: Any, message: dict[str, object]) -> None:
    stream.write(json.dumps(message) + "\n")
    stream.flush()


def _read_line() -> bytes:
    """The next request from standard input, unbuffered so that `select` never misses what a buffer already holds."""
    line = b""
    while not line.endswith(b"\n"):
        chunk = os.read(0, 1 << 16)
        if not chunk:
            return b""
        line += chunk
    return line


def _num_threads() -> int:
    tasks = "/proc/self/task"
    return len(os.listdir(tasks)) if os.path.isdir(tasks) else threading.active_count()


class Case:
    """One function on `world_size` forked ranks, from the forks to the last reaped child."""

    def __init__(self, request: dict[str, Any]) -> None:
        self.directory = Path(request["directory"])
        self.world_size = int(request["world_size"])
        self.timeout = float(request["timeout"])
        self.running: dict[int, int] = {}  # rank -> pid
        self.exit_codes: dict[int, int] = {}
        self.killed: list[int] = []

    def run(self) -> dict[str, object]:
        """Fork, wait and clean up; return what became of every rank."""
        waiting, release = os.pipe()
        for rank in range(self.world_size):
            pid = os.fork()
            if pid == 0:
                os.close(release)
                run_rank(self.directory, rank, waiting, zygote=os.getppid())
            self.running[rank] = pid
        os.close(waiting)
        outcome = self._wait(time.monotonic() + self.timeout, for_exit=False)
        unfinished = [rank for rank in self.running if not self._reported(rank)]
        if outcome == "timeout":
            self._dump_stacks(unfinished)
        os.close(release)  # ranks that wait for the others now take down their process group and exit
        if outcome == "finished":
            outcome = self._wait(time.monotonic() + TEARDOWN_SECONDS, for_exit=True)
            unfinished = list(self.running)
        self._kill_all()
        codes = [self.exit_codes[rank] for rank in range(self.world_size)]
        return {"outcome": outcome, "exit_codes": codes, "killed": self.killed, "unfinished": unfinished}

    def _wait(self, deadline: float, *, for_exit: bool) -> str:
        """Block until "failed" (a rank exited badly), "finished" or "timeout"; exit when the client is gone."""
        while True:
            if select.select([0], [], [], POLL_SECONDS)[0]:  # a client writes only between cases: this is end of file
                self._kill_all()
                shutil.rmtree(self.directory, ignore_errors=True)  # a client that was killed cannot
                sys.exit(0)
            self._reap()
            if any(self.exit_codes.values()):
                return "failed"
            if not self.running or (not for_exit and all(map(self._reported, range(self.world_size)))):
                return "finished"
            if time.monotonic() > deadline:
                return "timeout"

    def _reported(self, rank: int) -> bool:
        return (self.directory / f"rank{rank}.report").exists()

    def _reap(self) -> None:
        for rank, pid in list(self.running.items()):
            # Look first and reap last: while the zombie stands, its pid and process group cannot be anyone else's.
            if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                self._finish(rank)

    def _finish(self, rank: int) -> None:
        pid = self.running.pop(rank)
        _kill_group(pid)
        self.exit_codes[rank] = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    def _kill_all(self) -> None:
        self._reap()
        self.killed += sorted(self.running)
        for pid in self.running.values():
            _kill_group(pid)
        for rank in list(self.running):
            self._finish(rank)

    def _dump_stacks(self, ranks: list[int]) -> None:
        for rank in ranks:
            os.kill(self.running[rank], signal.SIGUSR1)
        deadline = time.monotonic() + STACK_SECONDS
        files = [self.directory / f"rank{rank}.stacks" for rank in ranks]
        while time.monotonic() < deadline and not all(f.exists() and f.stat().st_size for f in files):
            time.sleep(POLL_SECONDS)
        time.sleep(5 * POLL_SECONDS)  # the dump is a handful of writes: let the last one land


def _kill_group(pid: int) -> None:
    """Kill a rank and what it started: it leads a process group of its own, unless it died too soon."""
    for kill in (os.killpg, os.kill):
        try:
            kill(pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):  # macOS answers EPERM for a group of zombies
            continue


# What a forked rank does


def run_rank(directory: Path, rank: int, waiting: int, zygote: int) -> NoReturn:
    """Run the case in this fork, report, wait for the other ranks and exit; never return to the zygote's code."""
    code = 1
    try:
        _become_rank(directory, rank, zygote)
        code = _run_case(directory, rank, waiting)
    except SystemExit as request:
        code = request.code if isinstance(request.code, int) else int(request.code is not None)
        if isinstance(request.code, str):
            print(request.code, file=sys.stderr)
    except BaseException:  # a fork must never unwind into the zygote's own frames, whatever happened
        traceback.print_exc()
    finally:
        _save_coverage()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _become_rank(directory: Path, rank: int, zygote: int) -> None:
    os.setpgid(0, 0)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != zygote:  # it died before the call above
            os._exit(1)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    log = os.open(directory / f"rank{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    faulthandler.enable(2)  # a segmentation fault leaves its stack in the log
    stacks = os.open(directory / f"rank{rank}.stacks", os.O_WRONLY | os.O_CREAT, 0o600)
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True, chain=False)


def _run_case(directory: Path, rank: int, waiting: int) -> int:
    """Run the function; write `rank<N>.report`: pickled, `result` or else `error`, `name`, `text` and `at_seconds`."""
    case = pickle.loads((directory / "case.pkl").read_bytes())
    os.environ.clear()
    os.environ.update(case["env"], RANK=str(rank), LOCAL_RANK=str(rank))
    os.chdir(case["cwd"])
    sys.path[:] = case["sys_path"]
    _start_coverage()
    try:
        _seed(int(os.environ["OMP_NUM_THREADS"]))
        function = load_function(case["module"], case["file"], case["qualname"])
        args, kwargs, filters = pickle.loads(case["payload"])
        _apply_warning_filters(filters)
        report = {"result": pickle.dumps(function(*args, **kwargs))}
    except SystemExit:
        raise
    except BaseException as error:  # KeyboardInterrupt and pytest's outcomes travel to the caller like any other
        _write(directory, rank, _describe(error))
        return 1
    _write(directory, rank, report)
    os.read(waiting, 1)  # rank 0 may host the store the others still use, and peers may still read what we sent
    _destroy_process_group()
    return 0


def _write(directory: Path, rank: int, report: dict[str, Any]) -> None:
    unfinished = directory / f"rank{rank}.part"
    unfinished.write_bytes(pickle.dumps(report))
    unfinished.replace(directory / f"rank{rank}.report")


def _describe(error: BaseException) -> dict[str, Any]:
    """The report of a failure: the exception pickled when it survives the trip, and always its text."""
    at_seconds = time.monotonic()
    text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    pickled: bytes | None
    try:
        pickled = pickle.dumps(error)
        if type(pickle.loads(pickled)) is not type(error):
            pickled = None
    except BaseException:  # a user's __reduce__ or __init__ may raise anything; the text still travels
        pickled = None
    return {"error": pickled, "name": type(error).__name__, "text": text, "at_seconds": at_seconds}


def load_function(module_name: str, file: str | None, qualname: str) -> Any:
    """Import the caller's module fresh (by name where that finds the same file, else by file); look the function up."""
    module = sys.modules.get(module_name) if module_name != "__main__" else None
    if module is None:
        module = _load_module(module_name, file)
    target: Any = module
    for part in qualname.split("."):
        target = getattr(target, part)
    return target


def _load_module(module_name: str, file: str | None) -> types.ModuleType:
    if file is None or (module_name != "__main__" and _is_importable_as(module_name, file)):
        return importlib.import_module(module_name)
    # A script's `if __name__ == "__main__"` block must not run again: it gets another name, as multiprocessing does it.
    name = "__rank_main__" if module_name == "__main__" else module_name
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None, f"{file} was imported by the caller"
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _is_importable_as(module_name: str, file: str) -> bool:
    try:
        spec = importlib.util.find_spec(module_name)
    except (ImportError, ValueError):
        return False
    return spec is not None and spec.origin is not None and os.path.realpath(spec.origin) == os.path.realpath(file)


def _apply_warning_filters(filters: list[tuple[Any, str, type[Warning], str, int]]) -> None:
    """Take over the caller's filters, first match first, so that "warnings are errors" holds in ranks too."""
    warnings.resetwarnings()
    for action, message, category, module, line in reversed(filters):
        warnings.filterwarnings(action, message, category, module, line)


def _seed(num_threads: int) -> None:
    random.seed(0)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(0)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)
        sys.modules["torch"].set_num_threads(num_threads)


def _destroy_process_group() -> None:
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()


def _start_coverage() -> None:
    if "COVERAGE_PROCESS_START" in os.environ:  # coverage's own convention for child processes
        importlib.import_module("coverage").process_startup()


def _save_coverage() -> None:
    if "coverage" in sys.modules and (current := sys.modules["coverage"].Coverage.current()):
        current.stop()
        current.save()


if __name__ == "__main__":
    here = os.path.dirname(os.path.realpath(__file__))
    sys.path[:] = [entry for entry in sys.path if os.path.realpath(entry or ".") != here]
    serve(sys.argv[1:])
