"""Main function of a rank of `spawn`."""

import faulthandler
import importlib
import importlib.util
import multiprocessing
import multiprocessing.forkserver
import multiprocessing.util
import os
import pickle
import random
import signal
import sys
import threading
import types
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from shardwise.errors import ConfigError
from shardwise.failure import Failure

PRELOADED = ("shardwise.ranks.preloaded",)
"""Modules that ranks find imported; also pytest where the caller has imported it, because test modules import it."""
ENDING = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
"""Signals that end a run besides Ctrl-C: a closed terminal's and those of schedulers. They are often sent to a whole
process group, so the fork server ignores them; it ends with its caller."""

_STARTING = threading.Lock()


def warm(*modules: str) -> None:
    """Starts the fork server without waiting for its imports; it also imports `modules`."""
    # Imports ask whether there is a card. Through CUDA's runtime this would leave forks unable to use it.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    pytest = [name for name in ("pytest",) if name in sys.modules]
    multiprocessing.forkserver.set_forkserver_preload([*pytest, *PRELOADED, *modules])
    multiprocessing.forkserver.ensure_running()


def local_variables(world_size: int, host: str, port: int) -> dict[str, str]:
    """Returns torchrun's environment variables for ranks on this machine, except `RANK` and `LOCAL_RANK`."""
    loopback = (
        "lo0" if sys.platform == "darwin" else "lo"
    )  # gloo would resolve the host's name, which may be slow or wrong
    return {
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": host,
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME") or loopback,
    }


class RankProcess:
    """Runs `target(*args)` in a new process and session. `output`: the file descriptors of its stdout and stderr."""

    def __init__(self, target: Callable[..., object], *args: object, output: tuple[int, int]) -> None:
        with Connection(os.dup(output[0])) as out, Connection(os.dup(output[1])) as err, _without_script():
            warm()
            context = multiprocessing.get_context("forkserver")
            self._process = context.Process(target=_begin, args=(target, args, out, err))
            self._process.start()

        pid = self._process.pid
        assert pid is not None, "it was started"
        self.pid, self.sentinel = pid, self._process.sentinel

    @property
    def exit_code(self) -> int | None:
        """The exit code; a negative signal number if a signal ended the process; None while it runs."""
        return self._process.exitcode

    def wait(self, seconds: float) -> int | None:
        """Waits at most `seconds` for the process to end; returns `exit_code`."""
        self._process.join(seconds)
        return self.exit_code

    def send(self, number: signal.Signals) -> None:
        """Sends a signal to the process and its children."""
        for kill in (os.killpg, os.kill) if self._process.is_alive() else (os.killpg,):
            with suppress(ProcessLookupError, PermissionError):  # macOS answers EPERM for a group of zombies
                kill(self.pid, number)
                return


def _begin(target: Callable[..., object], args: tuple[object, ...], out: Connection, err: Connection) -> None:
    os.setsid()  # so that its children end with it, and Ctrl-C in a terminal reaches the caller only
    for stream, number in ((out, 1), (err, 2)):
        os.dup2(stream.fileno(), number)
    target(*args)


@contextmanager
def _without_script() -> Iterator[None]:
    """Context manager: hides the caller's script from multiprocessing, which would run it in every rank."""
    with _STARTING:
        script = sys.modules["__main__"]
        sys.modules["__main__"] = types.ModuleType("__main__")
        try:
            yield
        finally:
            sys.modules["__main__"] = script


@dataclass(frozen=True, kw_only=True)
class Case:
    """A function call that every rank of one `spawn` runs.

    Attributes:
        env: the environment, except variables that differ between ranks.
        payload: pickled arguments, keyword arguments and warning filters, whose classes may be defined in the module.
        seconds: time after which a rank prints its stack.
    """

    module: str
    file: str | None
    qualname: str
    env: dict[str, str]
    payload: bytes
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Report:
    """Outcome of a rank's function: its pickled result, or a failure."""

    result: bytes = b""
    failure: Failure | None = None


def run_rank(rank: int, case: Case, caller: Connection) -> None:
    """Runs the function, reports to the caller, and waits until all ranks have reported."""
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    faulthandler.enable(2)
    faulthandler.dump_traceback_later(case.seconds, file=2)
    threading.Thread(target=_end_with_caller, daemon=True, name="shardwise-caller").start()
    report = _run(rank, case)
    faulthandler.cancel_dump_traceback_later()
    caller.send_bytes(pickle.dumps(report))
    if report.failure is None:
        caller.poll(None)  # rank 0 may host the store that others still use
        _destroy_process_group()
    _save_coverage()
    multiprocessing.util._run_finalizers(0)  # type: ignore[attr-defined]  # removes locks, such as a progress bar's
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _end_with_caller() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os.killpg(0, signal.SIGKILL)


def _run(rank: int, case: Case) -> Report:
    os.environ.clear()
    os.environ.update(case.env, RANK=str(rank), LOCAL_RANK=str(rank))
    if "COVERAGE_PROCESS_START" in os.environ:  # coverage's own convention for child processes
        importlib.import_module("coverage").process_startup()
    try:
        _seed(int(os.environ["OMP_NUM_THREADS"]))
        _importing.append(case.file or case.module)
        function: Any = _load_module(case.module, case.file)
        _importing.clear()
        for part in case.qualname.split("."):
            function = getattr(function, part)
        args, kwargs, filters = pickle.loads(case.payload)
        warnings.resetwarnings()
        warnings.filters.extend(filters)  # type: ignore[attr-defined]  # a list, whatever its type says
        return Report(result=pickle.dumps(function(*args, **kwargs)))
    except SystemExit:
        raise
    except BaseException as error:  # noqa: BLE001 - KeyboardInterrupt and pytest's outcomes travel like any other
        return Report(failure=Failure.of(error))


_importing: list[str] = []


def check_not_importing() -> None:
    """Raises `ConfigError` if this process is a rank that is still importing the module of its function."""
    if _importing:
        raise ConfigError(
            f"{_importing[0]} starts ranks while it is imported",
            why="ranks import it to find their function, and would start ranks in turn",
            fix='put what starts them under `if __name__ == "__main__":`',
        )


def _load_module(name: str, file: str | None) -> types.ModuleType:
    """Returns the caller's module: by name if that finds the same file, otherwise by file."""
    if name != "__main__" and (name in sys.modules or file is None or _is_importable_as(name, file)):
        return importlib.import_module(name)
    # A script gets another name, as in multiprocessing, so that its `if __name__ == "__main__"` block does not run.
    spec = importlib.util.spec_from_file_location("__mp_main__" if name == "__main__" else name, file)
    assert spec is not None and spec.loader is not None, f"{file} was imported by the caller"
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def _is_importable_as(name: str, file: str) -> bool:
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return False
    return spec is not None and spec.origin is not None and Path(spec.origin).resolve() == Path(file).resolve()


def _seed(num_threads: int) -> None:
    random.seed(0)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(0)
    if torch := sys.modules.get("torch"):
        torch.manual_seed(0)
        torch.set_num_threads(num_threads)


def _destroy_process_group() -> None:
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()


def _save_coverage() -> None:
    if (coverage := sys.modules.get("coverage")) and (current := coverage.Coverage.current()):
        current.stop()
        current.save()
