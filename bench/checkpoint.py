"""Checkpoints side by side: Shardwise, torch's DCP and transformers, a llama with AdamW at fsdp2 on 2 CPU ranks.

    python bench/checkpoint.py                  605 MB of weights and states, written to a temporary directory
    python bench/checkpoint.py --quick          a tiny one: does everything still run?
    python bench/checkpoint.py --rounds 9 --directory /scratch --json out.json

Saves and loads take turns on the same ranks, so ratios are taken between neighbours. Ours verify checksums, and flush
what they write; so does DCP's writer. transformers' `save_pretrained(distributed_checkpoint=True)` writes weights
alone, and its seconds per GB are of those. The stall of an asynchronous save is held against copying the same tensors
into buffers that are there already. Files are in the page cache when they are read.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from typing import Any

from rich.console import Console
from rich.table import Table
from sidebyside.checkpointing import measure_checkpoints
from sidebyside.ranks import main_that_stops
from sidebyside.report import describe_machine, mark, paired_ratio, shown_ratio, write_json

from shardwise.ranks.spawn import spawn

TINY = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 128}
LARGE = {
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 4,
    "num_attention_heads": 12,
    "vocab_size": 14000,
}
RATIOS = {"save": "DCP save", "load": "DCP load", "load unverified": "DCP load", "async stall": "pure copy"}
MOST = {"save": 1.10, "load": 1.10, "async stall": 1.20}


def judge(ranks: list[dict[str, list[dict[str, float]]]]) -> dict[str, Any]:
    """A save or load takes as long as its slowest rank; processor time is that of all ranks."""
    names = [name for name in ranks[0] if name != "bytes"]
    num_bytes = sum(rank["bytes"][0]["bytes"] for rank in ranks)
    sizes = {"transformers save": sum(rank["bytes"][0]["weights"] for rank in ranks)}
    seconds = {name: [max(each["seconds"] for each in takes) for takes in zip(*(r[name] for r in ranks), strict=True)]
               for name in names}  # fmt: skip
    busy = {name: [sum(each["busy_seconds"] for each in takes) for takes in zip(*(r[name] for r in ranks), strict=True)]
            for name in names}  # fmt: skip
    growth = {name: max(each["peak_growth_bytes"] for rank in ranks for each in rank[name]) for name in names}
    contenders = {
        name: {
            "seconds": statistics.median(seconds[name]),
            "seconds_per_gb": statistics.median(seconds[name]) / sizes.get(name, num_bytes) * 1e9,
            "busy_per_gb": statistics.median(busy[name]) / sizes.get(name, num_bytes) * 1e9,
            "peak_growth_bytes": growth[name],
            **({"ratio": paired_ratio(seconds[name], seconds[RATIOS[name]])} if name in RATIOS else {}),
            **({"busy_ratio": paired_ratio(busy[name], busy[RATIOS[name]])} if name in RATIOS else {}),
        }
        for name in names
    }
    return {"num_bytes": num_bytes, "contenders": contenders}


def show(record: dict[str, Any], console: Console) -> None:
    table = Table(title=f"{record['num_bytes'] / 1e6:.0f} MB, {record['layout']}, {record['rounds']} rounds")
    for column in ("", "seconds", "s/GB", "busy s/GB", "extra MiB", "time to", "busy to"):
        table.add_column(column, justify="left" if not column else "right")
    for name, each in record["contenders"].items():
        table.add_row(
            name,
            f"{each['seconds']:.3f}",
            f"{each['seconds_per_gb']:.2f}",
            f"{each['busy_per_gb']:.2f}",
            f"{each['peak_growth_bytes'] / 2**20:.0f}",
            shown_ratio(each["ratio"]) if "ratio" in each else "",
            shown_ratio(each["busy_ratio"]) if "busy_ratio" in each else "",
        )
    console.print(table)
    for name, most in MOST.items():
        time, busy = (record["contenders"][name][kind]["median"] for kind in ("ratio", "busy_ratio"))
        console.print(f"{name} to {RATIOS[name]}: time {mark(time, most)}, processor time {mark(busy, most)}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a tiny model")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--layout", default="fsdp2", help="of two data-parallel ranks: DCP knows no tp of ours")
    parser.add_argument("--directory", help="where checkpoints are written; by default a temporary directory")
    parser.add_argument("--json", help="file for the record")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.directory) as base:
        values = TINY if options.quick else LARGE
        ranks = spawn(measure_checkpoints, 2, options.layout, values, options.rounds, base, timeout=3600.0)
    record = {"layout": options.layout, "rounds": options.rounds, **judge(ranks), **describe_machine("cpu")}
    show(record, Console(soft_wrap=True))
    write_json(options.json, record)
    return 0


if __name__ == "__main__":
    main_that_stops(main)
