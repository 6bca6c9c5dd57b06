"""What was measured, as tables for people and as a file of JSON."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from onecard.targets import judged

__all__ = ["as_markdown"]

_STEPS = (1, 10, 20, 50, 100, 150, 200)
"""Of curves, those that tables show; the file of JSON has all."""
_COLUMNS: dict[str, tuple[str, str]] = {
    "verdict": ("", "{}"),
    "tokens_per_second": ("tok/s", "{:,.0f}"),
    "milliseconds": ("ms", "{:,.2f}"),
    "tflops": ("TFLOP/s", "{:,.1f}"),
    "mfu": ("MFU", "{:.1%}"),
    "peak_gib": ("GiB allocated", "{:.1f}"),
    "reserved_gib": ("GiB reserved", "{:.1f}"),
    "extra_gib": ("GiB over inputs and gradients", "{:.2f}"),
    "loss": ("loss", "{:.4f}"),
    **{f"loss {step}": (f"loss {step}", "{:.4f}") for step in _STEPS},
    "loss_error": ("loss differs", "{:.1e}"),
    "gradient_error": ("worst gradient", "{:.1e}"),
    "gradient_allowed": ("allowed", "{:.1e}"),
    "parameter_error": ("parameters, 3 steps", "{:.1e}"),
    "waits": ("waits in 10 steps", "{}"),
    "idle_share": ("device idle", "{:.1%}"),
    "notes": ("", "{}"),
}
"""Keys of rows, with their headings and how their values are written."""


def as_markdown(record: Mapping[str, Any]) -> str:
    """The record with a table for each part, and whether a card reaches the targets."""
    machine, rows = record["on"], record["rows"]
    title = f"# One card: {machine['device']}, {record['date']}"
    versions = ", ".join(f"{name} {machine[name]}" for name in ("torch", "transformers", "shardwise", "python"))
    lines = [title, "", f"{versions}; `{record['command']}`; {record['seconds']:.0f} s in all.", ""]
    for part in dict.fromkeys(row["part"] for row in rows):
        chosen = [row for row in rows if row["part"] == part]
        lines += [f"## {part}", "", *_table([_with_losses(row) for row in chosen]), ""]
    if machine["device"] != "cpu":
        lines += ["## Targets", "", "| target | measured | |", "|---|---|---|"]
        lines += [f"| {' | '.join(each)} |" for each in judged(rows, machine["device"])] + [""]
    return "\n".join(lines)


def _with_losses(row: Mapping[str, Any]) -> dict[str, Any]:
    losses = row.get("losses", [])
    return {**row, **{f"loss {step}": losses[step - 1] for step in _STEPS if step <= len(losses)}}


def _table(rows: Sequence[Mapping[str, Any]]) -> Iterable[str]:
    keys = [key for key in _COLUMNS if any(row.get(key) not in (None, "") for row in rows)]
    yield "| contender | state | " + " | ".join(_COLUMNS[key][0] for key in keys) + " |"
    yield "|---|---" + "|---" * len(keys) + "|"
    for row in rows:
        cells = [_COLUMNS[key][1].format(row[key]) if row.get(key) not in (None, "") else "" for key in keys]
        yield f"| {row['contender']} | {row['state']} | " + " | ".join(cells) + " |"
