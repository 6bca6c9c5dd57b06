"""Proves a layout for every architecture of the installed transformers on tiny models; writes docs/architectures.md on
request.

    python bench/architectures.py                          every text architecture at tp2; resumes where it was stopped
    python bench/architectures.py --only bert t5 mamba     a few of them
    python bench/architectures.py --layout tp4 --sequence-parallel
    python bench/architectures.py --tasks base vision audio sequence_classification
    python bench/architectures.py --attention eager        instead of the attention each model chooses
    python bench/architectures.py --adapters all-linear    with LoRA, on simulated ranks: loss and gradients of a step
    python bench/architectures.py --layout pp2             pipelines; so do pp2.tp2 and pp2.fsdp2
    python bench/architectures.py --every-cut              every layer a stage, all in one process: a step, in a second
    python bench/architectures.py --checkpoints            saved at tp2 with AdamW, loaded at fsdp2 and in one process

Each architecture has a time limit of its own, and one that fails, crashes or cannot be built is listed with its cause.
What is found is kept by case (architecture, task, layout, sequence parallelism, attention, version of transformers), so
that sweeps can be stopped, resumed and put together in one table. They take hours; `nice -n 19` lets them run beside
other work.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import tempfile
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

os.environ["HF_HOME"] = tempfile.mkdtemp(prefix="shardwise-sweep-")  # no plan of other code is found again
os.environ["TRANSFORMERS_VERBOSITY"] = "error"

from rich.progress import Progress
from sweep.cases import GROUPS, Case, Variant, cases_of, prove
from sweep.known import TASKS
from sweep.support import write_support
from sweep.table import summarize, write_table

ROOT = Path(__file__).resolve().parent.parent
_STRIDE = 8


def main() -> None:
    """Runs the sweep; see the module's docstring."""
    arguments = _arguments()
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    variant = Variant(
        layout=arguments.layout,
        sequence_parallel=arguments.sequence_parallel,
        attention=arguments.attention,
        adapters=arguments.adapters,
        every_cut=arguments.every_cut,
        checkpoints=arguments.checkpoints,
    )
    cases = cases_of(arguments.tasks, variant)
    if arguments.only:
        cases = [case for case in cases if case.model_type in arguments.only]
    rows = _read(arguments.output)
    if arguments.again:
        rows = [row for row in rows if not any(case.is_row(row) for case in cases)]
        arguments.output.write_text("".join(json.dumps(row) + "\n" for row in rows))
    todo = [case for case in cases if not any(case.is_row(row) for row in rows)]
    rows += _sweep(todo, arguments)
    summarize([row for row in rows if any(case.is_row(row) for case in cases)])
    if arguments.table:
        write_table(rows, arguments.table)
    if arguments.support:
        write_support(rows, arguments.support)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layout", default="tp2")
    parser.add_argument("--sequence-parallel", action="store_true")
    parser.add_argument("--attention", choices=("eager", "sdpa"), default="", help="by default the model chooses")
    parser.add_argument("--adapters", default="", metavar="TARGETS", help="LoRA's target_modules, such as all-linear")
    parser.add_argument("--every-cut", action="store_true", help="every layer a stage, all in one process; no layout")
    parser.add_argument("--checkpoints", action="store_true", help="compare what is saved with what others load")
    parser.add_argument("--tasks", nargs="+", choices=(*GROUPS, *TASKS), default=["text"])
    parser.add_argument("--only", nargs="*", help="model types")
    parser.add_argument("--limit", type=float, default=180.0, help="seconds for one architecture")
    parser.add_argument("--jobs", type=int, default=2, help="architectures proved at a time")
    parser.add_argument("--again", action="store_true", help="forget what earlier runs found for these cases")
    parser.add_argument("--table", type=Path, help="where to write the tables of all sweeps")
    parser.add_argument("--support", type=Path, help="where to write which model types passed, as JSON")
    parser.add_argument("--output", type=Path, default=ROOT / "outputs" / "architectures.jsonl")
    return parser.parse_args()


def _read(path: Path) -> list[dict[str, Any]]:
    """The rows of earlier runs; those that do not say what they are of are left out."""
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [row for row in rows if "transformers_version" in row]


def _sweep(todo: list[Case], arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """The rows of the cases, each written to the output as it is found."""
    rows: list[dict[str, Any]] = []
    todo = [case for first in range(_STRIDE) for case in todo[first::_STRIDE]]  # so that faults show early
    pool = ProcessPoolExecutor(arguments.jobs, mp_context=multiprocessing.get_context("spawn"))
    with pool, arguments.output.open("a") as file, Progress() as progress:
        proofs = [pool.submit(prove, case, timeout_seconds=arguments.limit) for case in todo]
        shown = f"proving {todo[0].variant}" if todo else "nothing left to prove"
        for proof in progress.track(as_completed(proofs), total=len(todo), description=shown):
            row = proof.result()
            rows.append(row)
            file.write(json.dumps(row) + "\n")
            file.flush()
            if row["result"] != "ok":
                cause = row["cause"].splitlines()[0][:160]
                said = f"{row['result']:8} {row['model_type']} {row['class_name']}: {cause}"
                progress.console.print(said, markup=False)
    return rows


if __name__ == "__main__":
    main()
