"""The places that a run writes to: whether they can be made and written, and have room, before the first step."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from pathlib import Path

from shardwise.cli.adapters import export_mode
from shardwise.cli.config_file import Problems
from shardwise.errors import LoadError
from shardwise.train.run_config import Problem, TrainConfig
from shardwise.weights.staging import is_url
from shardwise.weights.write import check_target

__all__ = ["check_outputs", "check_place", "unexported"]


def check_outputs(config: TrainConfig) -> list[Problem]:
    """Everything wrong with the places that the run writes to. Makes them and writes there, in one process of a run."""
    problems = Problems()
    saved = config.checkpoint.dir
    for key, directory in (
        ("log.dir", config.log.dir),
        ("data.cache_dir", config.data.cache_dir),
        ("checkpoint.dir", saved),
    ):
        if directory is not None:
            with problems.of(key):
                check_place(directory)
    if config.export is None:
        return problems
    with problems.of("export"):
        check_place(config.export)
        if export_mode(config) != "only":
            check_target(config.export)
    export = Path(config.export)
    goes_on = saved is not None and config.checkpoint.resume == "auto" and any(Path(saved).glob("*/manifest.json"))
    if not problems and not goes_on and export.exists() and not (export.is_dir() and not any(export.iterdir())):
        what = f"the directory {export} is not empty" if export.is_dir() else f"{export} is a file"
        problems.append(Problem("export", what, "remove it or name another; nothing is overwritten"))
    if not problems and unexported(config.log.dir).exists():
        what = f"{unexported(config.log.dir)} holds the weights that an earlier run could not export"
        problems.append(Problem("log.dir", what, "move them, or name another directory"))
    return problems


def check_place(directory: str, *, num_bytes: int = 0) -> None:
    """Tries whether `directory` can be made and written, and measures the room there; leaves nothing after.

    Args:
        directory: the place.
        num_bytes: the room needed.

    Raises:
        LoadError: it cannot be made, or not be written to, or has no room.
    """
    try:
        if is_url(directory):
            raise ValueError("it is a URL")
        free = _free_bytes(Path(directory))
    except (OSError, ValueError) as error:  # a ValueError: a NUL in the name, a URL
        why = " ".join(str(error).split("] ", 1)[-1].split())[:200]
        fix = "name a directory that can be made and written"
        raise LoadError(f"cannot write to {directory[:100]!r}", why=why, fix=fix) from error
    if free < num_bytes:
        raise LoadError(
            f"no room for the export to {directory!r}",
            why=f"the model takes {num_bytes / 2**30:,.2f} GiB, and {free / 2**30:,.2f} GiB are free",
            fix="make room, or name a directory on another disk",
        )


def _free_bytes(path: Path) -> int:
    """The room at `path`, where a file can be written. What is not there is made below a name of this process's own:
    others may try the same place at the same time.

    Raises:
        OSError, ValueError: it cannot be made or written.
    """
    existing = next(parent for parent in (path, *path.parents) if parent.is_dir())
    missing = path.relative_to(existing)
    if missing.parts and os.path.lexists(existing / missing.parts[0]):
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(existing / missing.parts[0]))
    with tempfile.TemporaryDirectory(prefix=".probe-", dir=existing) as scratch:
        (Path(scratch) / missing).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=Path(scratch) / missing) as file:
            file.write(bytes(4096))
            file.flush()
            os.fsync(file.fileno())
    return shutil.disk_usage(existing).free


def unexported(log_dir: str) -> Path:
    """Where weights are put that could not be exported."""
    return Path(log_dir) / "unexported"
