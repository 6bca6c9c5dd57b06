"""The logs of a run: a JSONL file, TensorBoard, the screen."""

import dataclasses
import json
import time
from collections import deque
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from shardwise.train.loop import StepRecord
from shardwise.weights.staging import atomic_file

SHOWN_STEPS = 20
"""The screen shows the mean speed of this many steps."""


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
        """Write the record."""
        values = {name: value for name, value in dataclasses.asdict(record).items() if value is not None}
        self._file.write(json.dumps(values) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        with suppress(OSError):
            self._file.close()


def _remove_later_steps(path: Path, num_done: int) -> None:
    with (
        atomic_file(path) as partial,
        path.open(encoding="utf-8") as lines,
        partial.open("w", encoding="utf-8") as kept,
    ):
        for line in lines:
            with suppress(ValueError, KeyError):  # the last one may be torn
                if json.loads(line)["step"] <= num_done:
                    kept.write(line.rstrip("\n") + "\n")


class TensorBoardLog:
    """One scalar curve per quantity, in a new directory for each run; a run that resumes continues the newest."""

    def __init__(self, directory: Path, *, num_done: int | None = None) -> None:
        from torch.utils.tensorboard import SummaryWriter  # optional, and slow to import

        earlier = sorted(directory.iterdir()) if num_done is not None and directory.is_dir() else []
        place = earlier[-1] if earlier else directory / time.strftime("%Y%m%d-%H%M%S")
        self._writer: Any = SummaryWriter(str(place), purge_step=num_done + 1 if num_done is not None else None)

    def report(self, record: StepRecord) -> None:
        """Write every quantity of the record."""
        for name, value in dataclasses.asdict(record).items():
            if name != "step" and value is not None:
                where = name.replace("eval_", "eval/") if name.startswith("eval_") else f"train/{name}"
                self._writer.add_scalar(where, value, record.step)

    def close(self) -> None:
        """Write what is still buffered, and close."""
        self._writer.close()


class Screen:
    """A progress bar on a terminal; elsewhere a line every few steps.

    Args:
        num_steps: length of the run.
        every: steps between lines if `console` is not a terminal.
        num_done: steps that are done already.
        notes: printed with every step.
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
        """Move the bar, or print a line if one is due."""
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
            held_out = f"loss {record.eval_loss:.4f}  perplexity {record.eval_perplexity:,.2f}"
            self._console.print(f"held out, step {record.step}: {held_out}")

    def close(self) -> None:
        """Leave the bar as it is."""
        self._bar.stop()


def _describe_work(record: StepRecord) -> str:
    if record.mfu is not None:
        return f"  {record.tflops:,.0f} TFLOP/s  {record.mfu:.1%} MFU"
    return f"  {record.tflops:,.1f} TFLOP/s" if record.tflops is not None and record.tflops >= 1 else ""


def _describe_memory(record: StepRecord) -> str:
    reserved = f" of {record.reserved_bytes / 2**30:.2f}" if record.reserved_bytes is not None else ""
    return f"{record.memory_bytes / 2**30:.2f}{reserved} GiB"
