"""The checkpoints of `shardwise train`: when a run saves, how a signal ends it, and how it resumes.

# [Note: signals end a run after a step]
A signal reaches ranks at different moments, possibly inside a collective, so its handler only sets a flag. After each
step all ranks combine their flags, so all of them see the signal after the same step, save, and end. A second signal
ends a rank at once, as the first one does in a run without checkpoints.
"""

import json
import math
import signal
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from shardwise.api.checkpoints import load_checkpoint, restore, save_checkpoint
from shardwise.checkpoint.background import join_saves
from shardwise.checkpoint.load import LoadTarget, open_on_all_ranks
from shardwise.checkpoint.store import check_seen, clean, find_tags, lock
from shardwise.checkpoint.stored import StoredParts
from shardwise.checkpoint.writer import as_load_error
from shardwise.cli.metrics import LOWER_IS_BETTER
from shardwise.comm.agree import gather_from_all, raise_on_all_ranks
from shardwise.comm.collectives import all_reduce_, host_device
from shardwise.data.ahead import PackedBatches, PrefetchLoader
from shardwise.errors import ConfigError, counted
from shardwise.mesh import Mesh
from shardwise.parameters.registry import registry_of
from shardwise.ranks.rank import ENDING
from shardwise.train.loop import StepRecord
from shardwise.train.run_config import CheckpointConfig, TrainConfig

_VOLATILE = {"_name_or_path", "architectures", "dtype", "torch_dtype", "transformers_version", "use_cache"}


def describe_run(config: TrainConfig, model_config: Any, batches: PackedBatches) -> dict[str, Any]:
    """Returns the settings of model, data, optimizer and adapter that must not change when a run resumes, as JSON."""
    model = {key: value for key, value in model_config.to_dict().items() if key not in _VOLATILE}
    return _settings(config, model, batches.rows.describe())


def _settings(config: TrainConfig, model: Mapping[str, Any], data: Mapping[str, Any]) -> dict[str, Any]:
    optimizer = {
        key: value for key, value in vars(config.optimizer).items() if key not in ("schedule", "max_grad_norm", "state")
    }
    adapter = {key: value for key, value in (config.adapter or {}).items() if key != "export"}
    settings = {
        "model": model,
        "optimizer": {**optimizer, "schedule": vars(config.optimizer.schedule)},
        "data": {**data, "dropout seed": config.seed},
        **({"adapter": adapter} if adapter else {}),
        "run": {"steps": config.steps if config.epochs is None else None, "epochs": config.epochs},
    }
    as_json: dict[str, Any] = json.loads(json.dumps(settings, default=str))
    return as_json


class RunCheckpoints:
    """Saves a run while it trains; a context manager that handles signals and joins background saves.

    Attributes:
        ended_by: the signal that ended the run; None while it runs.
    """

    def __init__(
        self,
        config: CheckpointConfig,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        batches: PrefetchLoader,
        run: Mapping[str, Any],
        best: "BestStep",
        rows_before: int,
    ) -> None:
        self._config, self._mesh, self._best = config, registry_of(model).mesh, best
        self._rows_before = rows_before
        self._model, self._optimizer, self._batches, self._run = model, optimizer, batches, run
        self._saved_at = time.monotonic()
        self._handlers: dict[int, Any] = {}
        self._received = 0
        self.ended_by: int | None = None

    def after_step(self, step: int, *, is_last: bool) -> bool:
        """Saves if a save is due; returns whether the run ends here.

        Communicates: over all ranks, one all-reduce of two numbers; what a save does.
        """
        config = self._config
        is_late = config.minutes is not None and time.monotonic() - self._saved_at >= 60 * config.minutes
        received, is_late = self._combine(self._received, is_late=is_late)
        is_due = config.every is not None and step % config.every == 0
        if received or is_late or is_due or is_last:
            assert config.dir is not None
            save_checkpoint(
                config.dir,
                model=self._model,
                optimizer=self._optimizer,
                extra={
                    "step": step,
                    "batches": self._batches.state_dict(),
                    "run": self._run,
                    "best": self._best.state_dict(),
                    "rows_before": self._rows_before,
                },
                async_save=config.async_save,
                keep_last=config.keep_last,
            )
            self._saved_at = time.monotonic()
        self.ended_by = received or None
        return bool(received)

    def _combine(self, received: int, *, is_late: bool) -> tuple[int, bool]:
        """Returns a signal that some rank has received, and whether rank 0's clock asks for a save."""
        group = self._mesh.group()
        if group is None:
            return received, is_late
        device = host_device(group, self._mesh.device)
        flags = torch.tensor([received, is_late and self._mesh.rank == 0], dtype=torch.int64, device=device)
        all_reduce_(flags, group, largest=True)
        return int(flags[0]), bool(flags[1])

    def __enter__(self) -> "RunCheckpoints":
        if self._config.dir is not None and threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, *ENDING):
                handler = signal.getsignal(number)
                if handler != signal.SIG_IGN:
                    self._handlers[number] = handler
                    signal.signal(number, self._receive)
        return self

    def _receive(self, number: int, frame: object) -> None:
        if self._received:  # the second one
            self._restore_handlers()
            signal.raise_signal(number)
        self._received = number

    def _restore_handlers(self) -> None:
        while self._handlers:
            signal.signal(*self._handlers.popitem())

    def __exit__(self, kind: object, *error: object) -> None:
        try:
            if kind is None:
                join_saves(self._mesh)
        finally:
            self._restore_handlers()


class BestStep:
    """The best step by a metric of the held-out data, kept as a checkpoint of the model in `checkpoint.dir`/best.

    The values are the same on every rank.

    Args:
        saved: the run that resumes; None for a new one.

    Attributes:
        is_over: whether the last evaluations were no better than the best before them, as `evaluation.patience` says.
    """

    def __init__(
        self, config: TrainConfig, model: torch.nn.Module, console: Console, *, saved: "SavedRun | None"
    ) -> None:
        self._metric, self._patience = config.evaluation.metric, config.evaluation.patience
        self._model, self._console = model, console
        self._directory = Path(config.checkpoint.dir or ".") / "best" if config.checkpoint.best else None
        measured = config.evaluation
        self._about = [measured.metric, str(measured.path), measured.max_batches, config.checkpoint.best]
        known = {} if saved is None else saved.extra.get("best") or {}
        known = known if known.get("about") == self._about else {}
        self._value: float | None = known.get("value")
        others = () if saved is None else {*saved.changed} - {"steps", "epochs"}
        self._num_worse: int = 0 if others else known.get("num_worse", 0)  # with other settings it may get better

    @property
    def is_over(self) -> bool:
        """Whether the run should end."""
        return self._patience is not None and self._num_worse >= self._patience

    def state_dict(self) -> dict[str, Any]:
        """Returns what a run that resumes needs, as JSON."""
        return {"about": self._about, "value": self._value, "num_worse": self._num_worse}

    def after_evaluation(self, record: StepRecord) -> bool:
        """Keeps the step if it is the best so far; returns whether the run should end.

        Communicates: what a save does.
        """
        value, is_lower_better = record.numbers()[f"eval_{self._metric}"], self._metric in LOWER_IS_BETTER
        best = self._value
        if math.isnan(value) or (best is not None and (value >= best if is_lower_better else value <= best)):
            self._num_worse += 1
            if self.is_over:
                self._console.print(f"{self._metric} was better {counted(self._num_worse, 'evaluation')} ago: it ends")
            return self.is_over
        self._value, self._num_worse = value, 0
        if self._directory is not None:
            extra = {"step": record.step, "value": value}
            save_checkpoint(self._directory, model=self._model, extra=extra, keep_last=1, tag=f"step-{record.step}")
        return False

    def restore(self) -> None:
        """Gives the model the weights of the best step. Communicates: what loading a checkpoint does."""
        if self._directory is not None and self._value is not None:
            extra = load_checkpoint(self._directory, model=self._model)
            self._console.print(f"best    step {extra['step']:,}, {self._metric} {extra['value']:.4f}")


@dataclass(frozen=True)
class SavedRun:
    """A run that resumes.

    Attributes:
        stored: its newest checkpoint, open on every rank.
        changed: keys that differ from the saved run, and may.
    """

    stored: StoredParts
    extra: Mapping[str, Any]
    changed: tuple[str, ...] = ()

    def resume(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, batches: PackedBatches) -> int:
        """Restores optimizer, batches and random states; returns the number of steps done."""
        with raise_on_all_ranks(registry_of(model).mesh.group(), "restoring the data state"):
            is_other = any(key.startswith(("data", "batch_size", "seed")) for key in self.changed)
            batches.load_state_dict(self.extra["batches"], may_differ=is_other)
        asked = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
        restore(self.stored, LoadTarget(model=model, optimizer=optimizer, fills_model=False))
        if any(key.startswith("optimizer.") for key in self.changed):
            for group, values in zip(optimizer.param_groups, asked, strict=True):
                group.pop("lr_ratio", None)  # of a group with a rate of its own: it is found anew
                group.update(values)
        return int(self.extra["step"])


def find_saved_run(
    config: CheckpointConfig, mesh: Mesh, run: Mapping[str, Any], console: Console, *, batches: PackedBatches
) -> SavedRun | None:
    """Returns the run that resumes, None where a new one begins. Locks the directory: no other run may save there."""
    if config.dir is None:
        return None
    directory = Path(config.dir)

    def find() -> tuple[Path, bool]:
        if mesh.rank != 0:
            return directory, False
        with as_load_error(directory):
            lock(directory)
            clean(directory)
        return directory.resolve(), _has_checkpoints(config)

    place, is_there = gather_from_all(mesh.group(), "looking for checkpoints", find)[0]
    gather_from_all(mesh.group(), "looking for checkpoints", lambda: check_seen(place, rank=mesh.rank))
    if not is_there:
        return None
    stored = open_on_all_ranks(directory, None, mesh)
    with raise_on_all_ranks(mesh.group(), "comparing the run with its checkpoint"):
        extra = _run_in(restore(stored, LoadTarget()), directory)
        changed = _find_changes(extra, run, batches.state_dict())
        _check_changes(changed, config.change)
    console.print(f"resume  {directory / stored.manifest.tag}")
    for words in changed.values():
        console.print(f"change  {words}")
    return SavedRun(stored, extra, tuple(changed))


def find_newest(config: CheckpointConfig) -> Path | None:
    """Returns the directory of a run's checkpoints, that of its best one with `best`; None if there are none."""
    root = Path(config.dir or "")
    places = [] if config.dir is None else [root / "best", root] if config.best else [root]
    return next((place for place in places if place.is_dir() and find_tags(place)), None)


def open_newest(config: CheckpointConfig, mesh: Mesh) -> StoredParts | None:
    """Opens the newest checkpoint of a run on every rank, the best one with `best`; None if there is none.

    Communicates: gathers of small objects over all ranks.
    """
    directory = gather_from_all(mesh.group(), "looking for checkpoints", lambda: find_newest(config))[0]
    return None if directory is None else open_on_all_ranks(directory, None, mesh)


def check_saved(config: TrainConfig) -> None:
    """Checks the checkpoint from which a run would resume, and the settings that need no data. Reads no parameters."""
    place = config.checkpoint.dir
    if place is not None and _has_checkpoints(config.checkpoint):
        extra = _run_in(load_checkpoint(place), place)
        run, batches = extra["run"], {**extra["batches"], "batch_size": config.batch_size, "seed": config.seed}
        changed = _find_changes(extra, _settings(config, run["model"], run["data"]), batches)
        _check_changes(changed, config.checkpoint.change)


def _run_in(extra: Any, directory: object) -> Mapping[str, Any]:
    if isinstance(extra, Mapping) and {"run", "batches", "step"} <= extra.keys():
        return extra
    what = f"the checkpoints in {directory} are not from shardwise train"
    raise ConfigError(what, at="checkpoint.dir", fix="name another directory")


def _has_checkpoints(config: CheckpointConfig) -> bool:
    """Returns whether there is a checkpoint to resume from."""
    assert config.dir is not None
    directory = Path(config.dir)
    tags = find_tags(directory) if directory.is_dir() else {}
    best = find_tags(directory / "best") if (directory / "best").is_dir() else {}
    if (tags or best) and config.resume == "never":
        raise ConfigError(
            f"{config.dir} holds checkpoints of another run: {', '.join(sorted(tags or best)[-5:])}",
            at="checkpoint.dir",
            why="with checkpoint.resume=never this run would replace or delete them",
            fix="name another directory, or move these away",
        )
    return bool(tags)


_CALLED = {"dropout seed": "seed", "tokens": "data", "sources": "data", "steps": "steps", "epochs": "epochs"}
"""Settings that are kept under other names than their keys."""


def _find_changes(extra: Mapping[str, Any], run: Mapping[str, Any], batches: Mapping[str, int]) -> dict[str, str]:
    """Returns the settings that differ from those of the saved run, by key, in words.

    Args:
        batches: the state of this run's batches.
    """
    saved, changed = extra["run"], {}
    for part in {**saved, **run}:
        old, new = saved.get(part, {}), run.get(part, {})
        for name in {**old, **new}:
            key = _CALLED.get(name, f"{part}.{name}")
            if old.get(name) != new.get(name) and (part != "run" or old):
                changed[key] = f"{key}: was {old.get(name)!r}, is {new.get(name)!r}"
    for name, key in {"batch_size": "batch_size", "seed": "seed", "seq_length": "data.seq_length"}.items():
        if (was := extra["batches"].get(name)) != batches[name]:
            changed[key] = f"{key}: was {was}, is {batches[name]}"
    return changed


def _check_changes(changed: Mapping[str, str], change: Sequence[str]) -> None:
    allowed = ("steps", "epochs", *change)
    refused = [key for key in changed if not any(f"{key}.".startswith(f"{name}.") for name in allowed)]
    if refused:
        raise ConfigError(
            "the checkpoint belongs to a run with other settings",
            at="checkpoint.dir",
            why="\n".join(changed[key] for key in refused[:8]),
            fix=f"use the settings of that run, name another checkpoint.dir, or say that they may change:\n"
            f"checkpoint.change=[{', '.join(refused)}]. layout, precision and number of steps always may",
        )
