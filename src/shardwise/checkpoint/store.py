"""A directory of checkpoints: its tags, who may write to it, and what is deleted when."""

from __future__ import annotations

import fcntl
import logging
import os
import re
import shutil
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from shardwise.checkpoint.manifest import INDEX, MANIFEST, Manifest, read_manifest
from shardwise.errors import ConfigError, LoadError, did_you_mean
from shardwise.weights.kinds import describe_kind
from shardwise.weights.staging import find_asides, is_url, leftovers

__all__ = [
    "LATEST",
    "check_place",
    "check_tag",
    "clean",
    "find_tag",
    "find_tags",
    "list_checkpoints",
    "lock",
    "prune",
    "root_of",
    "writing",
]

logger = logging.getLogger("shardwise.checkpoint")

LATEST = "latest"
_LOCK = ".lock"
_TENSORS = re.compile(r"rank-\d+(-\d+)?\.safetensors")
_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.=+-]{0,99}")
_LOCKS: dict[tuple[int, Path], int] = {}
"""Files locked by this process (its id), until it ends: a job that saves goes on to save."""
_WRITING: dict[Path, threading.Lock] = {}
"""Held while a checkpoint is written to a directory: this process may have several meshes that save there."""


def root_of(path: Any) -> Path:
    """`path` as the absolute path of a directory of checkpoints.

    Raises:
        ConfigError: it cannot be a path.
    """
    try:
        found = Path(path).expanduser().absolute()
        str(found).encode()
    except (OSError, TypeError, RuntimeError, UnicodeEncodeError) as error:  # ~ of nobody; no directory to be in
        raise ConfigError(
            f"{path!r:.100} cannot be the path of checkpoints", why=str(error), fix="pass a str or pathlib.Path"
        ) from error
    wrong = "it has a NUL in it" if "\0" in str(found) else "it is a URL" if is_url(path) else ""
    if wrong:
        raise ConfigError(
            f"{path!r:.100} cannot be the path of checkpoints", why=wrong, fix="name a directory of a file system"
        )
    return found


@contextmanager
def writing(root: Path) -> Iterator[None]:
    """Waits until nothing of this process writes to `root`, and keeps it so during the block. On one rank of a job."""
    with _WRITING.setdefault(root.resolve(), threading.Lock()):
        yield


def check_tag(tag: str) -> str:
    """`tag`, if it can be one.

    Raises:
        ConfigError: it cannot: it would lead out of the directory, or be taken for something else there.
    """
    if not isinstance(tag, str) or not _TAG.fullmatch(tag) or tag == LATEST:
        raise ConfigError(
            f"{tag!r:.102} cannot be the tag of a checkpoint",
            why="it names a directory: up to 100 letters, digits and _.=+-, beginning with a letter, digit or _, and\n"
            f"is not {LATEST!r}",
            fix='use one such as "step-100"',
        )
    return tag


def find_tags(root: Path) -> dict[str, Path]:
    """The complete checkpoints in `root` by tag: those with a manifest, which is written last.

    One that a crash left beside its place, because it was about to be replaced, is found there.
    """
    try:
        found = {each.name: each for each in root.iterdir() if _TAG.fullmatch(each.name) and each.name != LATEST}
        asides = find_asides(root)
    except OSError as error:
        raise LoadError(f"cannot look into {root}", why=str(error), fix="pass a directory of checkpoints") from error
    tags = {**{tag: path for tag, path in asides.items() if tag not in found}, **found}
    return {tag: path for tag, path in tags.items() if _may_be_checkpoint(path)}


def _may_be_checkpoint(path: Path) -> bool:
    try:
        return (path / MANIFEST).is_file()
    except PermissionError:
        return path.name != "lost+found"  # what is in there cannot be told: who reads it is


def list_checkpoints(root: Path) -> list[tuple[str, Path, Manifest | LoadError]]:
    """Tags of `root`, the oldest first, each with its manifest, or with what is wrong with it (those come first)."""
    found: list[tuple[int, str, Path, Manifest | LoadError]] = []
    for tag, path in find_tags(root).items():
        try:
            manifest = read_manifest(path)
            found.append((manifest.number, tag, path, manifest))
        except LoadError as error:
            found.append((-1, tag, path, error))
    return [each[1:] for each in sorted(found, key=lambda each: each[:2])]


def find_tag(root: Path, tag: str | None) -> Path:
    """The directory of `tag`, by default of the newest checkpoint.

    Raises:
        ConfigError: it cannot be a tag.
        LoadError: there is none, or the newest one's manifest is damaged.
    """
    if tag is not None:
        check_tag(tag)
        tags = find_tags(root)
        if tag not in tags:
            said = {"why": f"there are {', '.join(sorted(tags)[-5:])}"} if tags else describe_kind(root)
            raise LoadError(
                f"no checkpoint {tag!r}{did_you_mean(tag, tags)}", at=str(root), **(said or {"why": "there are none"})
            )
        return tags[tag]
    known = list_checkpoints(root)
    if not known:
        raise LoadError("there is no complete checkpoint", at=str(root), **describe_kind(root))
    _, path, newest = known[-1]
    if isinstance(newest, LoadError):
        raise newest
    broken = [str(each.at) for _, _, each in known if isinstance(each, LoadError)]
    if broken:
        logger.warning("%s cannot be read; going on with %s", ", ".join(broken), path)
    return path


def lock(root: Path) -> None:
    """Makes `root` this job's, until this process ends however it may. On one rank of the job.

    Raises:
        LoadError: another process saves there.
        OSError: `root` cannot be made or written to.
    """
    root.mkdir(parents=True, exist_ok=True)
    place = root.resolve() / _LOCK
    held = _LOCKS.get((os.getpid(), place))
    if held is not None:
        if place.exists() and os.path.samestat(os.fstat(held), place.stat()):
            return
        os.close(_LOCKS.pop((os.getpid(), place)))  # somebody has deleted the directory
    descriptor = os.open(place, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError) as error:
        holder = os.read(descriptor, 500).decode(errors="replace").strip() or "another process"
        os.close(descriptor)
        raise LoadError(
            f"{holder} saves its checkpoints in {root}",
            at=str(place),
            why="two jobs would delete each other's checkpoints",
            fix="wait for it to end, or save in another directory; if that process no longer runs, delete .lock:\n"
            "a shared file system may keep the lock of a machine that is gone for minutes, or for ever",
        ) from error
    except OSError as error:  # a file system without locks
        logger.warning("%s cannot be locked (%s): let no other job save there", root, error)
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
    _LOCKS[os.getpid(), place] = descriptor


def clean(root: Path) -> None:
    """Removes what crashes of saves have left: `root` is this job's, and it saves nothing now. Others may export or
    convert to a place in it meanwhile.
    """
    for path in leftovers(root):
        shutil.rmtree(path, ignore_errors=True)
    for tag, path in find_asides(root).items():
        is_lost = not (path / MANIFEST).is_file() and _holds_checkpoint(path)
        if is_lost or (root / tag / MANIFEST).is_file():
            shutil.rmtree(path, ignore_errors=True)
    for path in root.glob(f".{LATEST}.partial-*"):
        path.unlink(missing_ok=True)


def check_place(target: Path) -> None:
    """Raises where a checkpoint would take the place of a directory that is none.

    Raises:
        LoadError: `target` is a directory in which nothing looks like a file of a checkpoint.
    """
    if not _holds_checkpoint(target):
        names = [each.name for each in target.iterdir()]
        raise LoadError(
            f"{target.name} is there already, and is no checkpoint",
            at=str(target),
            why=f"it holds {', '.join(sorted(names)[:3])}, which would be lost",
            fix="pass another tag, or move it away",
        )


def _holds_checkpoint(path: Path) -> bool:
    """Whether a directory is empty, or holds something that looks like a file of a checkpoint."""
    names = [each.name for each in path.iterdir()] if path.is_dir() else []
    return not names or any(name in (MANIFEST, INDEX) or _TENSORS.fullmatch(name) for name in names)


def prune(root: Path, *, keep_last: int, keep_every: int | None = None) -> None:
    """Deletes all but the newest `keep_last` checkpoints, and those whose step is a multiple of `keep_every`. What
    cannot be read is left for somebody to look at, and what has another name than it was saved under is somebody's.
    """
    found = list_checkpoints(root)
    good = [(path, each) for tag, path, each in found if isinstance(each, Manifest) and each.tag == tag]
    for path, manifest in good[:-keep_last]:
        is_kept = keep_every is not None and manifest.step is not None and manifest.step % keep_every == 0
        if is_kept or path.is_symlink():
            continue
        # A manifest makes it a checkpoint: without it, what a crash leaves of it is none.
        with suppress(OSError):
            hidden = path.with_name(f".{path.name}.{os.urandom(16).hex()}.partial")
            path.rename(hidden)
            shutil.rmtree(hidden)
