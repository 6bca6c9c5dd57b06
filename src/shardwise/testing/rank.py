"""What a forked rank does: becomes a process of its own, runs the case, reports, and waits for the others to end."""

from __future__ import annotations

import ctypes
import faulthandler
import importlib
import importlib.util
import os
import pickle
import random
import signal
import sys
import traceback
import types
import warnings
from pathlib import Path
from typing import Any, NoReturn

from shardwise.failure import Failure

__all__ = ["run_rank"]

PR_SET_PDEATHSIG = 1


def run_rank(directory: Path, rank: int, waiting: int, server: int) -> NoReturn:
    """Run the case in this fork, report, wait for the other ranks and exit; never return to the server's code."""
    code = 1
    try:
        _become_rank(directory, rank, server)
        code = _run_case(directory, rank, waiting)
    except SystemExit as request:
        code = request.code if isinstance(request.code, int) else int(request.code is not None)
        if isinstance(request.code, str):
            print(request.code, file=sys.stderr)
    except BaseException:  # a fork must never unwind into the server's own frames, whatever happened
        traceback.print_exc()
    finally:
        _save_coverage()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _become_rank(directory: Path, rank: int, server: int) -> None:
    os.setpgid(0, 0)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != server:  # it died before the call above
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
    """Run the function; write `rank<N>.report`: pickled, the pickled result or else a `Failure`."""
    case = pickle.loads((directory / "case.pkl").read_bytes())
    os.environ.clear()
    os.environ.update(case["env"], RANK=str(rank), LOCAL_RANK=str(rank))
    os.chdir(case["cwd"])
    sys.path[:] = case["sys_path"]
    _start_coverage()
    try:
        _seed(int(os.environ["OMP_NUM_THREADS"]))
        function = _load_function(case["module"], case["file"], case["qualname"])
        args, kwargs, filters = pickle.loads(case["payload"])
        _apply_warning_filters(filters)
        report: bytes | Failure = pickle.dumps(function(*args, **kwargs))
    except SystemExit:
        raise
    except BaseException as error:  # KeyboardInterrupt and pytest's outcomes travel to the caller like any other
        _write(directory, rank, Failure.of(error))
        return 1
    _write(directory, rank, report)
    os.read(waiting, 1)  # rank 0 may host the store the others still use, and peers may still read what we sent
    _destroy_process_group()
    return 0


def _write(directory: Path, rank: int, report: bytes | Failure) -> None:
    unfinished = directory / f"rank{rank}.part"
    unfinished.write_bytes(pickle.dumps(report))
    unfinished.replace(directory / f"rank{rank}.report")


def _load_function(module_name: str, file: str | None, qualname: str) -> Any:
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
