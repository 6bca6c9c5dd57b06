"""When every action of a schedule runs: simulated from costs, or measured; and as a Chrome trace."""

import json
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from shardwise.errors import ConfigError
from shardwise.schedule.action import Action, Kind
from shardwise.schedule.schedule import Schedule

__all__ = ["Attribution", "Span", "Timeline", "chrome_trace", "timeline"]

_Place: TypeAlias = Callable[[Action, float, float], "Span"]
"""Says when an action runs, given when its rank was done with the one before and when its input was computed."""

_Output: TypeAlias = tuple[bool, int, int]  # of a forward or of a backward, of which stage, of which microbatch


@dataclass(frozen=True)
class Span:
    """When an action ran, from the start of the step on.

    Attributes:
        asked: when its rank began to wait for what another one sends; None where the input was its own, or nothing was
            measured.
    """

    action: Action
    start: float
    end: float
    asked: float | None = None

    @property
    def length(self) -> float:
        """How long it took."""
        return self.end - self.start

    def since(self, start: float) -> "Span":
        """The same on a clock that starts then."""
        asked = None if self.asked is None else self.asked - start
        return Span(self.action, self.start - start, self.end - start, asked)


@dataclass(frozen=True, kw_only=True)
class Attribution:
    """Why the ranks of a measured step waited, as shares of their time that add up to its bubble.

    Attributes:
        theory: by the schedule, where every action of a stage takes its mean time and sending takes none.
        uneven: because the same action of a stage took longer for some microbatches than for others.
        between: between actions, where the input was there: posting messages, the runtime's bookkeeping.
        messages: from when a tensor was computed, or waited for if that was later, until it had arrived.
    """

    theory: float
    uneven: float
    between: float
    messages: float

    @property
    def measured(self) -> float:
        """The sum: the measured bubble."""
        return self.theory + self.uneven + self.between + self.messages

    def __str__(self) -> str:
        parts = f"uneven times {self.uneven:.1%}, between actions {self.between:.1%}, messages {self.messages:.1%}"
        return f"{self.measured:.1%} of the time: by the schedule {self.theory:.1%}, {parts}"


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
                if span.asked is not None:
                    waited = {"ts": 1e6 * span.asked, "dur": 1e6 * (span.start - span.asked)}
                    yield {**event, "name": f"waits for the input of {span.action}", **waited}

    def computed(self) -> "Timeline":
        """The same schedule where every action of a stage takes as long as it does here in the mean, and sending no
        time: how a measured step would have run if ranks waited for nothing but each other's results.
        """
        return timeline(self.schedule, self._means())

    def attribute(self) -> Attribution:
        """Where the bubble of a measured step comes from: the step is replayed, first with mean times alone, then
        with what was measured of each action, what lay between them, and the messages: that is the step itself.
        """
        lengths, between, messages = self._delays()
        theory = self.computed().bubble
        uneven = timeline(self.schedule, lengths).bubble
        local = _replay(self.schedule, lengths, between).bubble
        full = _replay(self.schedule, lengths, between, messages).bubble
        return Attribution(theory=theory, uneven=uneven - theory, between=local - uneven, messages=full - local)

    def _means(self) -> dict[Action, float]:
        found = defaultdict(list)
        for span in (span for row in self.spans for span in row):
            found[span.action.stage, span.action.kind].append(span.length)
        means = {key: statistics.fmean(lengths) for key, lengths in found.items()}
        return {span.action: means[span.action.stage, span.action.kind] for row in self.spans for span in row}

    def _delays(self) -> tuple[dict[Action, float], dict[Action, float], dict[Action, float]]:
        """How long every action took, how long after the one before its rank was ready for it, and how much later than
        that and than the end of what it depends on it began.
        """
        spans = {span.action: span for row in self.spans for span in row}
        between, messages = {}, {}

        def note(action: Action, free: float, ready: float) -> Span:
            span = spans[action]
            asked = span.start if span.asked is None else span.asked
            between[action], messages[action] = asked - free, span.start - max(asked, ready)
            return span

        _walk(self.schedule, note)
        return {action: span.length for action, span in spans.items()}, between, messages


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
    actions = (action for actions in schedule.actions for action in actions)
    return _replay(schedule, lengths or {each: 1.0 + (each.kind is Kind.BACKWARD) for each in actions})


_NOTHING: Mapping[Action, float] = {}


def _replay(
    schedule: Schedule,
    lengths: Mapping[Action, float],
    between: Mapping[Action, float] = _NOTHING,
    messages: Mapping[Action, float] = _NOTHING,
) -> Timeline:
    """The timeline where actions take `lengths`, ranks are ready for them `between` after the one before, and they
    begin `messages` after both their rank and their input are ready.
    """

    def place(action: Action, free: float, ready: float) -> Span:
        start = max(free + between.get(action, 0.0), ready) + messages.get(action, 0.0)
        return Span(action, start, start + lengths[action])

    return _walk(schedule, place)


def _walk(schedule: Schedule, place: _Place) -> Timeline:
    """The timeline of what `place` says of every action, in an order in which each one's input is known before it.

    Raises:
        ConfigError: ranks wait for each other and none can go on.
    """
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
                    row.append(place(action, row[-1].end if row else 0.0, outputs[_input_of(action, num_stages)]))
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
