"""Process of a rank, forked from a server that has imported torch, transformers and this package once."""

import multiprocessing
import multiprocessing.forkserver
import os
import signal
import sys
import threading
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection

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
    """Torchrun's environment variables for ranks on this machine, except `RANK` and `LOCAL_RANK`."""
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
