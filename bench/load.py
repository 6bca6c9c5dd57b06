"""Loading side by side: Shardwise and transformers' own tensor parallelism, at tp2 on 2 CPU ranks.

    python bench/load.py                        a checkpoint of 720M bf16 parameters, made on the spot (1.4 GB of disk)
    python bench/load.py --quick                a tiny one, seconds: does everything still run?
    python bench/load.py --rounds 15 --directory /scratch --json out.json

Every load has fresh processes, which have done their imports and the rendezvous and nothing else; opening the mesh,
which transformers does inside, counts for both. The contenders take turns, so time ratios are taken between neighbours.
The files are in the page cache, where writing them left them.

Read the ratios so: what a rank asks of the checkpoint, and the most anonymous memory it takes, are measured against the
bytes of the parameters it ends up with. transformers leaves the parameters mapped to the files and reads them at first
use (training then copies every page it writes to); Shardwise returns parameters that own their memory. "Busy" is the
time ratio counted in processor time: a machine that does other work too disturbs it less.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from sidebyside.loading import OURS, THEIRS, measure_load, write_checkpoint
from sidebyside.ranks import is_rank, main_that_stops
from sidebyside.report import describe_machine, mark, paired_ratio, shown_ratio, write_json
from transformers import LlamaConfig

from shardwise.ranks.spawn import spawn

MOST_REQUESTED, MOST_PEAK, MOST_TIME = 1.05, 1.10, 1.50


def build_config(hidden: int, layers: int, vocabulary: int) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=hidden,
        intermediate_size=hidden * 8 // 3,
        num_hidden_layers=layers,
        num_attention_heads=16,
        num_key_value_heads=8,
        vocab_size=vocabulary,
        dtype="bfloat16",
    )


TINY = build_config(96, 2, 512)
LARGE = build_config(1536, 24, 32000)
LARGE_BYTES = 1_500_000_000


def judge(rounds: Mapping[str, list[list[dict[str, float]]]]) -> dict[str, Any]:
    """Ratios of each contender, the worst rank's; a load takes as long as its slowest rank."""

    def median(name: str, value: Any) -> float:
        return statistics.median(max(value(rank) for rank in ranks) for ranks in rounds[name])

    seconds = {name: [max(rank["seconds"] for rank in ranks) for ranks in loads] for name, loads in rounds.items()}
    busy = {name: [sum(rank["busy_seconds"] for rank in ranks) for ranks in loads] for name, loads in rounds.items()}
    return {
        name: {
            "requested_to_owned": median(name, lambda rank: rank["requested_bytes"] / rank["owned_bytes"]),
            "peak_to_owned": median(name, lambda rank: rank["peak_bytes"] / rank["owned_bytes"]),
            "largest_to_owned": median(name, lambda rank: rank["largest_bytes"] / rank["owned_bytes"]),
            "time_to_transformers": paired_ratio(seconds[name], seconds[THEIRS]),
            "busy_to_transformers": paired_ratio(busy[name], busy[THEIRS]),
        }
        for name in rounds
    }


def show(record: Mapping[str, Any], console: Console) -> None:
    """The record as a table, and each target with what was reached."""
    title = f"{record['checkpoint_bytes'] / 1e6:.0f} MB in {record['files']} files, tp2, {record['rounds']} rounds"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("load")
    for heading in ("requested / owned", "peak / owned", "time / transformers", "busy"):
        table.add_column(heading, justify="right", no_wrap=True)
    for name, seen in record["contenders"].items():
        requested = f"{seen['requested_to_owned']:.2f}" if seen["requested_to_owned"] else "the kernel's"
        time = shown_ratio(seen["time_to_transformers"])
        busy = f"{seen['busy_to_transformers']['median']:.2f}"
        table.add_row(name, requested, f"{seen['peak_to_owned']:.2f}", time, busy)
    console.print(table)
    ours = record["contenders"][OURS]
    largest = ours["largest_to_owned"]
    console.print(f"requested / owned: {mark(ours['requested_to_owned'], MOST_REQUESTED)}")
    console.print(
        f"peak / owned, the largest slice ({largest:.2f}) aside: {mark(ours['peak_to_owned'] - largest, MOST_PEAK)}"
    )
    console.print(f"time / transformers: {mark(ours['time_to_transformers']['median'], MOST_TIME)}\n")


def main() -> int:
    arguments = _parse()
    console = Console()
    with tempfile.TemporaryDirectory(prefix="shardwise-bench-", dir=arguments.directory) as made:
        free = shutil.disk_usage(made).free
        if not arguments.quick and free < 2 * LARGE_BYTES:
            sys.exit(
                f"{free / 1e9:.1f} GB free at {made}, {2 * LARGE_BYTES / 1e9:.1f} wanted: pass another --directory"
            )
        checkpoint = Path(made, "checkpoint")
        with console.status("writing the checkpoint"):
            config, max_shard_size = (TINY, "100KB") if arguments.quick else (LARGE, "300MB")
            (nbytes,) = spawn(write_checkpoint, 1, config, str(checkpoint), max_shard_size, timeout=600)
        rounds: dict[str, list[list[dict[str, float]]]] = {OURS: [], THEIRS: []}
        for number in range(arguments.rounds):
            with console.status(f"round {number + 1} of {arguments.rounds}"):
                for name, loads in rounds.items():
                    loads.append(spawn(measure_load, 2, name, str(checkpoint), timeout=300))
        record = {
            "bench": "load",
            "on": describe_machine("cpu"),
            "checkpoint_bytes": nbytes,
            "files": len(list(checkpoint.glob("*.safetensors"))),
            "rounds": arguments.rounds,
            "contenders": judge(rounds),
        }
    show(record, console)
    write_json(arguments.json, record)
    return 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9, help="how often each contender loads (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="a tiny checkpoint; its ratios mean nothing")
    parser.add_argument("--directory", metavar="DIR", help="where the checkpoint is made (default: the system's)")
    parser.add_argument("--json", metavar="FILE", help="write the results there too")
    arguments = parser.parse_args()
    if arguments.rounds < 2:
        parser.error("--rounds must be at least 2: quartiles need neighbours")
    if is_rank():
        parser.error("every load starts ranks of its own: run it without torchrun")
    if not Path("/proc/self/status").exists():
        parser.error("memory is read from /proc, which this system does not have")
    return arguments


if __name__ == "__main__":
    main_that_stops(main)
