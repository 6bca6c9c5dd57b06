"""Ratios, tables and the JSON record of a measurement."""

from __future__ import annotations

import json
import os
import platform
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

import shardwise

__all__ = ["describe_machine", "mark", "paired_ratio", "shown_ratio", "write_json"]


def paired_ratio(ours: Sequence[float], theirs: Sequence[float]) -> dict[str, float]:
    """Median and quartiles of `ours / theirs`, round by round.

    The members of a pair ran one after the other, so whatever slowed the machine down for a while slowed down both.
    """
    ratios = [mine / other for mine, other in zip(ours, theirs, strict=True)]
    low, median, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
    return {"median": median, "low": low, "high": high}


def shown_ratio(ratio: Mapping[str, float]) -> str:
    """A ratio as tables print it: the median, then the quartiles."""
    return f"{ratio['median']:.2f} [dim]({ratio['low']:.2f}-{ratio['high']:.2f})[/dim]"


def mark(value: float, limit: float) -> str:
    """`value` beside what it should not exceed."""
    return (
        f"[green]{value:.2f}, within {limit:.2f}[/green]"
        if value <= limit
        else f"[red]{value:.2f}, above {limit:.2f}[/red]"
    )


def describe_machine(device: str) -> dict[str, Any]:
    """What a reader must know to compare numbers: cores, device, versions."""
    return {
        "cores": os.cpu_count(),
        "machine": platform.machine(),
        "device": torch.cuda.get_device_name(0) if device == "cuda" else "cpu",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "shardwise": shardwise.__version__,
    }


def write_json(path: str | None, record: Mapping[str, Any]) -> None:
    """Writes the record where `--json` asked for it."""
    if path is not None:
        Path(path).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
