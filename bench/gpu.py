"""One card beside public tools: is Shardwise right there, how fast, in how much memory?

    python bench/gpu.py                     everything, in under ten minutes on one card of 80 GB or more
    python bench/gpu.py --parts lora,loss   some of it
    python bench/gpu.py --quick             everything at toy size on the CPU, in one process: does it still run?

Needs torch with CUDA, transformers and Shardwise; no hub: models are made of configs, with random weights, on the card.
Contenders that are there take part: peft, liger-kernel, cut-cross-entropy, torchao, flash-attn. One that is missing, or
runs out of memory, is a row that says so; a trainer then runs once more with recomputation. Every contender has a
process of its own. Results go to bench/results/ as JSON and as tables.

`machine` is the rate of a large product; `right` compares with the unsplit model in float32, two ranks sharing the card
over gloo; `lora` and `full` train a llama of 8B on 2 x 4096 tokens, `pretrain` one of 1.2B with float32 masters; `host`
counts what the host waits for between log lines; `loss` and `attention` measure parts of a model. MFU is by the formula
of docs/launching.md.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from onecard.processes import PARTS, contenders, run_apart, run_here
from onecard.setting import Setting
from onecard.tables import as_markdown
from sidebyside.report import describe_machine, write_json

RESULTS = Path(__file__).resolve().parent / "results"
SECONDS = 590.0
SECONDS_EACH = 150.0


def main() -> int:
    arguments = _parse()
    if arguments.contender is not None:
        setting = Setting(**json.loads(arguments.setting))
        write_json(arguments.json, run_here(*arguments.contender, setting))
        return 0
    device = "cpu" if arguments.quick else "cuda:0"
    if device != "cpu" and not torch.cuda.device_count():
        print("no GPU is visible here, or this torch has no CUDA; --quick runs on the CPU", file=sys.stderr)
        return 1
    started = time.monotonic()
    rows = _run(arguments.parts, Setting(device=device, quick=arguments.quick), started)
    record = {
        "bench": "gpu",
        "date": datetime.datetime.now(tz=datetime.UTC).date().isoformat(),
        "command": " ".join(["bench/gpu.py", *sys.argv[1:]]),
        "seconds": time.monotonic() - started,
        "on": describe_machine("cpu" if device == "cpu" else "cuda"),
        "rows": rows,
    }
    text = as_markdown(record)
    print(text)
    write_json(arguments.json, record)
    if not arguments.quick:
        name = f"{record['date']}-{'-'.join(record['on']['device'].lower().split())}"
        write_json(str(RESULTS / f"{name}.json"), record)
        (RESULTS / f"{name}.md").write_text(text, encoding="utf-8")
    return int(any(row.get("verdict") == "WRONG" for row in rows))


def _run(parts: list[str], setting: Setting, started: float) -> list[dict[str, Any]]:
    """The rows of all contenders; of those for which no time is left, that."""
    rows: list[dict[str, Any]] = []
    for part in parts:
        for name in contenders(part, setting):
            left = SECONDS - (time.monotonic() - started)
            if setting.quick:
                found = [run_here(part, name, setting)]
            elif left < 10:
                found = [{"part": part, "contender": name, "state": "not run: the time was over"}]
            else:
                found = run_apart(part, name, setting, seconds=min(left, SECONDS_EACH))
            rows += found
            for row in found:
                print(f"{part:<10} {row['contender']:<36} {row['state']}", file=sys.stderr, flush=True)
    return rows


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="toy sizes on the CPU; the numbers mean nothing")
    parser.add_argument("--parts", default=",".join(PARTS), help="of %(default)s")
    parser.add_argument("--json", metavar="FILE", help="write the results there too")
    parser.add_argument("--contender", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--setting", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    arguments.parts = arguments.parts.split(",")
    if unknown := set(arguments.parts) - set(PARTS):
        parser.error(f"there is no part {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    return arguments


if __name__ == "__main__":
    sys.exit(main())
