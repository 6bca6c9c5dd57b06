"""Random legal configurations of every text architecture, each proved against the unsplit model; prints what it finds.

    python bench/fuzz.py                                       300 configurations at tp2; resumes where it was stopped
    python bench/fuzz.py --layout tp4 --number 100
    python bench/fuzz.py --layout tp2 --sequence-parallel --number 100
    python bench/fuzz.py --layout fsdp2.tp2 --number 100
    python bench/fuzz.py --layout pp2 --number 60
    python bench/fuzz.py --only mamba2 --again                 those of one architecture, as they are now

A configuration is right (loss, logits, every gradient, parameters after three steps, replicas, at the tolerances of
`shardwise.verify`), or refused by an error that says why; anything else is a fault, and the exit code says so.
"""

from __future__ import annotations

import argparse
import collections
import json
import sys
from pathlib import Path
from typing import Any

import transformers
from rich.progress import Progress
from sweep.fuzz import FuzzCase, draw_cases, prove_random

ROOT = Path(__file__).resolve().parent.parent


def main() -> int:
    """Runs the cases; see the module's docstring."""
    arguments = _arguments()
    transformers.logging.set_verbosity_error()
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    cases = draw_cases(
        arguments.number, layout=arguments.layout, sequence_parallel=arguments.sequence_parallel, seed=arguments.seed
    )
    if arguments.only:
        cases = [case for case in cases if case.model_type in arguments.only]
    lines = arguments.output.read_text().splitlines() if arguments.output.exists() else []
    rows = [row for row in map(json.loads, lines) if any(_is_of(row, case) for case in cases)]
    if arguments.again:
        rows = [row for row in rows if row["result"] in arguments.keep]
    todo = [case for case in cases if not any(_is_of(row, case) for row in rows)]
    rows += _prove_all(todo, arguments)
    counts = collections.Counter(row["result"] for row in rows)
    print(dict(counts))
    return int(bool(counts["wrong"] or counts["error"]))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layout", default="tp2")
    parser.add_argument("--sequence-parallel", action="store_true")
    parser.add_argument("--number", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0, help="of the cases; each has a seed of its own")
    parser.add_argument("--only", nargs="*", help="model types")
    parser.add_argument("--again", action="store_true", help="forget what earlier runs found for these cases")
    parser.add_argument("--keep", nargs="*", default=[], help="results that --again keeps, such as ok refused")
    parser.add_argument("--limit", type=float, default=120.0, help="seconds for one configuration")
    parser.add_argument("--output", type=Path, default=ROOT / "outputs" / "fuzz.jsonl")
    return parser.parse_args()


def _is_of(row: dict[str, Any], case: FuzzCase) -> bool:
    return all(row.get(name) == value for name, value in vars(case).items())


def _prove_all(todo: list[FuzzCase], arguments: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    with arguments.output.open("a") as file, Progress() as progress:
        for case in progress.track(todo, description=f"fuzzing {arguments.layout}"):
            row = prove_random(case, timeout_seconds=arguments.limit)
            rows.append(row)
            file.write(json.dumps(row) + "\n")
            file.flush()
            if row["result"] in ("wrong", "error"):
                progress.console.print(f"{row['result']} {case}\n   {row['changes']}\n   {row['cause']}", markup=False)
    return rows


if __name__ == "__main__":
    sys.exit(main())
