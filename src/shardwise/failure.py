"""An exception sent to another process: to other ranks, to the launcher, or to a test."""

import json
import os
import pickle
import sys
import time
import traceback
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import TracebackType

from shardwise.errors import ShardwiseError

ERROR_FILE = "TORCHELASTIC_ERROR_FILE"  # from which torchrun and our launcher read a rank's error


@dataclass(frozen=True, kw_only=True)
class Failure:
    """An exception as text, and pickled if possible.

    Attributes:
        is_ours: whether it is a `ShardwiseError`, whose message needs no traceback.
        at_seconds: time at which it was caught, in seconds since the epoch.
    """

    name: str
    message: str
    trace: str
    is_ours: bool
    at_seconds: float
    pickled: bytes | None = None

    @classmethod
    def of(cls, error: BaseException) -> "Failure":
        """Describes `error`."""
        return cls(
            name=type(error).__name__,
            message=str(error),
            trace="".join(traceback.format_exception(type(error), error, error.__traceback__)),
            is_ours=isinstance(error, ShardwiseError),
            at_seconds=time.time(),
            pickled=_pickled(error),
        )

    def restore(self) -> BaseException | None:
        """Returns the pickled exception; None if it cannot be unpickled in this process."""
        try:
            error = pickle.loads(self.pickled) if self.pickled is not None else None
        except Exception:  # noqa: BLE001 - a user's class may exist in the other process only, or fail in any way
            return None
        return error if isinstance(error, BaseException) else None


def _pickled(error: BaseException) -> bytes | None:
    try:
        pickled = pickle.dumps(error)
        return pickled if type(pickle.loads(pickled)) is type(error) else None
    except Exception:  # noqa: BLE001 - a user's __reduce__ or __init__ may raise anything; the text still travels
        return None


def record(error: BaseException) -> None:
    """Writes this rank's first error to the launcher's error file, if there is one, atomically. Ignores write errors.

    torchrun prints the message of a `ShardwiseError`, and the traceback of other errors.
    """
    if (name := os.environ.get(ERROR_FILE)) is None or (path := Path(name)).exists():
        return
    failure = replace(Failure.of(error), pickled=None)
    shown = f"error: {failure.message}" if failure.is_ours else failure.trace
    extra = {"py_callstack": shown, "timestamp": str(int(failure.at_seconds))}
    theirs = {"message": f"{failure.name}: {failure.message}", "extraInfo": extra}
    partial = path.with_name(f"{path.name}.{os.getpid()}")
    with suppress(OSError):
        partial.write_text(json.dumps({"message": theirs, "failure": asdict(failure)}), encoding="utf-8")
        partial.replace(path)


def leave_errors_to_launcher() -> None:
    """Under torchrun, lets its summary show an uncaught `ShardwiseError`, in place of a traceback from every rank.

    Sets `sys.excepthook`. SHARDWISE_TRACEBACK=1 keeps the tracebacks.
    """
    keeps = os.environ.get("SHARDWISE_TRACEBACK") or sys.excepthook is not sys.__excepthook__
    if keeps or ERROR_FILE not in os.environ:
        return

    def show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if isinstance(error, ShardwiseError):
            record(error)
            if Path(os.environ[ERROR_FILE]).exists():
                return
        sys.__excepthook__(kind, error, trace)

    sys.excepthook = show
