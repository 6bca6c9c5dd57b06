"""The places that a run writes to: whether they can be made and written, and have room, before the first step."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from shardwise.errors import LoadError
from shardwise.weights.write import PretrainedWriter

__all__ = ["check_export", "check_place", "unexported"]


def check_place(directory: str) -> None:
    """Makes `directory` and writes a file in it; leaves nothing behind.

    Raises:
        LoadError: it cannot be made, or not be written to.
    """
    with _made(directory) as path:
        _write_probe(path)


def check_export(directory: str, *, num_bytes: int = 0) -> None:
    """Does what an export to `directory` will do, but for the weights, and measures the room for them.

    Raises:
        LoadError: it cannot be done, or there are fewer than `num_bytes` free.
    """
    with _made(str(Path(directory).parent)):
        writer = PretrainedWriter(directory, max_shard_bytes=1)
        try:
            _write_probe(writer.staging)
            free = shutil.disk_usage(writer.staging).free
        finally:
            writer.abort()
    if free < num_bytes:
        raise LoadError(
            f"no room for the export to {directory!r}",
            why=f"the model takes {num_bytes / 2**30:,.2f} GiB, and {free / 2**30:,.2f} GiB are free",
            fix="make room, or name a directory on another disk",
        )


def unexported(log_dir: str) -> Path:
    """Where weights are put that could not be exported."""
    return Path(log_dir) / "unexported"


@contextmanager
def _made(directory: str) -> Iterator[Path]:
    """Makes `directory`, and afterwards removes what was made and is still empty."""
    path = Path(directory)
    made: list[Path] = []
    try:
        for each in (*reversed(path.parents), path):
            if not each.is_dir():
                each.mkdir()
                made.append(each)
        yield path
    except (OSError, ValueError) as error:  # a ValueError: a NUL in the name
        if isinstance(error, LoadError):
            raise
        why = str(error) if isinstance(error, ValueError) else f"{error.strerror}: {str(error.filename)[:100]!r}"
        raise LoadError(
            f"cannot write to {directory[:100]!r}", why=why, fix="name a directory that can be made and written"
        ) from error
    finally:
        for each in reversed(made):
            with suppress(OSError):
                each.rmdir()


def _write_probe(directory: Path) -> None:
    with tempfile.TemporaryFile(dir=directory) as file:
        file.write(bytes(4096))
        file.flush()
        os.fsync(file.fileno())
