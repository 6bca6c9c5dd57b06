"""How long the verbs of the command line take to start, beside `import torch, transformers`.

    python bench/start.py                 every verb on a tiny llama, one step of training at tp1 and at tp2
    python bench/start.py --quick         one round of the first verbs: does everything still run?
    python bench/start.py --rounds 15 --json out.json

Every run is a fresh process; the import and each verb take turns, so time ratios are taken between neighbours. Files
are in the page cache after a first round that does not count, and plans in the cache of the hub. "Busy" is the ratio of
processor time of the process itself: a machine that does other work disturbs it less. The ranks of the last two verbs
are not in it.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from sidebyside.ranks import main_that_stops
from sidebyside.report import describe_machine, paired_ratio, shown_ratio, write_json
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

IMPORT = "import torch, transformers"
MODEL = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


def write_run(directory: Path) -> Path:
    """Writes a run of one step; returns its YAML file (JSON is YAML)."""
    (directory / "corpus").mkdir()
    (directory / "corpus" / "a.txt").write_text("the quick brown fox " * 500)
    tokenizer = Tokenizer(
        models.BPE({each: number for number, each in enumerate(pre_tokenizers.ByteLevel.alphabet())}, [])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="!").save_pretrained(directory / "tokenizer")
    run = {
        "model": {"config": MODEL, "tokenizer": str(directory / "tokenizer")},
        "data": {"path": str(directory / "corpus"), "seq_length": 32},
        "log": {"dir": str(directory / "log")},
        "steps": 1,
    }
    path = directory / "run.yaml"
    path.write_text(json.dumps(run))
    return path


def verbs_of(run: Path) -> dict[str, list[str]]:
    """Arguments of `shardwise` by the name of the measurement."""
    return {
        "--help": ["--help"],
        "inspect": ["inspect", str(run.parent / "checkpoints")],
        "check": ["check", str(run)],
        "plan": ["plan", str(run)],
        "plan tp2": ["plan", str(run), "layout=tp2"],
        "train, one step, tp1": ["train", str(run)],
        "train, one step, tp2": ["train", str(run), "layout=tp2"],
        "verify tp2": ["verify", str(run), "layout=tp2"],
    }


def measure(command: Sequence[str]) -> tuple[float, float]:
    """Seconds and processor seconds of a process."""
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    seconds, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    if ended.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{ended.stdout}{ended.stderr}")
    return seconds, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def show(record: Mapping[str, Any], console: Console) -> None:
    """The record as a table."""
    title = f"start beside `{IMPORT}` ({record['import_seconds']:.2f} s), {record['rounds']} rounds"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("shardwise")
    for heading in ("time / import", "busy"):
        table.add_column(heading, justify="right", no_wrap=True)
    for name, seen in record["verbs"].items():
        table.add_row(name, shown_ratio(seen["time"]), f"{seen['busy']['median']:.2f}")
    console.print(table)


def main() -> int:
    arguments = _parse()
    console = Console()
    os.environ["OMP_NUM_THREADS"] = "1"
    shardwise, imports = [sys.executable, "-m", "shardwise"], [sys.executable, "-c", IMPORT]
    with tempfile.TemporaryDirectory(prefix="shardwise-bench-") as made:
        run = write_run(Path(made))
        saved = Path(made, "checkpoints")  # which `inspect` reads
        measure([*shardwise, "train", str(run), f"checkpoint.dir={saved}"])
        verbs = dict(list(verbs_of(run).items())[: 2 if arguments.quick else None])
        pairs: dict[str, list[tuple[tuple[float, float], tuple[float, float]]]] = {name: [] for name in verbs}
        for number in range(arguments.rounds + (not arguments.quick)):
            with console.status(f"round {number} of {arguments.rounds}"):
                for name, words in verbs.items():
                    pairs[name].append((measure([*shardwise, *words]), measure(imports)))
    counted = {name: found if arguments.quick else found[1:] for name, found in pairs.items()}
    record = {
        "bench": "start",
        "on": describe_machine("cpu"),
        "rounds": arguments.rounds,
        "import_seconds": min(base[0] for found in counted.values() for _, base in found),
        "verbs": {
            name: {
                kind: paired_ratio([ours[at] for ours, _ in found], [base[at] for _, base in found])
                for at, kind in enumerate(("time", "busy"))
            }
            for name, found in counted.items()
        },
    }
    show(record, console)
    write_json(arguments.json, record)
    return 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7, help="how often each verb runs (default: %(default)s)")
    parser.add_argument(
        "--quick", action="store_true", help="one round, of verbs without torch; its ratios mean nothing"
    )
    parser.add_argument("--json", metavar="FILE", help="write the results there too")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.rounds = 1
    if arguments.rounds < 1:
        parser.error("--rounds must be at least 1")
    return arguments


if __name__ == "__main__":
    main_that_stops(main)
