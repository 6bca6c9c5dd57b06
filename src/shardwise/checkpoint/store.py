"""A directory of checkpoints: tags, locking, and deletion."""

import fcntl
import logging
import os
import re
import shutil
import socket
from contextlib import suppress
from pathlib import Path
from typing import Any

from shardwise.checkpoint.manifest import MANIFEST, Manifest, read_manifest
from shardwise.errors import ConfigError, LoadError, did_you_mean
from shardwise.weights.staging import disk_errors, find_asides, is_url, leftovers

logger = logging.getLogger("shardwise.checkpoint")

LATEST = "latest"
_LOCK = ".lock"
_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.=+-]{0,99}")
_NO_TAGS = (LATEST, "lost+found")  # a volume's own directory, which only root may look into
_LOCKS: dict[Path, int] = {}  # files locked by this process, until it ends: a job that saves goes on to save


def root_of(path: Any) -> Path:
    """Returns `path` as the absolute path of a directory of checkpoints."""
    if not isinstance(path, str | os.PathLike) or is_url(path):
        raise ConfigError(f"{path!r:.100} cannot be the path of checkpoints", fix="pass a directory as str or Path")
    return Path(path).expanduser().absolute()


def check_tag(tag: str) -> str:
    """Returns `tag` if it is valid."""
    if not isinstance(tag, str) or not _TAG.fullmatch(tag) or tag in _NO_TAGS:
        raise ConfigError(
            f"{tag!r:.102} cannot be the tag of a checkpoint",
            why="it names a directory: up to 100 letters, digits and _.=+-, beginning with a letter, digit or _, and\n"
            f"is not {LATEST!r}",
            fix='use one such as "step-100"',
        )
    return tag


def find_tags(root: Path) -> dict[str, Path]:
    """Returns the complete checkpoints in `root` by tag: those with a manifest, which is written last.

    Includes a checkpoint that a crash left under its temporary name while it was being replaced.
    """
    with disk_errors(f"cannot look into {root}", fix="pass a directory of checkpoints"):
        found = {each.name: each for each in root.iterdir() if _TAG.fullmatch(each.name) and each.name not in _NO_TAGS}
        places = {**find_asides(root), **found}
        return {tag: path for tag, path in places.items() if (path / MANIFEST).is_file()}


def list_checkpoints(root: Path) -> list[tuple[str, Path, Manifest | LoadError]]:
    """Returns the tags of `root`, oldest first, with manifests; before them unreadable ones, with their errors."""
    found: list[tuple[int, str, Path, Manifest | LoadError]] = []
    for tag, path in find_tags(root).items():
        try:
            manifest = read_manifest(path)
            found.append((manifest.number, tag, path, manifest))
        except LoadError as error:
            found.append((-1, tag, path, error))
    return [each[1:] for each in sorted(found, key=lambda each: each[:2])]


def find_tag(root: Path, tag: str | None) -> Path:
    """Returns the directory of `tag`; default: the newest checkpoint."""
    if tag is not None:
        tags = find_tags(root)
        if check_tag(tag) not in tags:
            said = {"why": f"there are {', '.join(sorted(tags)[-5:])}"} if tags else _describe_kind(root)
            raise LoadError(
                f"no checkpoint {tag!r}{did_you_mean(tag, tags)}", at=str(root), **(said or {"why": "there are none"})
            )
        return tags[tag]
    known = list_checkpoints(root)
    if not known:
        raise LoadError("there is no complete checkpoint", at=str(root), **_describe_kind(root))
    _, path, newest = known[-1]
    if isinstance(newest, LoadError):
        raise newest
    broken = [str(each.at) for _, _, each in known if isinstance(each, LoadError)]
    if broken:
        logger.warning("%s cannot be read; going on with %s", ", ".join(broken), path)
    return path


def _describe_kind(root: Path) -> dict[str, str]:
    from shardwise.weights.locate import describe_kind  # transformers is slow to import

    return describe_kind(root)


def lock(root: Path) -> None:
    """Locks `root` for this job until this process ends. Called on one rank of the job."""
    root.mkdir(parents=True, exist_ok=True)
    place = root.resolve() / _LOCK
    if place in _LOCKS and place.exists():
        return
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
    _LOCKS[place] = descriptor


def unmark(root: Path) -> None:
    """Removes `latest` and this process's lock from a directory of checkpoints; the next save makes both again."""
    place = root.resolve() / _LOCK
    if (descriptor := _LOCKS.pop(place, None)) is not None:
        place.unlink(missing_ok=True)
        os.close(descriptor)
    (root / LATEST).unlink(missing_ok=True)


def clean(root: Path) -> None:
    """Removes what crashed saves have left in `root`, which this job must have locked, while it does not save."""
    replaced = [path for tag, path in find_asides(root).items() if (root / tag / MANIFEST).is_file()]
    for path in (*leftovers(root), *replaced):
        shutil.rmtree(path, ignore_errors=True)
    for path in root.glob(f".{LATEST}.partial-*"):
        path.unlink(missing_ok=True)


def check_seen(directory: Path, *, rank: int) -> None:
    """Raises `LoadError` if this rank does not see a directory that rank 0 has made."""
    if not directory.is_dir():
        raise LoadError(
            f"rank {rank} does not see the checkpoint's directory",
            at=str(directory),
            why="rank 0 has made it, and every rank writes its part into it",
            fix="save to a directory that all machines share",
        )


def check_place(target: Path) -> None:
    """Raises `LoadError` if `target` exists and is no checkpoint, or is a link."""
    if target.is_symlink():
        raise LoadError(
            f"{target.name} is a link to {target.readlink()}",
            at=str(target),
            why="the checkpoint there would be replaced",
            fix="pass another tag, or remove the link",
        )
    names = [each.name for each in target.iterdir()] if target.is_dir() else []
    if names and MANIFEST not in names:
        raise LoadError(
            f"{target.name} is there already, and is no checkpoint",
            at=str(target),
            why=f"it holds {', '.join(sorted(names)[:3])}, which would be lost",
            fix="pass another tag, or move it away",
        )


def prune(root: Path, *, keep_last: int, keep_every: int | None = None) -> None:
    """Deletes all checkpoints except the newest `keep_last`, and those whose step is a multiple of `keep_every`.

    Unreadable checkpoints, and renamed ones, are kept.
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
