"""Timing of a schedule's actions, simulated from costs or measured; also as a Chrome trace."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from shardwise.errors import ConfigError
from shardwise.schedule.schedule import Action, Kind, Schedule

_Output: TypeAlias = tuple[bool, int, int]  # of a forward or of a backward, of which stage, of which microbatch


@dataclass(frozen=True)
class Span:
    """Start and end of an action, relative to the start of the step."""

    action: Action
    start: float
    end: float

    @property
    def length(self) -> float:
        """Duration."""
        return self.end - self.start


@dataclass(frozen=True)
class Timeline:
    """Timing of every action of a schedule, computed by `timeline` or measured.

    Attributes:
        spans: for every rank, in the order of `schedule.actions`.
    """

    schedule: Schedule
    spans: tuple[tuple[Span, ...], ...]

    @property
    def duration(self) -> float:
        """Duration of the step."""
        return max(row[-1].end for row in self.spans)

    @property
    def bubble(self) -> float:
        """Share of the ranks' time that they wait, from 0 to 1."""
        return 1 - sum(span.length for row in self.spans for span in row) / (len(self.spans) * self.duration)


def chrome_trace(timelines: Mapping[str, Timeline]) -> str:
    """JSON of timelines by name, for chrome://tracing or Perfetto: one track per rank, times in microseconds."""
    events: list[dict[str, Any]] = []
    for process, (name, shown) in enumerate(timelines.items()):
        events.append({"ph": "M", "pid": process, "name": "process_name", "args": {"name": name}})
        for rank, span in ((rank, span) for rank, row in enumerate(shown.spans) for span in row):
            times = {"ts": 1e6 * span.start, "dur": 1e6 * span.length}
            events.append({"ph": "X", "pid": process, "tid": rank, "name": str(span.action), **times})
    return json.dumps({"traceEvents": events})


def timeline(schedule: Schedule, lengths: Mapping[Action, float] | None = None) -> Timeline:
    """Simulates a schedule in which ranks start each action as soon as its input exists, and sending takes no time.

    As in torch, the two actions of a pair run one after the other, and both outputs are sent when both are done.

    Args:
        lengths: seconds by action. Default: a forward, a gradient of inputs and a gradient of weights take 1 each.

    Raises:
        ConfigError: ranks wait for each other in a cycle.
    """
    if lengths is None:
        lengths = {each: 1.0 + (each.kind is Kind.BACKWARD) for row in schedule.actions for each in row}
    num_stages = len(schedule.rank_of)
    outputs: dict[_Output, float] = {(True, -1, i): 0.0 for i in range(schedule.num_microbatches)}
    rows: list[list[Span]] = [[] for _ in schedule.order]
    left = [list(steps) for steps in schedule.order]
    while any(left):
        num_left = sum(map(len, left))
        for row, steps in zip(rows, left, strict=True):
            while steps and all(_input_of(action, num_stages) in outputs for action in steps[0].parts):
                actions = steps.pop(0).parts
                for action in actions:
                    start = max(row[-1].end if row else 0.0, outputs[_input_of(action, num_stages)])
                    row.append(Span(action, start, start + lengths[action]))
                for action in actions:
                    if action.kind is not Kind.BACKWARD_WEIGHT:
                        outputs[action.kind is Kind.FORWARD, action.stage, action.microbatch] = row[-1].end
        if sum(map(len, left)) == num_left:
            stuck = ", ".join(f"rank {rank} before {steps[0]}" for rank, steps in enumerate(left) if steps)
            raise ConfigError(f"the schedule {schedule.name} stops: ranks wait for each other", at=stuck)
    return Timeline(schedule, tuple(map(tuple, rows)))


def _input_of(action: Action, num_stages: int) -> _Output:
    """Output that `action` needs: for a backward the next stage's backward, or the last stage's forward."""
    if action.kind is Kind.FORWARD:
        return (True, action.stage - 1, action.microbatch)
    if action.kind is Kind.BACKWARD_WEIGHT:
        return (False, action.stage, action.microbatch)
    is_last = action.stage == num_stages - 1
    return (is_last, action.stage + (not is_last), action.microbatch)
