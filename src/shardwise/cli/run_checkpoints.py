"""The checkpoints of `shardwise train`: when a run is saved, what ends it in order, and how it goes on.

# [Note: ending a run in order]
A signal reaches ranks at different moments, some of them in the middle of a collective. It only sets a flag. After each
step all ranks sum their flags, so all of them see it after the same step, save, and leave. A second signal ends a rank
on the spot, as the first one does where a run has no checkpoints.
"""

from __future__ import annotations

import json
import signal
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from shardwise.api.checkpoints import load_checkpoint, restore, save_checkpoint
from shardwise.checkpoint.background import join_saves
from shardwise.checkpoint.load import LoadTarget, open_on_all_ranks
from shardwise.checkpoint.reader import StoredParts
from shardwise.checkpoint.store import clean, find_tag, find_tags, lock
from shardwise.checkpoint.writer import as_load_error
from shardwise.comm.agree import raise_on_all_ranks
from shardwise.comm.operations import all_gather_objects, all_reduce_, host_device
from shardwise.data.ahead import BatchesAhead
from shardwise.data.packing import PackedBatches
from shardwise.errors import ConfigError, LoadError
from shardwise.mesh import Mesh
from shardwise.parameters.registry import registry_of
from shardwise.ranks.process import ENDING
from shardwise.train.run_config import CheckpointConfig, TrainConfig

__all__ = ["RunCheckpoints", "SavedRun", "check_saved", "describe_run", "find_saved_run"]

SECONDS_TO_CLAIM = 10
_VOLATILE = {"_name_or_path", "architectures", "dtype", "torch_dtype", "transformers_version", "use_cache"}


def describe_run(
    config: TrainConfig, model_config: Any, batches: PackedBatches, *, adapter: Mapping[str, Any]
) -> dict[str, Any]:
    """What must be the same when a run goes on, as JSON: its model, its data, its optimizer, and its adapter."""
    model = {key: value for key, value in model_config.to_dict().items() if key not in _VOLATILE}
    optimizer = {
        key: value for key, value in vars(config.optimizer).items() if key not in ("schedule", "max_grad_norm")
    }
    described = {
        "model": model,
        "optimizer": {**optimizer, "schedule": vars(config.optimizer.schedule)},
        "data": {**batches.rows.describe(), "dropout seed": config.seed},
        **({"adapter": adapter} if adapter else {}),
    }
    found: dict[str, Any] = json.loads(json.dumps(described, default=str))
    return found


class RunCheckpoints:
    """Saves a run as it goes; a context manager that sees to signals, and finishes what is being written.

    Args:
        config: when to save, and where.
        run: what `describe_run` said of it.
    """

    def __init__(
        self,
        config: CheckpointConfig,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        batches: BatchesAhead,
        run: Mapping[str, Any],
    ) -> None:
        self._config, self._mesh = config, registry_of(model).mesh
        self._model, self._optimizer, self._batches, self._run = model, optimizer, batches, run
        self._saved_at = time.monotonic()
        self._former: dict[int, Any] = {}
        self._own_signal = 0
        self.ended_by: int | None = None

    def after_step(self, step: int, *, is_last: bool) -> bool:
        """Saves if that is due; whether the run ends here.

        Communicates: over all ranks, one all-reduce of two numbers; what a save does.
        """
        config = self._config
        is_late = config.minutes is not None and time.monotonic() - self._saved_at >= 60 * config.minutes
        ended_by, is_late = self._agree(self._own_signal, is_late=is_late)
        is_due = config.every is not None and step % config.every == 0
        if ended_by or is_late or is_due or is_last:
            assert config.dir is not None
            save_checkpoint(
                config.dir,
                model=self._model,
                optimizer=self._optimizer,
                extra={"step": step, "batches": self._batches.state_dict(), "run": self._run},
                async_save=config.async_save,
                keep_last=config.keep_last,
            )
            self._saved_at = time.monotonic()
        self.ended_by = ended_by or None
        return bool(ended_by)

    def _agree(self, own_signal: int, *, is_late: bool) -> tuple[int, bool]:
        """The signal that has reached some rank, and whether rank 0's clock asks for a save."""
        group = self._mesh.group()
        if group is None:
            return own_signal, is_late
        device = host_device(group, self._mesh.device)
        flags = torch.tensor([own_signal, is_late and self._mesh.rank == 0], dtype=torch.int64, device=device)
        all_reduce_(flags, group, largest=True)
        number, late = flags.tolist()
        return int(number), bool(late)

    def __enter__(self) -> RunCheckpoints:
        if self._config.dir is not None and threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, *ENDING):
                former = signal.getsignal(number)
                if former != signal.SIG_IGN:
                    self._former[number] = former
                    signal.signal(number, self._note)
        return self

    def _note(self, number: int, frame: object) -> None:
        if self._own_signal:  # the second one
            self._restore()
            signal.raise_signal(number)
        self._own_signal = number

    def _restore(self) -> None:
        while self._former:
            number, former = self._former.popitem()
            signal.signal(number, former)

    def __exit__(self, kind: object, *error: object) -> None:
        try:
            if kind is None:
                join_saves(self._mesh)
        finally:
            self._restore()


@dataclass(frozen=True)
class SavedRun:
    """A run that is to go on.

    Attributes:
        stored: its newest checkpoint, open on every rank.
        extra: what was saved besides the model and the optimizer.
        mesh: the ranks that go on with it.
    """

    stored: StoredParts
    extra: Mapping[str, Any]
    mesh: Mesh

    def go_on(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, batches: PackedBatches) -> int:
        """Puts optimizer, batches and random states where they were; returns the number of steps done.

        Raises:
            ConfigError: the batches are others.
            LoadError: the checkpoint does not fit.
        """
        with raise_on_all_ranks(self.mesh.group(), "going on with the data"):
            batches.load_state_dict(self.extra["batches"])
        restore(self.stored, LoadTarget(model=model, optimizer=optimizer, fills_model=False))
        return int(self.extra["step"])


def find_saved_run(config: CheckpointConfig, mesh: Mesh, run: Mapping[str, Any], console: Console) -> SavedRun | None:
    """The run that goes on here, None where it begins. From here on no other may save here.

    Raises:
        ConfigError: it is another one than `run`.
        LoadError: its checkpoint cannot be read, or another run saves here.
    """
    if config.dir is None:
        return None
    with raise_on_all_ranks(mesh.group(), "claiming the directory of checkpoints"):
        if mesh.rank == 0:
            _claim(Path(config.dir))
    with raise_on_all_ranks(mesh.group(), "looking for checkpoints"):
        if mesh.rank == 0:
            _check_new(config)
        own = _newest(Path(config.dir)) if mesh.rank == 0 else None
    tag = all_gather_objects(own, mesh.group())[0]
    if tag is None:
        return None
    stored = open_on_all_ranks(config.dir, tag, mesh)
    with raise_on_all_ranks(mesh.group(), "looking at the run that was saved"):
        extra = restore(stored, LoadTarget())
        saved = extra.get("run") if isinstance(extra, Mapping) else None
        if not isinstance(saved, Mapping) or "batches" not in extra or "step" not in extra:
            raise ConfigError(
                f"{config.dir} holds checkpoints that are no run's",
                at="checkpoint.dir",
                fix="name another directory",
            )
        _check_same_run(saved, run)
    console.print(f"resume  {Path(config.dir) / tag}")
    return SavedRun(stored, extra, mesh)


def check_saved(config: CheckpointConfig) -> None:
    """Checks the checkpoints that a run would go on from, or write next to. Reads no parameters.

    Raises:
        ConfigError: the run never resumes, and there are checkpoints of another one.
        LoadError: the newest checkpoint is damaged.
    """
    _check_new(config)
    if config.dir is not None and (tag := _newest(Path(config.dir))) is not None:
        load_checkpoint(config.dir, tag)


def _check_new(config: CheckpointConfig) -> None:
    """Raises where a run that never resumes would replace another run's checkpoints, or delete them by `keep_last`."""
    if config.dir is None or config.resume != "never" or not Path(config.dir).is_dir():
        return
    if tags := sorted(find_tags(Path(config.dir))):
        raise ConfigError(
            f"{config.dir} holds checkpoints of another run: {', '.join(tags[-5:])}",
            at="checkpoint.dir",
            why="with checkpoint.resume=never this run would replace or delete them",
            fix="name another directory, or move these away",
        )


def _claim(directory: Path) -> None:
    """Makes `directory` this run's, rid of what a crash left there. One whose launcher was killed a moment ago still
    saves there: it is waited for.
    """
    with as_load_error(directory):
        for _ in range(2 * SECONDS_TO_CLAIM):
            with suppress(LoadError):
                lock(directory)
                break
            time.sleep(0.5)
        else:
            lock(directory)
        clean(directory)


def _newest(directory: Path) -> str | None:
    """The tag of the newest checkpoint that can be read, None where there is none at all."""
    tags = find_tags(directory) if directory.is_dir() else {}
    newest = find_tag(directory, None) if tags else None
    return next((tag for tag, path in tags.items() if path == newest), None)


def _check_same_run(saved: Mapping[str, Any], run: Mapping[str, Any]) -> None:
    keys = {part: {**saved.get(part, {}), **run.get(part, {})} for part in {**saved, **run}}
    changed = [
        f"{part}.{key}: was {saved.get(part, {}).get(key)!r}, is {run.get(part, {}).get(key)!r}"
        for part, values in keys.items()
        for key in values
        if saved.get(part, {}).get(key) != run.get(part, {}).get(key)
    ]
    if changed:
        raise ConfigError(
            "the run that was saved is another one",
            at="checkpoint.dir",
            why="\n".join(changed[:8]),
            fix="go on with what it was, or name another checkpoint.dir; another layout, precision or number of steps\n"
            "is welcome",
        )
