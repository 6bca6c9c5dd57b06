"""Every contender in a process of its own: what one leaves behind, or dies of, is nothing to the next."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from onecard.kernels import ATTENTION, LOSS, MACHINE, measure_attention, measure_loss
from onecard.measuring import measure_training
from onecard.proofs import HOST, RIGHT
from onecard.setting import Setting
from onecard.training import FULL_TUNING, LORA, PRETRAINING

__all__ = ["PARTS", "contenders", "run_apart", "run_here"]

PARTS = ("machine", "right", "lora", "full", "pretrain", "host", "loss", "attention")
"""In the order in which they run: where time ends, what says least is left out."""

_OUT_OF_MEMORY = "out of memory"
_MISSING_KERNEL = "missing: no such kernel here"
_TRAINERS: dict[str, dict[str, Callable[[Setting], Any]]] = {
    "lora": LORA,
    "full": FULL_TUNING,
    "pretrain": PRETRAINING,
}
_CALLED: dict[str, dict[str, Callable[[Setting], Any]]] = {"machine": MACHINE, "right": RIGHT, "host": HOST}


def contenders(part: str, setting: Setting) -> list[str]:
    """Their names, in the order in which they run; without what several ranks compile, where everything is tiny."""
    names = list({**_TRAINERS, **_CALLED, "loss": LOSS, "attention": ATTENTION}[part])
    is_slow = {name: name.endswith(", compiled") and not name.startswith("tp1") for name in names}
    return [name for name in names if not (setting.quick and is_slow[name])]


def run_here(part: str, name: str, setting: Setting) -> dict[str, Any]:
    """The row of one contender; what is missing, or goes wrong, is a row too."""
    try:
        found = _measure(part, name, setting)
        state = "ok"
    except ModuleNotFoundError as error:
        found, state = {}, f"missing: {error}"
    except torch.OutOfMemoryError:
        found, state = {}, _OUT_OF_MEMORY
    except RuntimeError as error:
        found, state = {}, _MISSING_KERNEL if _lacks_kernel(error) else _failed(error)
    except Exception as error:  # noqa: BLE001 - a contender that fails must not end the others
        found, state = {}, _failed(error)
    return {"part": part, "contender": name, "state": state, **found}


def _lacks_kernel(error: RuntimeError) -> bool:
    return "No available kernel" in str(error) or "No viable backend" in str(error)


def _failed(error: Exception) -> str:
    traceback.print_exception(error)
    words = " ".join(str(error).split())
    return f"failed: {type(error).__name__}: {words[:200]}"


def _measure(part: str, name: str, setting: Setting) -> dict[str, Any]:
    if part in _TRAINERS:
        shape = getattr(setting.sizes, part)
        return measure_training(_TRAINERS[part][name](setting), shape, setting)
    if part == "loss":
        return measure_loss(setting, LOSS[name])
    if part == "attention":
        return measure_attention(setting, ATTENTION[name])
    found: dict[str, Any] = _CALLED[part][name](setting)
    return found


def run_apart(part: str, name: str, setting: Setting, *, seconds: float) -> list[dict[str, Any]]:
    """The row of one contender out of a process of its own; where a trainer runs out of memory, that of its second try
    with recomputation besides.
    """
    rows = [_run_once(part, name, setting, seconds)]
    if part in _TRAINERS and rows[0]["state"] == _OUT_OF_MEMORY:
        again = Setting(**(asdict(setting) | {"recomputes": True}))
        rows.append(_run_once(part, name, again, seconds) | {"contender": f"{name}, recomputed"})
    return rows


def _run_once(part: str, name: str, setting: Setting, seconds: float) -> dict[str, Any]:
    script = Path(__file__).resolve().parents[1] / "gpu.py"
    with tempfile.TemporaryDirectory(prefix="shardwise-bench-") as scratch:
        record = Path(scratch) / "row.json"
        words = ["--contender", part, name, "--setting", json.dumps(asdict(setting)), "--json", str(record)]
        row: dict[str, Any] = {"part": part, "contender": name}
        try:
            ended = subprocess.run(
                [sys.executable, str(script), *words], timeout=seconds, check=False, capture_output=True, text=True
            )
        except subprocess.TimeoutExpired:
            return row | {"state": f"not done in {seconds:.0f} s"}
        if record.exists():
            found: dict[str, Any] = json.loads(record.read_text())
            if found["state"].startswith("failed"):
                print(ended.stderr[-4000:], file=sys.stderr)
            return found
        print(ended.stderr[-4000:], file=sys.stderr)
        return row | {"state": f"failed: exit code {ended.returncode}"}
