"""`shardwise report`: one HTML file about a run, which needs no network."""

import argparse
import html
import io
import json
import math
from collections.abc import Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from typing import Any

from shardwise.cli.config_file import flat_config, read_config
from shardwise.errors import LoadError, as_error
from shardwise.topology.shape import AXES, MeshShape
from shardwise.train.run_config import TrainConfig

HELP = """\
Write one HTML file about a run, from the files in its log directory: curves of loss, learning rate, gradient norm and
speed, held-out metrics, the ranks of the layout with their memory beside what the plan predicts, the plan, and the
pipeline's timeline if `log.timeline` drew one. It is opened in any browser, without a network.

  shardwise report runs/first                 # writes runs/first/report.html
  shardwise report runs/first --out run.html
"""

_CURVES = {"loss": "loss", "lr": "learning rate", "grad_norm": "gradient norm", "tokens_per_second": "tokens a second"}
_WIDTH, _HEIGHT, _LEFT = 560, 200, 70
_COLOURS = ("#3367d6", "#d9652b", "#2a8f5a", "#8a4fbf", "#b0892e")
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 1200px; margin: 2em auto; padding: 0 1em; color: #222 }
h1 { font-size: 1.5em } h2 { font-size: 1.15em; margin-top: 1.6em } svg { max-width: 100% }
pre { background: #f6f6f6; padding: 1em; overflow-x: auto; font-size: 12px } .charts { display: flex; flex-wrap: wrap }
table { border-collapse: collapse } td, th { padding: .2em .8em; text-align: right; border-bottom: 1px solid #ddd }
td:first-child, th:first-child { text-align: left }
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `shardwise report`."""
    parser.add_argument("log", type=Path, metavar="DIRECTORY", help="log directory of the run")
    parser.add_argument("--out", type=Path, metavar="FILE", help="the HTML file (default: report.html in DIRECTORY)")


def run(arguments: argparse.Namespace) -> int:
    """Runs the command; returns its exit code."""
    directory, out = arguments.log, arguments.out or arguments.log / "report.html"
    with as_error(LoadError, f"{directory} holds no train.jsonl", OSError, fix="name the log directory of a run"):
        lines = (directory / "train.jsonl").read_text(encoding="utf-8").splitlines()
    records = []
    for line in lines:
        with suppress(ValueError):  # the last one of a run that goes on may be torn
            records.append(json.loads(line))
    records = [record for record in records if isinstance(record, dict) and "step" in record]
    if not records:
        raise LoadError(f"{directory}/train.jsonl holds no step", why="the run has taken none yet")
    page = draw_report(directory, records, read_config(directory / "config.yaml"))
    try:
        out.write_text(page, encoding="utf-8")
    except OSError as error:
        raise LoadError(f"cannot write {out}", why=error.strerror, fix="name another file with --out") from error
    print(f"wrote {out}")
    return 0


def draw_report(directory: Path, records: Sequence[Mapping[str, Any]], config: TrainConfig) -> str:
    """Returns the page. `records`: the lines of train.jsonl."""
    last, held_out = records[-1], [each for each in records if "eval_loss" in each]
    charts = [
        draw_curves(name, {"training": _points(records, key), "held out": _points(held_out, f"eval_{key}")})
        for key, name in _CURVES.items()
    ]
    parts = [f'<div class="charts">{"".join(charts)}</div>']
    if held_out:
        names = [name for name in held_out[-1] if name.startswith("eval_")]
        rows = [[each["step"], *(f"{each.get(name, math.nan):.4f}" for name in names)] for each in held_out]
        parts.append("<h2>Held out</h2>" + _table(["step", *(name.removeprefix("eval_") for name in names)], rows))
    memory = directory / "ranks.json"
    used = json.loads(memory.read_text(encoding="utf-8"))["memory_bytes"] if memory.exists() else []
    parts.append(f"<h2>Layout {html.escape(config.layout)}</h2>{_draw_ranks(MeshShape.parse(config.layout), used)}")
    parts.append(f"<h2>Plan, and what it predicts</h2><pre>{html.escape(_describe_plan(directory))}</pre>")
    if (timeline := directory / "timeline.svg").exists():
        parts.append(f"<h2>Pipeline</h2>{timeline.read_text(encoding='utf-8')}")
    values = [[key, value] for key, value in flat_config(config).items()]
    parts.append(f"<details><summary>Configuration</summary>{_table(['key', 'value'], values)}</details>")
    title = html.escape(f"Run {directory}: step {last['step']}, loss {last['loss']:.4f}")
    head = f'<meta charset="utf-8"><title>{title}</title><style>{_STYLE}</style>'
    return f'<!doctype html><html lang="en"><head>{head}</head><body><h1>{title}</h1>{"".join(parts)}</body></html>'


def _points(records: Sequence[Mapping[str, Any]], key: str) -> list[tuple[float, float]]:
    return [(each["step"], each[key]) for each in records if math.isfinite(each.get(key, math.nan))]


def draw_curves(name: str, curves: Mapping[str, Sequence[tuple[float, float]]]) -> str:
    """Returns an SVG with one line for each curve of (x, y), and its last value."""
    shown = {label: points for label, points in curves.items() if points}
    if not shown:
        return ""
    xs, ys = zip(*(point for points in shown.values() for point in points), strict=True)
    (left, right), (low, high) = (min(xs), max(xs)), (min(ys), max(ys))

    def place(x: float, y: float) -> str:
        across = (x - left) / ((right - left) or 1)
        up = (y - low) / ((high - low) or 1)
        return f"{_LEFT + across * (_WIDTH - _LEFT - 10):.1f},{_HEIGHT - 25 - up * (_HEIGHT - 55):.1f}"

    drawn = [f'<text x="{_LEFT}" y="16" font-weight="bold">{html.escape(name)}</text>']
    for y, value in ((_HEIGHT - 22, low), (34, high)):
        drawn.append(f'<text x="{_LEFT - 6}" y="{y}" text-anchor="end">{value:.4g}</text>')
    drawn.append(f'<text x="{_WIDTH - 10}" y="{_HEIGHT - 6}" text-anchor="end">step {right:g}</text>')
    for number, (label, points) in enumerate(shown.items()):
        colour, line = _COLOURS[number], " ".join(place(*point) for point in points)
        drawn.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
        words = f"{label} {points[-1][1]:.4g}"
        drawn.append(f'<text x="{_WIDTH - 10}" y="{16 + 14 * number}" text-anchor="end" fill="{colour}">{words}</text>')
    return f'<svg width="{_WIDTH}" height="{_HEIGHT}" font-size="12">{"".join(drawn)}</svg>'


def _draw_ranks(shape: MeshShape, used: Sequence[int]) -> str:
    """Returns a table of the ranks: where they are along each axis, and the most memory that they took."""
    axes = [axis for axis in AXES if shape.size(axis) > 1]
    rows = []
    for rank in range(shape.world_size):
        coords, took = shape.coords(rank), f"{used[rank] / 2**30:.2f} GiB" if rank < len(used) else ""
        width = 200 * used[rank] / max(used) if took else 0
        bar = f'<svg width="200" height="10"><rect width="{width:.0f}" height="10" fill="{_COLOURS[0]}"/></svg>'
        rows.append([rank, *(coords[axis] for axis in axes), took, bar])
    return _table(["rank", *axes, "most memory", ""], rows)


def _table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Returns a table. Cells that are drawings stay as they are."""

    def cells(row: Sequence[Any], tag: str) -> str:
        texts = [cell if str(cell).startswith("<svg") else html.escape(str(cell)) for cell in row]
        return "<tr>" + "".join(f"<{tag}>{text}</{tag}>" for text in texts) + "</tr>"

    return f"<table>{cells(head, 'th')}{''.join(cells(row, 'td') for row in rows)}</table>"


def _describe_plan(directory: Path) -> str:
    """Returns what `shardwise plan` prints for the run, or its error."""
    from shardwise.cli.main import main  # which imports this module

    printed, said = io.StringIO(), io.StringIO()
    with redirect_stdout(printed), redirect_stderr(said):
        main(["plan", str(directory / "config.yaml")])
    return printed.getvalue() or said.getvalue()
