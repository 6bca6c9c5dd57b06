"""What sweeps found, as counts and as Markdown."""

from __future__ import annotations

import collections
import re
import statistics
from pathlib import Path
from typing import Any

from sweep.cases import GROUPS, Variant

__all__ = ["summarize", "write_table"]

Row = dict[str, Any]

_RESULTS = ("ok", "wrong", "refused", "error", "no tiny model")
_MAX_WHOLE = 4  # reasons shown in a cell
_MAX_NAMES = 4  # parameters shown with one reason
_LAYER = re.compile(r".*?\.\*\.")


def summarize(rows: list[Row]) -> None:
    """Prints how many passed, how much of them is split, and how long planning took."""
    print(dict(collections.Counter(row["result"] for row in rows)))
    passed = [row for row in rows if row["result"] == "ok"]
    if not passed or "block_share" not in passed[0]:
        return
    shares = sorted(row["block_share"] for row in passed)
    tenths = [sum(bound <= share for share in shares) for bound in (0.9, 0.5, 0.01)]
    print(
        f"share of layer bytes split: median {statistics.median(shares):.1%}; "
        f"{tenths[0]} at least 90%, {tenths[1]} at least 50%, {len(shares) - tenths[2]} none"
    )
    print(f"seconds to plan and split a tiny model: {_spread([row['split_seconds'] for row in passed])}")
    print(f"seconds a proof: {_spread([row['seconds'] for row in passed])}")


def _spread(values: list[float]) -> str:
    ordered = sorted(values)
    ninth = ordered[min(len(ordered) - 1, int(0.9 * len(ordered)))]
    return f"median {statistics.median(ordered):.2f}, 9 of 10 below {ninth:.2f}, most {ordered[-1]:.2f}"


def write_table(rows: list[Row], path: Path) -> None:
    """Writes the tables of all sweeps as Markdown to `path`."""
    versions = ", ".join(sorted({row["transformers_version"] for row in rows}))
    lines = [
        "# Architectures",
        "",
        f"Tiny models of the architectures of transformers {versions}, trained unsplit and split over gloo, held to",
        "what `shardwise verify` and the README hold a split to. Made by `bench/architectures.py` (`make coverage`).",
        "",
        *_overview(rows),
        "",
        "*refused*: an error says what cannot be split and why. *no tiny model*: none can be built, or it does not",
        "run whole. Share is of the layers' parameters that the batch reaches. Collectives are those over tp, executed",
        "in one run of a layer, forward / backward, the mean over all layers of all stacks; what a step does outside",
        "of layers (embedding, loss, the one sum of gradients after it) is not in them. Seconds are those to find the",
        "plan, all trials included, and to split a tiny model.",
        "",
        *_failures(rows),
    ]
    for group, tasks in _groups(rows).items():
        lines += ["", f"## {group.replace('_', ' ').capitalize()}", "", *_detail(rows, tasks)]
    path.write_text("\n".join(lines) + "\n")


def _groups(rows: list[Row]) -> dict[str, tuple[str, ...]]:
    """Group name to tasks, for those that rows are of; a task in no group is one of its own."""
    present = dict.fromkeys(row["task"] for row in rows)
    grouped = {name: tasks for name, tasks in GROUPS.items() if any(task in tasks for task in present)}
    rest = (task for task in present if not any(task in tasks for tasks in GROUPS.values()))
    return grouped | {task: (task,) for task in rest}


def _variant(row: Row) -> str:
    own = {name: row[name] for name in ("layout", "sequence_parallel", "attention")}
    chosen = {name: row.get(name, False) for name in ("every_cut", "checkpoints")}
    return str(Variant(**own, adapters=row.get("adapters", ""), **chosen))


def _variants(rows: list[Row]) -> list[str]:
    """The sweeps that rows are of, the plainest first."""
    return sorted({_variant(row) for row in rows}, key=lambda each: (len(each.split()), each))


def _overview(rows: list[Row]) -> list[str]:
    lines = [
        "| models | sweep | " + " | ".join(_RESULTS) + " | at least 90% split | seconds, median |",
        "|---|---|" + "---|" * (len(_RESULTS) + 2),
    ]
    for group, tasks in _groups(rows).items():
        own = [row for row in rows if row["task"] in tasks]
        for variant in _variants(own):
            found = [row for row in own if _variant(row) == variant]
            passed = [row for row in found if row["result"] == "ok"]
            counts = collections.Counter(row["result"] for row in found)
            wide = sum(row.get("block_share", 0.0) >= 0.9 for row in passed)
            taken = [row["split_seconds"] for row in passed if "split_seconds" in row]
            seconds = f"{statistics.median(taken):.2f}" if taken else ""
            cells = (group.replace("_", " "), variant, *(str(counts[result]) for result in _RESULTS))
            lines.append("| " + " | ".join((*cells, str(wide), seconds)) + " |")
    return lines


def _failures(rows: list[Row]) -> list[str]:
    """Everything that did not pass, with its cause, those without a tiny model last."""
    failed = sorted((row for row in rows if row["result"] != "ok"), key=lambda row: _RESULTS.index(row["result"]))
    causes: dict[tuple[str, str], list[str]] = {}
    for row in failed:
        causes.setdefault((row["result"], _cell(row["cause"])), []).append(f"`{row['class_name']}` ({_variant(row)})")
    lines = ["| result | architecture | cause |", "|---|---|---|"]
    for (result, cause), names in causes.items():
        lines.append(f"| {result} | {', '.join(names)} | {cause} |")
    return ["## What did not pass", "", *lines] if causes else []


def _detail(rows: list[Row], tasks: tuple[str, ...]) -> list[str]:
    own = [row for row in rows if row["task"] in tasks]
    variants = _variants(own)
    by_case: dict[tuple[str, str, str], dict[str, Row]] = {}
    for row in own:
        by_case.setdefault((row["task"], row["model_type"], row["class_name"]), {})[_variant(row)] = row
    lines = [
        f"| model type | class | {' | '.join(variants)} | share split | collectives a layer | replicated, and why |",
        "|---|---|" + "---|" * (len(variants) + 3),
    ]
    for (_, model_type, name), found in sorted(by_case.items()):
        results = [found[variant]["result"] if variant in found else "" for variant in variants]
        first = next((row for row in map(found.get, variants) if row is not None and "whole" in row), None)
        facts = (
            ("", "", "")
            if first is None
            else (f"{first['block_share']:.0%}", _collectives(first), _whole(first["whole"]))
        )
        lines.append("| " + " | ".join((model_type, f"`{name}`", *results, *facts)) + " |")
    return lines


def _collectives(row: Row) -> str:
    """`FORWARD / BACKWARD`; nothing where no layer was seen to run as a module."""
    counts = row.get("collectives_per_layer")
    return " / ".join(f"{count:g}" for count in counts) if counts else ""


def _whole(listed: list[str]) -> str:
    """`NAME: REASON` of every full matrix, put together by reason, each named within its layer."""
    by_reason: dict[str, list[str]] = {}
    for each in listed:
        name, _, reason = each.partition(": ")
        short = _LAYER.sub("", name, count=1).removesuffix(".weight")
        names = by_reason.setdefault(reason, [])
        if short not in names:
            names.append(short)
    cells = [
        f"{', '.join(names[:_MAX_NAMES])}{' …' if len(names) > _MAX_NAMES else ''}: {reason}"
        for reason, names in by_reason.items()
    ]
    return _cell("; ".join(cells[:_MAX_WHOLE]) + (" …" if len(cells) > _MAX_WHOLE else ""))


def _cell(text: str) -> str:
    first = text.splitlines()[0] if text else ""
    return first.replace("|", "/")[:400]
