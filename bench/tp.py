"""Training steps side by side: Shardwise, transformers' own tensor parallelism, and one process.

    python bench/tp.py                          both sizes, on 2 CPU ranks of its own (some minutes)
    python bench/tp.py --quick                  a tiny size, seconds: does everything still run?
    python bench/tp.py --rounds 40 --json out.json
    python bench/tp.py --compile inductor       also with every block compiled, ours and transformers' (minutes more)
    torchrun --nproc-per-node 4 bench/tp.py     the same on the ranks of a launcher

A step is forward, loss and backward of a llama in fp32 (with `--optimizer adamw`, its update too). Every round runs
each contender once, so ratios are taken between neighbours in time; the table shows their medians, and the quartiles.
All contenders load the same weights and must report the same loss. One process has as many threads as a rank has: one.

"Busy" is the same ratio of processor time, summed over ranks: a machine that does other work too disturbs it less.
"MiB" is what a rank sends in a step with ring collectives: 2 (n-1)/n of the bytes of an all-reduce, (n-1)/n of
those of an all-gather or reduce-scatter. The least a block-wise split can do is two all-reduces of the hidden states a
layer and direction, one for the embedding and one for the head: 4 layers + 2.
"""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from sidebyside.ranks import is_rank, main_that_stops, on_ranks, world_size
from sidebyside.report import describe_machine, mark, paired_ratio, shown_ratio, write_json
from sidebyside.steps import ONE, OURS, THEIRS, Seen, Size, measure

SIZES = (
    Size(name="hidden 512, batch 2 x 256", hidden=512, rows=2, length=256, target=0.80),
    Size(name="hidden 256, batch 1 x 128", hidden=256, rows=1, length=128, target=0.65),
)
QUICK = (Size(name="hidden 64, batch 2 x 32", hidden=64, layers=2, vocabulary=512, rows=2, length=32),)


def judge(size: Size, per_rank: list[dict[str, Seen]]) -> dict[str, Any]:
    """The record of one size: ratios, counts and whether the losses agree. A step takes as long as its slowest rank."""
    seconds = {
        name: [max(times) for times in zip(*(rank[name].seconds for rank in per_rank), strict=True)]
        for name in per_rank[0]
    }
    busy = {
        name: [sum(times) for times in zip(*(rank[name].busy_seconds for rank in per_rank), strict=True)]
        for name in per_rank[0]
    }
    first = per_rank[0]
    for name, seen in first.items():
        if not math.isclose(seen.loss, first[ONE].loss, rel_tol=1e-5):
            raise SystemExit(
                f"{name} computes a loss of {seen.loss}, one process {first[ONE].loss}: nothing to compare"
            )
    ranks = len(per_rank)
    return {
        "size": asdict(size),
        "ranks": ranks,
        "rounds": len(seconds[OURS]),
        "loss": first[ONE].loss,
        "minimum": {
            "calls": 4 * size.layers + 2,
            "wire_bytes": _wire_bytes({"all_reduce": (4 * size.layers + 2) * size.hidden_bytes}, ranks),
        },
        "contenders": {
            name: {
                "to_transformers": paired_ratio(seconds[name], seconds[THEIRS]),
                "busy_to_transformers": paired_ratio(busy[name], busy[THEIRS]),
                "to_one_process": paired_ratio(seconds[name], seconds[ONE]),
                "calls": seen.calls,
                "wire_bytes": _wire_bytes(seen.comm_bytes, ranks),
                "compiled": seen.compiled,
            }
            for name, seen in first.items()
        },
    }


def _wire_bytes(nbytes: Mapping[str, int], ranks: int) -> float:
    """What a rank sends with ring collectives."""
    share = (ranks - 1) / ranks
    return sum((2 * share if name == "all_reduce" else share) * count for name, count in nbytes.items())


def show(record: Mapping[str, Any], console: Console) -> None:
    """The record as a table."""
    minimum, target = record["minimum"], record["size"]["target"]
    title = f"{record['size']['name']}, tp{record['ranks']}, {record['rounds']} rounds"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("step time", no_wrap=True)
    for heading in ("/ transformers", "busy", "/ one process", "calls", "MiB"):
        table.add_column(heading, justify="right", no_wrap=True)
    for name, seen in record["contenders"].items():
        table.add_row(
            name,
            shown_ratio(seen["to_transformers"]),
            f"{seen['busy_to_transformers']['median']:.2f}",
            shown_ratio(seen["to_one_process"]),
            str(seen["calls"]),
            f"{seen['wire_bytes'] / 2**20:.2f}",
        )
    table.add_row("minimum", "", "", "", str(minimum["calls"]), f"{minimum['wire_bytes'] / 2**20:.2f}")
    console.print(table)
    for name, seen in record["contenders"].items():
        if seen["compiled"]:
            console.print(f"{name}: {seen['compiled']}", highlight=False)
    if target is not None:
        reached = record["contenders"][OURS]["to_transformers"]["median"]
        console.print(f"shardwise / transformers: {mark(reached, target)}\n")


def main() -> int:
    arguments = _parse()
    console = Console(quiet=is_rank() and os.environ["RANK"] != "0")
    devices = [arguments.device] if arguments.device != "all" else ["cpu", "cuda"]
    sizes = [replace(size, mlp=arguments.mlp) for size in (QUICK if arguments.quick else SIZES)]
    records = []
    for device in devices:
        if device == "cuda" and torch.cuda.device_count() < world_size():
            console.print(
                f"device mode skipped: {torch.cuda.device_count()} GPUs here, {world_size()} ranks need one each"
            )
            continue
        for size in sizes:
            with console.status(f"{size.name} on {device}, {arguments.rounds} rounds"):
                seen = on_ranks(
                    measure,
                    size,
                    world_size(),
                    arguments.rounds,
                    device,
                    arguments.optimizer,
                    arguments.compile,
                    device=device,
                )
            record = {
                "on": describe_machine(device),
                "optimizer": arguments.optimizer,
                "compile": arguments.compile,
                **judge(size, seen),
            }
            show(record, console)
            records.append(record)
    if not console.quiet:
        write_json(arguments.json, {"bench": "tp", "records": records})
    return 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30, help="how often each contender runs (default: %(default)s)")
    parser.add_argument(
        "--mlp", type=float, default=Size.mlp, help="intermediate / hidden size (default: LLaMA's, %(default)s)"
    )
    parser.add_argument("--compile", metavar="BACKEND", help="of torch.compile, such as inductor or aot_eager")
    parser.add_argument("--quick", action="store_true", help="one tiny size; its ratios mean nothing")
    parser.add_argument("--optimizer", choices=("none", "adamw"), default="none", help="what a step ends with")
    parser.add_argument(
        "--device", choices=("all", "cpu", "cuda"), default="all", help="default: CPU, then GPUs where there are enough"
    )
    parser.add_argument("--json", metavar="FILE", help="write the results there too")
    arguments = parser.parse_args()
    if arguments.rounds < 2:
        parser.error("--rounds must be at least 2: quartiles need neighbours")
    return arguments


if __name__ == "__main__":
    main_that_stops(main)
