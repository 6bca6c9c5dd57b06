"""What appears on disk complete or not at all: a file, or a directory of files.

# [Note: replacing a directory]
Everything is written to a hidden directory next to the target and flushed to disk. Only then do the two change places,
in one move where the file system can. Where it cannot, the target is moved out of the way and the new directory into
its place: between the two moves the old directory is next to it, complete, under the name that `aside_of` gives:
whoever looks for the target next puts it back, or reads it there. A failure before leaves the target untouched. A
process that is killed leaves the hidden directory, which the next one removes.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import re
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

__all__ = [
    "StagedDirectory",
    "aside_of",
    "atomic_file",
    "find_asides",
    "flush_path",
    "is_url",
    "leftovers",
    "real_path",
]

_HERE, _RENAME_EXCHANGE = -100, 2  # AT_FDCWD, and a flag of renameat2(2)
_LEFTOVER = re.compile(r"\.(?P<name>.+)\.[0-9a-f]{32}\.partial")
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")
_ASIDE = re.compile(r"\.(?P<name>.+)\.replaced")


def is_url(path: str | os.PathLike[str]) -> bool:
    """Whether `path` names a place that no file system has: pathlib would make directories `s3:`, `bucket` of it."""
    text = str(path)
    scheme, _, _ = text.partition(":/")
    return "://" in text or (_SCHEME.match(text) is not None and not os.path.isdir(f"{scheme}:"))  # noqa: PTH112


def real_path(path: Path) -> Path:
    """`path` without symbolic links; where they lead in a circle, which the next operation there says, as it is.
    `Path.resolve` raises a RuntimeError there, in some versions of Python.
    """
    return Path(os.path.realpath(path))


@contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """Gives a hidden name next to `path` to write to, flushes it and renames it to `path` when the block ends well.

    What stood at `path` is replaced. An exception on the way, Ctrl-C included, removes what was written.
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


class StagedDirectory:
    """A directory under way: files are written into `path`, and `commit` makes it the target.

    Args:
        ending: of the name that it has until then: what `leftovers` finds ends in "partial".

    Attributes:
        target: where it is to stand; it may be there already.
        path: where it is until then.

    Raises:
        OSError: the directory cannot be made.
        ValueError: the name cannot be that of a file.
    """

    def __init__(self, directory: str | os.PathLike[str], *, ending: str = "partial") -> None:
        if is_url(directory):
            raise ValueError("it is a URL")
        self.target = real_path(Path(directory))  # so that a symbolic link stays one
        if self.target.is_symlink():
            raise NotADirectoryError(f"{self.target} is a link that leads in a circle")
        if self.target.exists() and not self.target.is_dir():
            raise NotADirectoryError(f"{self.target} is {'a file' if self.target.is_file() else 'no directory'}")
        self.target.parent.mkdir(parents=True, exist_ok=True)
        aside = aside_of(self.target)
        if aside.is_dir() and not self.target.exists():  # [Note: replacing a directory]
            aside.rename(self.target)
        _remove_abandoned(self.target, ending)
        self.path, self._held = _make_held(self.target, ending)
        try:
            if self.target.exists():
                shutil.copymode(self.target, self.path)
        except OSError:
            self.abort()
            raise

    def abort(self) -> None:
        """Throws away what was written. Nothing happens after `commit`."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._held >= 0:
            os.close(self._held)
            self._held = -1

    def commit(self) -> None:
        """Flushes everything, and moves it into place of what is there.

        Raises:
            OSError: a file cannot be flushed or moved; the target is then as it was.
        """
        for each in (*self.path.rglob("*"), self.path):
            flush_path(each)
        aside = aside_of(self.target)
        if not self.target.exists():
            self.path.rename(self.target)
        elif not _exchange(self.path, self.target):
            if aside.exists():  # left by a crash after its replacement was in place
                shutil.rmtree(aside)
            self.target.rename(aside)
            try:
                self.path.rename(self.target)
            except OSError:
                aside.rename(self.target)
                raise
        flush_path(self.target.parent)
        for old in (self.path, aside):
            shutil.rmtree(old, ignore_errors=True)


def _exchange(one: Path, other: Path) -> bool:
    """Has two directories change places in one move; False where nothing was moved: this system has no such move."""
    with suppress(OSError, AttributeError):  # no such function: it is Linux's
        return ctypes.CDLL(None).renameat2(_HERE, os.fsencode(one), _HERE, os.fsencode(other), _RENAME_EXCHANGE) == 0
    return False


def _make_held(target: Path, ending: str) -> tuple[Path, int]:
    """A new directory next to `target`, which this process holds as long as the descriptor is open. In the moment in
    which it was not held yet, another writer may have taken it for abandoned: then another one is made.
    """
    while True:
        path = target.with_name(f".{target.name}.{uuid.uuid4().hex}.{ending}")
        path.mkdir()
        try:
            held = os.open(path, os.O_RDONLY)
        except FileNotFoundError:
            continue
        with suppress(OSError):  # a file system without locks
            fcntl.flock(held, fcntl.LOCK_EX)
        if path.exists():
            return path, held
        os.close(held)


def _remove_abandoned(target: Path, ending: str) -> None:
    """Removes what writers of `target` have left that were killed: a living one holds its directory. Where the file
    system has no locks, it stays.
    """
    pattern = re.compile(rf"\.{re.escape(target.name)}\.[0-9a-f]{{32}}\.{ending}")
    for path in [each for each in target.parent.iterdir() if pattern.fullmatch(each.name)]:
        with suppress(OSError):
            descriptor = os.open(path, os.O_RDONLY)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path)
            finally:
                os.close(descriptor)


def aside_of(target: Path) -> Path:
    """Where what stood at `target` is while it is replaced."""
    return target.with_name(f".{target.name}.replaced")


def find_asides(parent: Path) -> dict[str, Path]:
    """Directories in `parent` that a crash left out of their place, by the names they had there."""
    found = ((_ASIDE.fullmatch(each.name), each) for each in parent.iterdir())
    return {match["name"]: each for match, each in found if match}


def leftovers(parent: Path) -> list[Path]:
    """Directories in `parent` that a crash of a save left unfinished, in any process that saves there."""
    return [each for each in parent.iterdir() if _LEFTOVER.fullmatch(each.name)]


def flush_path(path: Path) -> None:
    """Has the disk hold a file, or the names in a directory, before this returns."""
    if path.is_symlink():
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
