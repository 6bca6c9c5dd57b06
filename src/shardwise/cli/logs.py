"""Where the records of a run go: train.jsonl, trackers and the screen."""

import json
import logging
import time
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from shardwise.cli.inputs import find_tracker
from shardwise.errors import ConfigError, as_error, one_line
from shardwise.train.loop import StepRecord
from shardwise.train.run_config import TrainConfig
from shardwise.weights.staging import write_text

logger = logging.getLogger("shardwise.train")
SHOWN_STEPS = 20  # the screen shows the mean speed of this many steps


class JsonlLog:
    """One JSON object per step. An earlier run's file is kept under the next free number, such as `train.1.jsonl`.

    Args:
        num_done: steps after which the run resumes: lines of later steps are removed. None for a new run.
    """

    def __init__(self, path: Path, *, num_done: int | None = None) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        if num_done is not None and path.exists():
            _remove_later_steps(path, num_done)
            self._file: TextIO = path.open("a", encoding="utf-8")
            return
        if path.exists():
            number = 1
            while (kept := path.with_suffix(f".{number}{path.suffix}")).exists():
                number += 1
            path.rename(kept)
        self._file = path.open("x", encoding="utf-8")

    def report(self, record: StepRecord) -> None:
        """Writes the record."""
        self._file.write(json.dumps(record.numbers()) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Closes the file."""
        with suppress(OSError):
            self._file.close()


def _remove_later_steps(path: Path, num_done: int) -> None:
    kept = []
    for line in path.read_text(encoding="utf-8").splitlines():
        with suppress(ValueError, KeyError):  # the last one may be torn
            kept += [f"{line}\n"] if json.loads(line)["step"] <= num_done else []
    write_text(path, "".join(kept))


class TensorBoardLog:
    """One scalar curve per quantity, in a new directory for each run; a run that resumes continues the newest."""

    def __init__(self, directory: Path, *, num_done: int | None = None) -> None:
        from torch.utils.tensorboard import SummaryWriter  # optional, and slow to import

        earlier = sorted(directory.iterdir()) if num_done is not None and directory.is_dir() else []
        place = earlier[-1] if earlier else directory / time.strftime("%Y%m%d-%H%M%S")
        self._writer: Any = SummaryWriter(str(place), purge_step=num_done + 1 if num_done is not None else None)

    def report(self, record: StepRecord) -> None:
        """Writes every quantity of the record."""
        for name, value in _curves(record).items():
            self._writer.add_scalar(name, value, record.step)

    def close(self) -> None:
        """Writes what is still buffered, and closes."""
        self._writer.close()


class TrackerLog:
    """A tracker of accelerate, such as wandb or mlflow. Its own environment variables configure it.

    Args:
        settings: the configuration of the run, for the tracker to keep.
    """

    def __init__(self, name: str, config: TrainConfig, settings: Mapping[str, Any]) -> None:
        from accelerate import PartialState  # optional

        known = find_tracker(name)
        with as_error(ConfigError, f"the tracker {name!r} cannot start", at="log.to"):  # a key or a server is missing
            PartialState()  # trackers log through it
            self._tracker = known(config.log.project, *([config.log.dir] if known.requires_logging_directory else []))
            self._tracker.start()
            self._tracker.store_init_configuration(dict(settings))

    def report(self, record: StepRecord) -> None:
        """Logs every quantity of the record."""
        self._tracker.log(_curves(record), step=record.step)

    def close(self) -> None:
        """Ends the tracker's run."""
        self._tracker.finish()


def close_reporter(reporter: Any) -> None:
    """Closes a reporter that can be closed. An error of its own does not end the run, which has trained."""
    try:
        getattr(reporter, "close", lambda: None)()
    except Exception as error:  # noqa: BLE001 - of a tracker, or a callback of the user's
        logger.warning("%s could not be closed: %s", type(reporter).__name__, one_line(error))


def _curves(record: StepRecord) -> dict[str, float]:
    """Returns the record's numbers as `train/...` and `eval/...`."""
    return {
        f"eval/{name.removeprefix('eval_')}" if name.startswith("eval_") else f"train/{name}": value
        for name, value in record.numbers().items()
        if name != "step"
    }


class Screen:
    """A progress bar on a terminal; elsewhere a line every few steps.

    Args:
        every: steps between lines if `console` is not a terminal.
    """

    def __init__(self, console: Console, *, num_steps: int, every: int, num_done: int = 0, notes: str = "") -> None:
        self._notes = f"  data: {notes}" if notes else ""
        self._console = console
        self._num_steps = num_steps
        self._every = every
        self._speeds: deque[float] = deque(maxlen=SHOWN_STEPS)
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[loss]}", style="bold"),
            TextColumn("{task.fields[rest]}"),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("training", total=num_steps, completed=num_done, loss="", rest="")
        self._bar.start()

    def report(self, record: StepRecord) -> None:
        """Moves the bar, or prints a line if one is due."""
        self._speeds.append(record.tokens_per_second)
        speed = sum(self._speeds) / len(self._speeds)
        rest = f"{speed:,.0f} tok/s{_describe_work(record)}  {_describe_memory(record)}{self._notes}"
        self._bar.update(self._task, completed=record.step, loss=f"loss {record.loss:.4f}", rest=rest)
        is_due = record.step % self._every == 0 or record.step in (1, self._num_steps)
        if is_due and not self._console.is_terminal:
            width = len(str(self._num_steps))
            self._console.print(
                f"step {record.step:>{width}}/{self._num_steps}  loss {record.loss:.4f}  lr {record.lr:.2e}  "
                f"grad {record.grad_norm:.3f}  {rest}"
            )
        if record.eval_loss is not None:
            numbers = {name: value for name, value in record.numbers().items() if name.startswith("eval_")}
            held_out = "  ".join(f"{name.removeprefix('eval_')} {value:,.4f}" for name, value in numbers.items())
            self._console.print(f"held out, step {record.step}: {held_out}")

    def close(self) -> None:
        """Leaves the bar as it is."""
        self._bar.stop()


def _describe_work(record: StepRecord) -> str:
    if record.mfu is not None:
        return f"  {record.tflops:,.0f} TFLOP/s  {record.mfu:.1%} MFU"
    return f"  {record.tflops:,.1f} TFLOP/s" if record.tflops is not None and record.tflops >= 1 else ""


def _describe_memory(record: StepRecord) -> str:
    reserved = f" of {record.reserved_bytes / 2**30:.2f}" if record.reserved_bytes is not None else ""
    return f"{record.memory_bytes / 2**30:.2f}{reserved} GiB"
