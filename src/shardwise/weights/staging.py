"""Files and directories that appear complete or not at all.

# [Note: replacing a directory]
A new directory is written under a hidden name next to its target, flushed to disk and renamed. An existing target is
first renamed to `.NAME.replaced`. After a crash between the two renames, the old directory is found
there, complete.
"""

import os
import re
import shutil
import uuid
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from shardwise.errors import LoadError, as_error

_LEFTOVER = re.compile(r"\.(?P<name>.+)\.[0-9a-f]{32}\.partial")
_ASIDE = re.compile(r"\.(?P<name>.+)\.replaced")


def is_url(path: str | os.PathLike[str]) -> bool:
    """Returns whether `path` is a URL, of which pathlib would make directories `s3:` and `bucket`."""
    return re.match(r"[A-Za-z][A-Za-z0-9+.-]+:/", str(path)) is not None


def disk_errors(summary: str, *, fix: str | None = None) -> AbstractContextManager[None]:
    """Context manager: converts an `OSError` to `LoadError(summary)`."""
    return as_error(LoadError, summary, OSError, fix=fix)


@contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """Context manager: gives a hidden name next to `path`; after the block, flushes the file and renames it to `path`.

    Replaces an existing file. An exception in the block, Ctrl-C included, removes the new file.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial-{uuid.uuid4().hex}")  # processes of two machines have one id
    try:
        yield partial
        flush_path(partial)
        partial.replace(path)
        flush_path(path.parent)
    finally:
        partial.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Writes a text file atomically; see `atomic_file`."""
    with atomic_file(path) as partial:
        partial.write_text(text, encoding="utf-8")


class StagedDirectory:
    """A directory being written: files go to `path`, and `commit` renames it to `target`.

    Attributes:
        target: final place of the directory. An existing directory there is replaced.
        path: temporary place, under a name that `leftovers` finds.
    """

    def __init__(self, target: Path) -> None:
        self.target = target.resolve()
        self.path = self.target.with_name(f".{self.target.name}.{uuid.uuid4().hex}.partial")
        self.path.mkdir(parents=True)

    def abort(self) -> None:
        """Removes the written files. Does nothing after `commit`."""
        shutil.rmtree(self.path, ignore_errors=True)

    def commit(self) -> None:
        """Flushes all files, and renames the directory to the target."""
        for each in (*self.path.rglob("*"), self.path):
            flush_path(each)
        aside = self.target.with_name(f".{self.target.name}.replaced")
        if self.target.exists():
            shutil.rmtree(aside, ignore_errors=True)  # left by a crash after its replacement was in place
            self.target.rename(aside)
        try:
            self.path.rename(self.target)
        except OSError:
            if aside.exists():
                aside.rename(self.target)
            raise
        flush_path(self.target.parent)
        shutil.rmtree(aside, ignore_errors=True)


def find_asides(parent: Path) -> dict[str, Path]:
    """Returns the directories in `parent` that a crash left under such a name, by their original names."""
    matches = ((_ASIDE.fullmatch(path.name), path) for path in parent.iterdir())
    return {match["name"]: path for match, path in matches if match}


def leftovers(parent: Path) -> list[Path]:
    """Returns the unfinished directories in `parent` that crashed saves of any process left."""
    return [path for path in parent.iterdir() if _LEFTOVER.fullmatch(path.name)]


def flush_path(path: Path) -> None:
    """Flushes a file, or the entries of a directory, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
