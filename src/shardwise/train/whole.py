"""Files and directories that appear whole or not at all.

What is being written has a hidden name beside the final one and takes that name in a single rename at the end. An
exception on the way, Ctrl-C included, removes it.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["partial_name", "remove_partial", "whole_file"]


def partial_name(path: Path, tag: str | int) -> Path:
    """The hidden name under which `path` is written; `tag` keeps writers apart."""
    return path.with_name(f".{path.name}.partial-{tag}")


def remove_partial(partial: Path) -> None:
    """Removes what stands at a hidden name, file or directory, if anything does."""
    if partial.is_dir():
        shutil.rmtree(partial)
    else:
        partial.unlink(missing_ok=True)


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Gives the hidden name to write to; renames it to `path` when the block ends well, replacing what stood there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = partial_name(path, os.getpid())
    try:
        yield partial
        partial.replace(path)
    finally:
        remove_partial(partial)
