"""Timelines as pictures: a grid of text for a terminal, SVG for a browser."""

from __future__ import annotations

import math
from collections.abc import Iterator
from html import escape

from shardwise.schedule.action import Kind
from shardwise.schedule.schedule import Schedule
from shardwise.schedule.timeline import Timeline

__all__ = ["describe_schedule", "draw_svg", "draw_text"]

_WIDTH = 120  # letters of a line of text
_MAX_CELLS, _MAX_PIXELS = 2000, 10_000  # of a line, of a picture: short actions of long steps get less than they need
_LEFT, _TOP, _ROW, _BAR = 180, 64, 40, 28  # pixels: where bars begin, and the heights of a row and of its bar
_LOOKS = {
    Kind.FORWARD: ("forward", "#8ecae6"),
    Kind.BACKWARD: ("backward", "#ffb45c"),
    Kind.BACKWARD_INPUT: ("backward, input only", "#ffd9a0"),
    Kind.BACKWARD_WEIGHT: ("backward, weights only", "#9ed8a5"),
}


def draw_text(timeline: Timeline) -> str:
    """A line a rank: an action fills cells for as long as it takes, a dot is a cell of waiting; folded."""
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
    """A row a rank, time from left to right, grey where the rank waits; with tooltips, and how to read it below."""
    schedule = timeline.schedule
    shortest, label = _sizes(timeline)
    scale = min(max((8 * label + 6) / shortest, 800 / timeline.duration), _MAX_PIXELS / timeline.duration)
    below = _TOP + _ROW * schedule.pp_size
    size = f'width="{_LEFT + timeline.duration * scale + 10:.0f}" height="{below + 70}"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
        _text(10, 24, escape(schedule.title), size=16),
        _text(10, 46, f"Time goes from left to right. The ranks wait {timeline.bubble:.1%} of it (grey)."),
        *(part for rank in range(schedule.pp_size) for part in _draw_rank(timeline, rank, scale)),
        *(_text(10, below + 20 + 20 * i, line) for i, line in enumerate(_explain(schedule))),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def describe_schedule(shown: Timeline) -> str:
    """A schedule in words and as a grid: what it is for, how long ranks wait, how much they hold."""
    held = ", ".join(map(str, shown.schedule.in_flight))
    lines = [
        shown.schedule.title,
        f"bubble: ranks wait {shown.bubble:.1%} of the time",
        f"in flight: ranks hold at most {held} activations, each of one stage and microbatch",
    ]
    return "\n".join([*lines, "", draw_text(shown)])


def _explain(schedule: Schedule) -> Iterator[str]:
    kinds = {action.kind for actions in schedule.actions for action in actions}
    looks = ((kind.value, *_LOOKS[kind]) for kind in Kind if kind in kinds)
    yield " &#160; ".join(f'<tspan fill="{color}">■</tspan> {letter}: {name}' for letter, name, color in looks)
    first = schedule.actions[-1][0]
    yield (
        f"{first} is the {_LOOKS[first.kind][0]} of stage {first.stage} on microbatch {first.microbatch}; after it the "
        "rank holds what the backward needs, an activation."
    )
    if any(len(step.parts) > 1 for steps in schedule.order for step in steps):
        yield "Framed: two of which one may compute while the other communicates."


def _draw_rank(timeline: Timeline, rank: int, scale: float) -> Iterator[str]:
    schedule, top = timeline.schedule, _TOP + _ROW * rank
    stages = ", ".join(map(str, schedule.stages[rank]))
    yield _text(10, top + 12, f"rank {rank}: stage{'s' * (',' in stages)} {stages}")
    yield _text(10, top + 26, f"holds at most {schedule.in_flight[rank]} activations", size=10)
    yield _bar(top, 0, timeline.duration * scale, "#e9ebee")
    spans = iter(timeline.spans[rank])
    for step in schedule.order[rank]:
        ran = [next(spans) for _ in step.parts]
        for span in ran:
            tip = f"{span.action}: {_LOOKS[span.action.kind][0]}, {span.start:g} to {span.end:g}"
            yield _bar(top, span.start * scale, span.end * scale, _LOOKS[span.action.kind][1], stroke="white", tip=tip)
            if span.length * scale > 8 * len(str(span.action)):
                yield _text(_LEFT + (span.start + span.end) / 2 * scale, top + 18, str(span.action), anchor="middle")
        if len(ran) > 1:
            yield _bar(top, ran[0].start * scale + 1, ran[-1].end * scale - 1, "none", stroke="#444")


def _sizes(timeline: Timeline) -> tuple[float, int]:
    """The shortest time that an action takes, and the longest name of one."""
    spans = [span for row in timeline.spans for span in row]
    return min(span.length for span in spans if span.length > 0), max(len(str(span.action)) for span in spans)


def _bar(top: int, start: float, end: float, fill: str, *, stroke: str = "none", tip: str = "") -> str:
    place = f'x="{_LEFT + start:.1f}" y="{top}" width="{end - start:.1f}" height="{_BAR}"'
    return f'<rect {place} fill="{fill}" stroke="{stroke}"><title>{tip}</title></rect>'


def _text(x: float, y: float, text: str, *, size: int = 12, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}">{text}</text>'
