"""Timing of a schedule's actions, simulated from costs or measured; also as a Chrome trace."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from html import escape
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
        """Time that the action takes."""
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
        """Time from the start of the step to the end of its last action, in the unit of the spans."""
        return max(row[-1].end for row in self.spans)

    @property
    def bubble(self) -> float:
        """Share of the ranks' time that they wait, from 0 to 1."""
        return 1 - sum(span.length for row in self.spans for span in row) / (len(self.spans) * self.duration)


def chrome_trace(timelines: Mapping[str, Timeline]) -> str:
    """Returns JSON of timelines by name, for chrome://tracing or Perfetto: one track per rank, in microseconds."""
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
    """Returns the output that `action` needs: for a backward the next stage's backward, or the last stage's forward."""
    if action.kind is Kind.FORWARD:
        return (True, action.stage - 1, action.microbatch)
    if action.kind is Kind.BACKWARD_WEIGHT:
        return (False, action.stage, action.microbatch)
    is_last = action.stage == num_stages - 1
    return (is_last, action.stage + (not is_last), action.microbatch)


_WIDTH = 120  # letters of a line of text
_MAX_CELLS, _MAX_PIXELS = 2000, 10_000  # of a line, of a picture: short actions of long steps get less than they need
_LEFT, _TOP, _ROW, _BAR = 180, 40, 36, 28  # pixels: where bars begin, and the heights of a row and of its bar
_LOOKS = {
    Kind.FORWARD: ("forward", "#8ecae6"),
    Kind.BACKWARD: ("backward", "#ffb45c"),
    Kind.BACKWARD_INPUT: ("backward, input only", "#ffd9a0"),
    Kind.BACKWARD_WEIGHT: ("backward, weights only", "#9ed8a5"),
}


def draw_text(timeline: Timeline) -> str:
    """Draws one line per rank: an action fills cells for as long as it takes; a dot is a waiting cell."""
    shortest, label = _sizes(timeline)
    unit, cell = max(shortest, timeline.duration / _MAX_CELLS), label + 1

    def column(time: float) -> int:
        return cell * math.floor(time / unit + 0.5)

    lines = []
    for row in timeline.spans:
        line = list("·".ljust(cell) * (column(timeline.duration) // cell))
        for span in row:
            first, stop = column(span.start), column(span.end)
            filler = "─" if stop > first + cell else " "
            line[first:stop] = (str(span.action).ljust(stop - first - 1, filler) + " ")[: stop - first]
        lines.append("".join(line))
    names = [f"rank {rank}  " for rank in range(len(lines))]
    margin = max(map(len, names))
    fold = max(1, (_WIDTH - margin) // cell) * cell
    blocks = (
        (name.ljust(margin) + line[first : first + fold] for name, line in zip(names, lines, strict=True))
        for first in range(0, len(lines[0]), fold)
    )
    return "\n\n".join("\n".join(map(str.rstrip, block)) for block in blocks)


def draw_svg(timeline: Timeline) -> str:
    """Draws one row per rank, time from left to right, grey while the rank waits; each bar has a tooltip."""
    schedule = timeline.schedule
    shortest, label = _sizes(timeline)
    scale = min(max((8 * label + 6) / shortest, 800 / timeline.duration), _MAX_PIXELS / timeline.duration)
    width, height = _LEFT + timeline.duration * scale + 10, _TOP + _ROW * schedule.pp_size + 20
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height}" font-family="sans-serif">',
        '<rect width="100%" height="100%" fill="white"/>',
        _text(10, 24, f"{escape(schedule.title)}; ranks wait {timeline.bubble:.1%} of the time", size=14),
    ]
    for rank, spans in enumerate(timeline.spans):
        top = _TOP + _ROW * rank
        parts.append(_text(10, top + 18, f"rank {rank} (at most {schedule.in_flight[rank]} activations)"))
        parts.append(_bar(top, 0, timeline.duration * scale, "#e9ebee"))
        for span in spans:
            name, color = _LOOKS[span.action.kind]
            tip = f"{span.action}: {name}, {span.start:g} to {span.end:g}"
            parts.append(_bar(top, span.start * scale, span.end * scale, color, tip=tip))
            if span.length * scale > 8 * len(str(span.action)):
                parts.append(_text(_LEFT + span.start * scale + 3, top + 18, str(span.action)))
    return "\n".join([*parts, "</svg>"]) + "\n"


def describe_schedule(shown: Timeline) -> str:
    """Describes a schedule in words and as a grid: its bubble, and the activations that ranks hold."""
    held = ", ".join(map(str, shown.schedule.in_flight))
    lines = [
        shown.schedule.title,
        f"bubble: ranks wait {shown.bubble:.1%} of the time",
        f"in flight: ranks hold at most {held} activations, each of one stage and microbatch",
    ]
    return "\n".join([*lines, "", draw_text(shown)])


def _sizes(timeline: Timeline) -> tuple[float, int]:
    """Returns the duration of the shortest action, and length of the longest action name."""
    spans = [span for row in timeline.spans for span in row]
    return min(span.length for span in spans if span.length > 0), max(len(str(span.action)) for span in spans)


def _bar(top: int, start: float, end: float, fill: str, *, tip: str = "") -> str:
    place = f'x="{_LEFT + start:.1f}" y="{top}" width="{end - start:.1f}" height="{_BAR}"'
    return f'<rect {place} fill="{fill}" stroke="white"><title>{tip}</title></rect>'


def _text(x: float, y: float, text: str, *, size: int = 12) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}">{text}</text>'
