"""Proves a layout for every architecture of the installed transformers on tiny twins; writes docs/architectures.md on
request.

    python bench/architectures.py                          every text architecture at tp2; resumes where it was stopped
    python bench/architectures.py --only bert t5 mamba     a few of them
    python bench/architectures.py --layout tp4 --sequence-parallel

Each architecture has a time limit of its own, and one that fails, crashes or cannot be built is listed with its cause.
"""

from __future__ import annotations

import argparse
import collections
import json
import statistics
import time
from pathlib import Path
from typing import Any

import transformers
from rich.progress import Progress

from shardwise.api.proving import Proof
from shardwise.errors import UnsupportedError
from shardwise.proof.parity import Tolerance
from shardwise.proof.twins import architectures, default_config, model_class, shrink_config

ROOT = Path(__file__).resolve().parent.parent
TEXT = ("causal_lm", "masked_lm", "seq2seq_lm")
TOLERANCE = Tolerance(loss=1e-4, logits=1e-3, gradient=1e-2, gradient_floor=1e-6, parameter=1e-3)


def prove(model_type: str, task: str, class_name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """The row of one architecture."""
    row: dict[str, Any] = {"model_type": model_type, "task": task, "class": class_name}
    start = time.perf_counter()
    try:
        config = shrink_config(default_config(model_type, task=task), without_dropout=True)
        proof = Proof(
            config,
            model_class(class_name),
            arguments.layout,
            sequence_parallel=arguments.sequence_parallel,
            tolerance=TOLERANCE,
            num_steps=3,
        )
        report = proof.run(class_name, timeout_seconds=arguments.limit)
    except UnsupportedError as error:
        row |= {"result": "no twin" if "twin" in str(error) else "unsupported", "cause": str(error)}
    except Exception as error:  # noqa: BLE001 - one architecture's failure is a row, not the end
        row |= {"result": "error", "cause": f"{type(error).__name__}: {error}".splitlines()[0][:300]}
    else:
        cause = "" if report.passed else str(report)
        found = report.measurements[0]
        row |= {
            "result": "ok" if report.passed else "wrong",
            "cause": cause,
            "share": round(found.share_split, 4),
            "block_share": round(found.block_share, 4),
            "regions_per_layer": round(found.regions_per_layer, 2),
            "whole": found.whole,
        }
    row["seconds"] = round(time.perf_counter() - start, 2)
    return row


def main() -> None:
    """Runs the sweep; see the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layout", default="tp2")
    parser.add_argument("--sequence-parallel", action="store_true")
    parser.add_argument("--only", nargs="*", help="model types")
    parser.add_argument("--limit", type=float, default=60.0, help="seconds for one architecture")
    parser.add_argument("--anew", action="store_true", help="forget what an earlier run found")
    parser.add_argument("--table", type=Path, help="where to write the Markdown table")
    parser.add_argument("--output", type=Path, default=ROOT / "outputs" / "architectures.jsonl")
    arguments = parser.parse_args()
    transformers.logging.set_verbosity_error()
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    if arguments.anew:
        arguments.output.unlink(missing_ok=True)
    rows = [json.loads(line) for line in arguments.output.read_text().splitlines()] if arguments.output.exists() else []
    known = {(row["model_type"], row["task"], row["class"]) for row in rows}
    todo = [each for each in architectures(*TEXT) if each not in known]
    if arguments.only:
        todo = [each for each in todo if each[0] in arguments.only]
    with arguments.output.open("a") as file, Progress() as progress:
        for model_type, task, name in progress.track(todo, description=f"proving {arguments.layout}"):
            row = prove(model_type, task, name, arguments)
            rows.append(row)
            file.write(json.dumps(row) + "\n")
            file.flush()
            if row["result"] != "ok":
                progress.console.print(f"{row['result']:8} {model_type} {name}: {row['cause'].splitlines()[0][:120]}")
    summarize(rows)
    if arguments.table:
        write_table(rows, arguments.layout, arguments.table)


def summarize(rows: list[dict[str, Any]]) -> None:
    """Prints how many passed and how much of them is split."""
    print(dict(collections.Counter(row["result"] for row in rows)))
    shares = sorted(row["block_share"] for row in rows if row["result"] == "ok")
    if shares:
        tenths = [sum(bound <= share for share in shares) for bound in (0.9, 0.5, 0.01)]
        print(
            f"share of layer bytes split: median {statistics.median(shares):.1%}; "
            f"{tenths[0]} at least 90%, {tenths[1]} at least 50%, {len(shares) - tenths[2]} none"
        )
        print(f"seconds a proof: median {statistics.median(row['seconds'] for row in rows):.1f}")


def write_table(rows: list[dict[str, Any]], layout: str, path: Path) -> None:
    """Writes the table of architectures as Markdown."""
    counts = collections.Counter(row["result"] for row in rows)
    lines = [
        "# Architectures",
        "",
        f"Tiny twins of every text architecture of transformers {transformers.__version__}, trained whole and split",
        f"over `{layout}` (gloo, CPU, float32): loss within 1e-4, logits 1e-3, gradients within 1e-2 of their largest.",
        "Made by `make coverage`. Share is of the layers' parameters that the twin's batch reaches. A region costs one",
        "collective forward and one backward.",
        "",
        ", ".join(f"{count} {result}" for result, count in counts.most_common()) + f" of {len(rows)}.",
        "",
        "| model type | class | result | share split | regions a layer | stays whole, and why |",
        "|---|---|---|---|---|---|",
    ]
    for row in sorted(rows, key=lambda row: (row["task"], row["model_type"])):
        ok = row["result"] in ("ok", "wrong")
        whole = (
            "; ".join(row["whole"][:3]) + (" …" if len(row["whole"]) > 3 else "")
            if ok
            else row["cause"].splitlines()[0]
        )
        share = f"{row['block_share']:.0%}" if ok else ""
        regions = f"{row['regions_per_layer']:g}" if ok else ""
        cells = (row["model_type"], f"`{row['class']}`", row["result"], share, regions, whole.replace("|", "/"))
        lines.append("| " + " | ".join(cells) + " |")
    path.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
