"""Timelines as pictures."""

from __future__ import annotations

from html import escape

from shardwise.schedule.action import Kind
from shardwise.schedule.timeline import Timeline

__all__ = ["draw_svg"]

_MAX_PIXELS = 10_000  # of a picture: short actions of long steps get less than they need
_LEFT, _TOP, _ROW, _BAR = 180, 40, 36, 28  # pixels: where bars begin, and the heights of a row and of its bar
_LOOKS = {
    Kind.FORWARD: ("forward", "#8ecae6"),
    Kind.BACKWARD: ("backward", "#ffb45c"),
    Kind.BACKWARD_INPUT: ("backward, input only", "#ffd9a0"),
    Kind.BACKWARD_WEIGHT: ("backward, weights only", "#9ed8a5"),
}


def draw_svg(timeline: Timeline) -> str:
    """Draws one row per rank, time from left to right, grey while the rank waits; each bar has a tooltip."""
    schedule = timeline.schedule
    drawn = [span for row in timeline.spans for span in row]
    shortest = min(span.length for span in drawn if span.length > 0)
    label = max(len(str(span.action)) for span in drawn)
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


def _bar(top: int, start: float, end: float, fill: str, *, tip: str = "") -> str:
    place = f'x="{_LEFT + start:.1f}" y="{top}" width="{end - start:.1f}" height="{_BAR}"'
    return f'<rect {place} fill="{fill}" stroke="white"><title>{tip}</title></rect>'


def _text(x: float, y: float, text: str, *, size: int = 12) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}">{text}</text>'
