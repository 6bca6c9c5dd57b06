"""When every action of a schedule runs: simulated from costs, or measured; and as a Chrome trace."""

import json
import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from shardwise.errors import ConfigError
from shardwise.schedule.action import Action, Kind
from shardwise.schedule.schedule import Schedule

__all__ = ["Span", "Timeline", "chrome_trace", "timeline"]

_Output: TypeAlias = tuple[bool, int, int]  # of a forward or of a backward, of which stage, of which microbatch


@dataclass(frozen=True)
class Span:
    """When an action ran, from the start of the step on."""

    action: Action
    start: float
    end: float

    @property
    def length(self) -> float:
        """How long it took."""
        return self.end - self.start

    def since(self, start: float) -> "Span":
        """The same on a clock that starts then."""
        return Span(self.action, self.start - start, self.end - start)


@dataclass(frozen=True)
class Timeline:
    """When every action of a schedule runs: as `timeline` computes it, or as it was measured.

    Attributes:
        spans: of every rank, in the order of `schedule.actions`.
    """

    schedule: Schedule
    spans: tuple[tuple[Span, ...], ...]

    @property
    def duration(self) -> float:
        """How long the step takes."""
        return max(row[-1].end for row in self.spans)

    @property
    def bubble(self) -> float:
        """The share of the ranks' time that they wait, from 0 to 1."""
        return 1 - sum(span.length for row in self.spans for span in row) / (len(self.spans) * self.duration)

    def to_chrome_trace(self) -> str:
        """Events for chrome://tracing or Perfetto: a track a rank, a unit of time is a second."""
        return json.dumps({"traceEvents": list(self.chrome_events())})

    def chrome_events(self, process: int = 0) -> Iterator[dict[str, Any]]:
        """The events of `to_chrome_trace`, as those of a process."""
        for rank, row in enumerate(self.spans):
            for span in row:
                event = {"ph": "X", "pid": process, "tid": rank}
                yield {**event, "name": str(span.action), "ts": 1e6 * span.start, "dur": 1e6 * span.length}

    def computed(self) -> "Timeline":
        """The same schedule where every action of a stage takes as long as it does here in the mean, and sending no
        time: how a measured step would have run if ranks waited for nothing but each other's results.
        """
        return timeline(self.schedule, self._means())

    def _means(self) -> dict[Action, float]:
        found = defaultdict(list)
        for span in (span for row in self.spans for span in row):
            found[span.action.stage, span.action.kind].append(span.length)
        means = {key: statistics.fmean(lengths) for key, lengths in found.items()}
        return {span.action: means[span.action.stage, span.action.kind] for row in self.spans for span in row}


def chrome_trace(timelines: Mapping[str, Timeline]) -> str:
    """Events of several timelines for chrome://tracing or Perfetto, each below its name."""
    events: list[dict[str, Any]] = []
    for process, (name, shown) in enumerate(timelines.items()):
        events.append({"ph": "M", "pid": process, "name": "process_name", "args": {"name": name}})
        events += shown.chrome_events(process)
    return json.dumps({"traceEvents": events})


def timeline(schedule: Schedule, lengths: Mapping[Action, float] | None = None) -> Timeline:
    """When every action runs if ranks start the next one as soon as its input is there, and sending takes no time.

    The two of a pair run one after the other, and what they made is sent when both are done, as in torch.

    Args:
        lengths: of all actions. By default forwards, gradients of inputs and gradients of weights take as long as each
            other; torch's stage 0 computes no gradient of its input, and is given the same time all the same.

    Raises:
        ConfigError: ranks wait for each other and none can go on.
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
    """The output that `action` takes: a backward that of the next stage's, or of the last stage's forward."""
    if action.kind is Kind.FORWARD:
        return (True, action.stage - 1, action.microbatch)
    if action.kind is Kind.BACKWARD_WEIGHT:
        return (False, action.stage, action.microbatch)
    is_last = action.stage == num_stages - 1
    return (is_last, action.stage + (not is_last), action.microbatch)
