"""When the stages of a real step ran: the timeline that `log.timeline` of a run asks for."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from torch import Tensor

from shardwise.pipeline.runner import runner_of
from shardwise.schedule.drawing import draw_svg
from shardwise.schedule.timeline import Timeline, chrome_trace
from shardwise.train.run_config import LogConfig
from shardwise.train.step import StepResult, TrainStep

__all__ = ["with_timeline"]

logger = logging.getLogger("shardwise.train")


def with_timeline(
    step: TrainStep, log: LogConfig, console: Console, *, num_done: int
) -> Callable[[Mapping[str, Tensor]], StepResult]:
    """`step`, which in the step that `log.timeline` says notes when every stage ran, and writes that on rank 0.

    Args:
        num_done: steps that an earlier run has done.

    Communicates: in that step, a gather of the times over pp.
    """
    runner = runner_of(step.model)
    if log.timeline is None or runner is None:
        return step
    left = log.timeline - num_done

    def timed(batch: Mapping[str, Any]) -> StepResult:
        nonlocal left
        left -= 1
        runner.times_next = left == 0
        result = step(batch)
        if left == 0 and (measured := runner.timeline()) is not None and step.mesh.rank == 0:
            _write(measured, Path(log.dir), log.timeline, console)
        return result

    return timed


def _write(measured: Timeline, directory: Path, step: int | None, console: Console) -> None:
    computed = measured.computed()
    files = {
        "timeline.svg": draw_svg(measured),
        "timeline_computed.svg": draw_svg(computed),
        "timeline.json": chrome_trace({f"step {step}, measured": measured, "computed from its means": computed}),
    }
    try:
        for name, text in files.items():
            (directory / name).write_text(text, encoding="utf-8")
    except OSError as error:
        logger.warning("the timeline of step %s is not written, training goes on: %s", step, error)
        return
    waited = f"{measured.bubble:.1%} of the time, by the schedule {computed.bubble:.1%}"
    console.print(f"in step {step} ranks waited {waited} ({directory / 'timeline.svg'})")
