"""Data-parallel training steps side by side: Shardwise, FSDP2 by hand on the same units, and DDP.

    python bench/fsdp.py                     fsdp2 on 2 CPU ranks, fsdp2.tp2 on 4 (some minutes)
    python bench/fsdp.py --quick             a tiny size, seconds: does everything still run?
    python bench/fsdp.py --layouts fsdp2 --rounds 40 --json out.json

A step is forward, loss, backward and AdamW of a llama in fp32. Every round runs each contender once, so ratios are
taken between neighbours in time; the table shows their medians, and the quartiles. All contenders start from the same
weights and must report the same loss. On fsdp2.tp2 the contenders by hand use all four ranks as data-parallel ones.

"Busy" is the ratio of processor time, summed over ranks: a machine that does other work too disturbs it less. "held" is
what a rank keeps of parameters, gradients and optimizer states after a step, and "expected" what shardwise.estimate
says of it.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from sidebyside.data import BY_HAND, OURS, Held, measure_data
from sidebyside.ranks import main_that_stops
from sidebyside.report import describe_machine, mark, paired_ratio, shown_ratio, write_json
from sidebyside.steps import Size

from shardwise.ranks.spawn import spawn
from shardwise.topology.shape import MeshShape

SIZE = Size(name="hidden 256, batch 4 x 128", hidden=256, rows=4, length=128, layers=6)
QUICK = Size(name="hidden 64, batch 4 x 32", hidden=64, layers=2, vocabulary=512, rows=4, length=32)


def judge(size: Size, layout: str, per_rank: list[dict[str, Held]]) -> dict[str, Any]:
    """The record of one layout. A step takes as long as its slowest rank."""
    first = per_rank[0]
    for name, seen in first.items():
        if not math.isclose(seen.loss, first[BY_HAND].loss, rel_tol=1e-5):
            raise SystemExit(f"{name} computes a loss of {seen.loss}, FSDP2 by hand {first[BY_HAND].loss}")

    def over_ranks(name: str, kind: str, join: Any) -> list[float]:
        return [join(times) for times in zip(*(getattr(rank[name], kind) for rank in per_rank), strict=True)]

    return {
        "size": asdict(size),
        "layout": layout,
        "rounds": len(first[OURS].seconds),
        "loss": first[OURS].loss,
        "contenders": {
            name: {
                "to_by_hand": paired_ratio(over_ranks(name, "seconds", max), over_ranks(BY_HAND, "seconds", max)),
                "busy_to_by_hand": paired_ratio(
                    over_ranks(name, "busy_seconds", sum), over_ranks(BY_HAND, "busy_seconds", sum)
                ),
                "calls": seen.calls,
                "comm_bytes": seen.comm_bytes,
                "held_bytes": max(rank[name].held_bytes for rank in per_rank),
                "expected_bytes": seen.expected_bytes,
            }
            for name, seen in first.items()
        },
    }


def show(record: Mapping[str, Any], console: Console) -> None:
    """The record as a table."""
    title = f"{record['size']['name']}, {record['layout']}, {record['rounds']} rounds"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("step", no_wrap=True)
    for heading in ("/ by hand", "busy / by hand", "gathers", "scatters", "reduces", "MiB", "held MiB", "expected"):
        table.add_column(heading, justify="right", no_wrap=True)
    for name, seen in record["contenders"].items():
        calls, expected = seen["calls"], seen["expected_bytes"]
        table.add_row(
            name,
            shown_ratio(seen["to_by_hand"]),
            shown_ratio(seen["busy_to_by_hand"]),
            *(str(calls[kind]) for kind in ("all_gather", "reduce_scatter", "all_reduce")),
            f"{sum(seen['comm_bytes'].values()) / 2**20:.2f}",
            f"{seen['held_bytes'] / 2**20:.2f}",
            "" if expected is None else f"{expected / 2**20:.2f}",
        )
    console.print(table)
    if record["layout"] == "fsdp2":
        busy = record["contenders"][OURS]["busy_to_by_hand"]["median"]
        console.print(f"shardwise / FSDP2 by hand, processor time: {mark(busy, 1.03)}\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30, help="how often each contender runs (default: %(default)s)")
    parser.add_argument("--layouts", nargs="+", default=["fsdp2", "fsdp2.tp2"])
    parser.add_argument("--quick", action="store_true", help="one tiny size; its ratios mean nothing")
    parser.add_argument("--json", metavar="FILE", help="write the results there too")
    arguments = parser.parse_args()
    if arguments.rounds < 2:
        parser.error("--rounds must be at least 2: quartiles need neighbours")
    console, size, records = Console(width=130), QUICK if arguments.quick else SIZE, []
    for layout in arguments.layouts:
        ranks = MeshShape.parse(layout).world_size
        with console.status(f"{size.name} on {layout}, {arguments.rounds} rounds"):
            seen = spawn(measure_data, ranks, size, layout, arguments.rounds, "cpu", timeout=3600)
        record = {"on": describe_machine("cpu"), **judge(size, layout, seen)}
        show(record, console)
        records.append(record)
    write_json(arguments.json, {"bench": "fsdp", "records": records})
    return 0


if __name__ == "__main__":
    main_that_stops(main)
