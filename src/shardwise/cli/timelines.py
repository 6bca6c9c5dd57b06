"""The measured timeline of one pipeline step, which `log.timeline` of a run asks for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from torch import Tensor

from shardwise.pipeline.runner import runner_of
from shardwise.schedule.drawing import draw_svg
from shardwise.schedule.timeline import chrome_trace
from shardwise.train.run_config import LogConfig
from shardwise.train.step import StepResult, TrainStep

__all__ = ["with_timeline"]


def with_timeline(
    step: TrainStep, log: LogConfig, console: Console, *, num_done: int
) -> Callable[[Mapping[str, Tensor]], StepResult]:
    """Wraps `step` so that step `log.timeline` is measured, and rank 0 draws its timeline.

    Args:
        num_done: number of steps that are already done.

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
            computed, directory, name = measured.computed(), Path(log.dir), f"step {log.timeline}"
            (directory / "timeline.svg").write_text(draw_svg(measured), encoding="utf-8")
            (directory / "timeline_computed.svg").write_text(draw_svg(computed), encoding="utf-8")
            trace = chrome_trace({f"{name}, measured": measured, "computed from its means": computed})
            (directory / "timeline.json").write_text(trace, encoding="utf-8")
            waited = f"{measured.bubble:.1%} of the time, by the schedule {computed.bubble:.1%}"
            console.print(f"in {name} ranks waited {waited} ({directory / 'timeline.svg'})")
        return result

    return timed
