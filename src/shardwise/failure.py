"""An exception on its way to another process: a rank's to the other ranks, to its launcher, or to a test."""

from __future__ import annotations

import json
import os
import pickle
import time
import traceback
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from shardwise.errors import ShardwiseError

__all__ = ["ERROR_FILE", "Failure", "record"]

ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
"""Environment variable with the file in which torchrun, and our launcher, look for the error of a rank."""


@dataclass(frozen=True, kw_only=True)
class Failure:
    """What is left of an exception when it has travelled.

    Attributes:
        trace: its traceback as text, the exception included.
        is_ours: whether it is a `ShardwiseError`, whose message says all there is to say.
        at_seconds: when it was noted, in seconds of the clock.
        pickled: the exception itself, None where it does not survive that.
    """

    name: str
    message: str
    trace: str
    is_ours: bool
    at_seconds: float
    pickled: bytes | None = None

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        """What can be said of `error` elsewhere."""
        return cls(
            name=type(error).__name__,
            message=str(error),
            trace="".join(traceback.format_exception(type(error), error, error.__traceback__)),
            is_ours=isinstance(error, ShardwiseError),
            at_seconds=time.time(),
            pickled=_pickled(error),
        )

    def restore(self) -> BaseException | None:
        """The exception, as it can be raised here; None where it cannot."""
        try:
            error = pickle.loads(self.pickled) if self.pickled is not None else None
        except Exception:  # noqa: BLE001 - a user's class may exist in the other process only, or fail in any way
            return None
        return error if isinstance(error, BaseException) else None

    def to_json(self) -> str:
        """As text; without the exception itself."""
        return json.dumps({name: value for name, value in asdict(self).items() if name != "pickled"})

    @classmethod
    def from_json(cls, text: str) -> Failure:
        """What `to_json` wrote."""
        return cls(**json.loads(text))


def _pickled(error: BaseException) -> bytes | None:
    try:
        pickled = pickle.dumps(error)
        return pickled if type(pickle.loads(pickled)) is type(error) else None
    except Exception:  # noqa: BLE001 - a user's __reduce__ or __init__ may raise anything; the text still travels
        return None


def record(error: BaseException) -> None:
    """Writes an error where the launcher looks for it; without a launcher, or when its directory has gone, nowhere.

    torchrun shows it last: of a `ShardwiseError` the message alone, of others the traceback. The first error of a rank
    stays. It is there whole or not at all, whatever ends the rank.
    """
    if (name := os.environ.get(ERROR_FILE)) is None or (path := Path(name)).exists():
        return
    failure = Failure.of(error)
    shown = f"error: {failure.message}" if failure.is_ours else failure.trace
    extra = {"py_callstack": shown, "timestamp": str(int(failure.at_seconds))}
    theirs = {"message": f"{failure.name}: {failure.message}", "extraInfo": extra}
    partial = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        partial.write_text(json.dumps({"message": theirs, "failure": failure.to_json()}), encoding="utf-8")
        partial.replace(path)
    except OSError:
        with suppress(OSError):
            partial.unlink()
