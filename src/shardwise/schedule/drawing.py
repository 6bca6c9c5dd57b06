"""Timelines as pictures: a text grid for a terminal, SVG for a browser."""

import math
from html import escape

from shardwise.schedule.schedule import Kind
from shardwise.schedule.timeline import Timeline

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
    """Duration of the shortest action, and length of the longest action name."""
    spans = [span for row in timeline.spans for span in row]
    return min(span.length for span in spans if span.length > 0), max(len(str(span.action)) for span in spans)


def _bar(top: int, start: float, end: float, fill: str, *, tip: str = "") -> str:
    place = f'x="{_LEFT + start:.1f}" y="{top}" width="{end - start:.1f}" height="{_BAR}"'
    return f'<rect {place} fill="{fill}" stroke="white"><title>{tip}</title></rect>'


def _text(x: float, y: float, text: str, *, size: int = 12) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}">{text}</text>'
