"""Files that appear complete or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["atomic_file"]


@contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """Gives a hidden name next to `path` to write to, and renames it to `path` when the block ends well.

    What stood at `path` is replaced. An exception on the way, Ctrl-C included, removes what was written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial-{os.getpid()}")
    try:
        yield partial
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
