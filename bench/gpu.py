"""One card beside public tools: is Shardwise right there, how fast, in how much memory?

    python bench/gpu.py                     all parts but `curve`, in under ten minutes on one card of 80 GB or more
    python bench/gpu.py --parts lora,loss   some of it
    python bench/gpu.py --parts curve       200 steps twice, about two minutes
    python bench/gpu.py --quick             everything at toy size on the CPU, in one process: does it still run?

Needs torch with CUDA, transformers and Shardwise; no hub: models are made of configs, with random weights, on the card.
Contenders that are there take part: peft, liger-kernel, cut-cross-entropy, torchao, flash-attn. One that is missing, or
runs out of memory, is a row that says so; a trainer then runs once more with recomputation. Every contender has a
process of its own. Results go to bench/results/ as JSON and as tables, after every row, so that what was measured is
there however it ends; the tables end with what was to be reached, and whether it was.

`machine` is the rate of a large product; `right` compares with the unsplit model in float32, two ranks sharing the card
over gloo; `lora` and `full` train a llama of 8B on 2 x 4096 tokens, `pretrain` one of 1.2B with float32 masters; `host`
counts what the host waits for between log lines; `loss` and `attention` measure parts of a model; `curve` trains the
model of 1.2B as `full` trains that of 8B, and with float32 masters, and compares the losses. MFU is by the formula of
docs/launching.md.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import importlib
import json
import os
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # to look for a card without touching it
os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")  # for all contenders alike
os.environ.setdefault("HF_HUB_OFFLINE", "1")

# torchao starts CUDA when it is imported, and a fork of such a process cannot use CUDA.
_cards = os.environ.get("CUDA_VISIBLE_DEVICES")
os.environ["CUDA_VISIBLE_DEVICES"] = ""
with contextlib.suppress(ImportError):
    importlib.import_module("torchao")
del os.environ["CUDA_VISIBLE_DEVICES"]
if _cards is not None:
    os.environ["CUDA_VISIBLE_DEVICES"] = _cards

from onecard.processes import ON_DEMAND, PARTS, can_fork, contenders, expected_seconds, run_apart, run_here
from onecard.setting import Setting
from onecard.tables import as_markdown
from sidebyside.report import describe_machine, write_json

RESULTS = Path(__file__).resolve().parent / "results"
SECONDS_EACH = 120.0


def main() -> int:
    arguments = _parse()
    if arguments.contender is not None:
        setting = Setting(**json.loads(arguments.setting))
        write_json(arguments.json, run_here(*arguments.contender, setting))
        return 0
    print("looking for a card" if not arguments.quick else "on the CPU, at toy size", file=sys.stderr, flush=True)
    started = time.monotonic()
    setting = Setting(device="cpu" if arguments.quick else "cuda:0", quick=arguments.quick)
    record: dict[str, Any] = {
        "bench": "gpu",
        "date": datetime.datetime.now(tz=datetime.UTC).date().isoformat(),
        "command": " ".join(["bench/gpu.py", *sys.argv[1:]]),
        "seconds": 0.0,
        "on": describe_machine("cpu"),
        "rows": [],
    }
    for rows in _measured(arguments.parts, arguments.only, setting, until=started + arguments.seconds):
        for row in rows:
            print(f"{row['part']:<10} {row['contender']:<36} {row['state']}", file=sys.stderr, flush=True)
            record["on"]["device"] = row.pop("device", record["on"]["device"])
        record["rows"] += rows
        record["seconds"] = time.monotonic() - started
        _write(record, arguments)  # now: whatever comes next, this is not lost
    if not record["rows"]:
        print("no GPU is usable here, or this torch has no CUDA; --quick runs on the CPU", file=sys.stderr)
        return 1
    print(as_markdown(record))
    return int(any(row.get("verdict") == "WRONG" for row in record["rows"]))


def _write(record: dict[str, Any], arguments: argparse.Namespace) -> None:
    write_json(arguments.json, record)
    if not arguments.quick:
        # results of some parts are written beside those of all, not over them
        asked = [] if set(arguments.parts) == set(PARTS) else arguments.parts
        name = "-".join([record["date"], *record["on"]["device"].lower().split(), *asked])
        write_json(str(RESULTS / f"{name}.json"), record)
        (RESULTS / f"{name}.md").write_text(as_markdown(record), encoding="utf-8")


def _measured(parts: list[str], only: str, setting: Setting, *, until: float) -> Iterator[list[dict[str, Any]]]:
    """The rows of one contender after the other; of those for which no time is left, that. None without a card."""
    forks = not setting.quick and can_fork(setting.device)
    if not setting.quick and not forks:
        (found,) = run_apart("machine", "products", setting, until=until, most=SECONDS_EACH, forks=False)
        if found["state"] != "ok":
            return
    chosen = [each for each in contenders(parts, setting) if re.search(only, each[1])]
    if not setting.quick:
        _tell_budget(chosen, setting, seconds=until - time.monotonic())
    for part, name in chosen:
        if setting.quick:
            yield [run_here(part, name, setting)]
        elif until - time.monotonic() < 10:
            yield [{"part": part, "contender": name, "state": "not run: the time was over"}]
        else:
            yield run_apart(part, name, setting, until=until, most=SECONDS_EACH, forks=forks)


def _tell_budget(chosen: list[tuple[str, str]], setting: Setting, *, seconds: float) -> None:
    expected: dict[str, float] = {}
    for part, name in chosen:
        expected[part] = expected.get(part, 0.0) + expected_seconds(part, name, setting)
    parts = ", ".join(f"{part} {each:.0f}" for part, each in expected.items())
    print(
        f"about {sum(expected.values()):.0f} s of {seconds:.0f} s, as estimated for an H100: {parts}; no contender "
        f"gets more than {SECONDS_EACH:.0f} s; one for which no time is left is a row that says so",
        file=sys.stderr,
        flush=True,
    )


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="toy sizes on the CPU; the numbers mean nothing")
    every, always = ",".join((*PARTS, *ON_DEMAND)), ",".join(PARTS)
    parser.add_argument("--parts", help=f"of {every} (with --quick all, else {always})")
    parser.add_argument("--only", metavar="REGEX", default="", help="only contenders whose name matches")
    parser.add_argument("--seconds", type=float, default=570.0, help="of everything (%(default)s)")
    parser.add_argument("--json", metavar="FILE", help="write the results there too")
    parser.add_argument("--contender", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--setting", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    arguments.parts = (arguments.parts or (every if arguments.quick else always)).split(",")
    if unknown := set(arguments.parts) - {*PARTS, *ON_DEMAND}:
        parser.error(f"there is no part {', '.join(sorted(unknown))}; there are {every}")
    return arguments


if __name__ == "__main__":
    sys.exit(main())
