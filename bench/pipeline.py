"""Pipelines measured: how long ranks wait, and what a step costs beside torch.distributed.pipelining by hand.

    python bench/pipeline.py                 pp2 computing, pp4 sleeping, and a step (some minutes)
    python bench/pipeline.py --quick         tiny sizes, seconds: does everything still run?
    python bench/pipeline.py --timelines DIR --json out.json

The bubble is the share of the ranks' time in which they compute nothing, from the first action of a step to the last
one. Theory is the same schedule where every action of a stage takes as long as it did in the mean and sending takes no
time. Stages that sleep need no cores, so that four of them run side by side on two; those that compute are two.

The step is 1F1B of a llama over pp2, forward, backward and AdamW, with the same layers in both stages: ours, and
torch's own PipelineStage and Schedule1F1B around the same blocks. "Busy" is the ratio of processor time, summed over
ranks.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from sidebyside.ranks import main_that_stops
from sidebyside.report import describe_machine, mark, paired_ratio, shown_ratio, write_json
from sidebyside.stages import BY_HAND, OURS, Bubble, Step, measure_bubbles, measure_step
from sidebyside.steps import Size

from shardwise.ranks.spawn import spawn
from shardwise.schedule.schedule import SCHEDULES

SIZE = Size(name="hidden 256, 16 x 128 in 8 microbatches", hidden=256, rows=16, length=128)
QUICK = Size(name="hidden 64, 8 x 32 in 8 microbatches", hidden=64, layers=2, vocabulary=512, rows=8, length=32)
_MICROBATCHES = 8
_COMPUTING, _SLEEPING = 0.15, 0.10  # how far a bubble may be from theory, relative


def judge(size: Size, per_rank: list[dict[str, Step]]) -> dict[str, Any]:
    """The record of the steps. A step takes as long as its slowest rank; the last rank knows the loss by hand."""
    ours, by_hand = per_rank[-1][OURS].loss, per_rank[-1][BY_HAND].loss
    if not math.isclose(ours, by_hand, rel_tol=1e-5):
        raise SystemExit(f"shardwise computes a loss of {ours}, torch.distributed.pipelining by hand {by_hand}")

    def over_ranks(name: str, kind: str, join: Any) -> list[float]:
        return [join(times) for times in zip(*(getattr(rank[name], kind) for rank in per_rank), strict=True)]

    return {
        "size": asdict(size),
        "num_microbatches": _MICROBATCHES,
        "rounds": len(per_rank[0][OURS].seconds),
        "loss": ours,
        "to_by_hand": paired_ratio(over_ranks(OURS, "seconds", max), over_ranks(BY_HAND, "seconds", max)),
        "busy_to_by_hand": paired_ratio(
            over_ranks(OURS, "busy_seconds", sum), over_ranks(BY_HAND, "busy_seconds", sum)
        ),
    }


def bubbles(console: Console, *, quick: bool, timelines: Path | None) -> list[dict[str, Any]]:
    """Measures and shows the bubbles of every schedule, and keeps their timelines."""
    records = []
    sizes = (("computing", 2, None, _COMPUTING), ("sleeping", 2 if quick else 4, 0.01, _SLEEPING))
    for what, pp_size, sleep, limit in sizes:
        table = Table(title=f"bubble, pp{pp_size} {what}", title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
        for heading in ("schedule", "microbatches", "measured", "theory", "ratio"):
            table.add_column(heading, justify="left" if heading == "schedule" else "right", no_wrap=True)
        names, counts = (SCHEDULES[1:2], (4,)) if quick else (SCHEDULES, (8, 16))
        with console.status(f"bubbles on pp{pp_size}, {what}"):
            found = spawn(measure_bubbles, pp_size, names, pp_size, counts, sleep, timeout=1800)[0]
        for seen in found:
            shown = f"{seen.measured:.1%}", f"{seen.theory:.1%}", _within(seen, limit)
            table.add_row(seen.schedule, str(seen.num_microbatches), *shown)
            keep(seen, what, timelines)
            record = {key: value for key, value in asdict(seen).items() if key not in ("svg", "trace")}
            records.append({"stages": what, "pp_size": pp_size, **record})
        console.print(table)
    return records


def _within(seen: Bubble, limit: float) -> str:
    ratio = seen.measured / seen.theory
    color = "green" if abs(ratio - 1) <= limit else "red"
    return f"[{color}]{ratio:.2f}[/{color}]"


def keep(seen: Bubble, what: str, timelines: Path | None) -> None:
    """Writes the measured timeline as a picture and as a Chrome trace."""
    if timelines is not None:
        timelines.mkdir(parents=True, exist_ok=True)
        file = timelines / f"{what}-{seen.schedule}-{seen.num_microbatches}"
        file.with_suffix(".svg").write_text(seen.svg, encoding="utf-8")
        file.with_suffix(".json").write_text(seen.trace, encoding="utf-8")


def show(record: Mapping[str, Any], console: Console) -> None:
    """The record of the steps in words."""
    console.print(f"{record['size']['name']}, 1F1B over pp2, {record['rounds']} rounds")
    console.print(f"step / by hand {shown_ratio(record['to_by_hand'])}")
    busy = record["busy_to_by_hand"]
    console.print(f"processor time / by hand {shown_ratio(busy)}: {mark(busy['median'], 1.05)}\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30, help="how often each contender runs (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="tiny sizes; their numbers mean nothing")
    parser.add_argument("--timelines", type=Path, metavar="DIR", help="keep measured timelines there, SVG and JSON")
    parser.add_argument("--only", choices=("bubble", "step"), help="measure nothing else")
    parser.add_argument("--json", metavar="FILE", help="write the results there too")
    arguments = parser.parse_args()
    if arguments.rounds < 2:
        parser.error("--rounds must be at least 2: quartiles need neighbours")
    console, found = Console(width=130), {"bench": "pipeline", "on": describe_machine("cpu")}
    if arguments.only != "bubble":
        size = QUICK if arguments.quick else SIZE
        with console.status(f"{size.name}, {arguments.rounds} rounds"):
            seen = spawn(measure_step, 2, size, _MICROBATCHES, arguments.rounds, timeout=3600)
        found["step"] = judge(size, seen)
        show(found["step"], console)
    if arguments.only != "step":
        found["bubbles"] = bubbles(console, quick=arguments.quick, timelines=arguments.timelines)
    write_json(arguments.json, found)
    return 0


if __name__ == "__main__":
    main_that_stops(main)
