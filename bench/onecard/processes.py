"""Every contender in a process of its own: what one leaves behind, or dies of, is nothing to the next.

Processes are forks of this one, which has imported everything and never touches the card: importing takes longer than
most measurements. Where forks cannot use the card (whatever asked for it before), they are programs of their own.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from onecard.kernels import ATTENTION, LOSS, MACHINE, measure_attention, measure_loss
from onecard.measuring import measure_curve, measure_training
from onecard.proofs import HOST, RIGHT
from onecard.setting import Setting
from onecard.training import CURVE, FULL_TUNING, LORA, PRETRAINING

__all__ = ["ON_DEMAND", "PARTS", "can_fork", "contenders", "expected_seconds", "run_apart", "run_here"]

PARTS = ("machine", "right", "lora", "pretrain", "loss", "attention", "host", "full")
"""In the order in which they run: where time ends, what takes longest is left out."""
ON_DEMAND = ("curve",)
"""Parts that do not fit into the ten minutes of all others, and run on a card where they are asked for."""

_OUT_OF_MEMORY = "out of memory"
_MISSING_KERNEL = "missing: no such kernel here"
_TRAINERS: dict[str, dict[str, Callable[[Setting], Any]]] = {
    "lora": LORA,
    "full": FULL_TUNING,
    "pretrain": PRETRAINING,
    "curve": CURVE,
}
_CALLED: dict[str, dict[str, Callable[[Setting], Any]]] = {"machine": MACHINE, "right": RIGHT, "host": HOST}


def contenders(parts: list[str], setting: Setting) -> list[tuple[str, str]]:
    """Parts and names, in the order in which they run: last what several ranks compile, and where everything is tiny
    not at all.
    """
    known: dict[str, dict[str, Any]] = {**_TRAINERS, **_CALLED, "loss": LOSS, "attention": ATTENTION}
    every = [(part, name) for part in parts for name in known[part]]
    slow = [each for each in every if each[1].endswith(", compiled") and not each[1].startswith("tp1")]
    return [each for each in every if each not in slow] + ([] if setting.quick else slow)


def expected_seconds(part: str, name: str, setting: Setting) -> float:
    """About how long a contender takes on an H100: 40 % of its peak, and what was assumed of starting and compiling."""
    seconds = 26.0 if "compiled" in name or (part in _TRAINERS and "transformers" not in name) else 6.0
    if part in _TRAINERS or part == "host":
        shape, sizes = getattr(setting.sizes, "pretrain" if part == "host" else part), setting.sizes
        of_layer = shape.hidden**2 * (2 + 2 * shape.key_value_heads / shape.heads) + 3 * shape.hidden * shape.mlp
        parameters = shape.layers * of_layer + shape.hidden * shape.vocabulary
        a_token = (4 if part == "lora" else 6) * parameters
        steps = sizes.curve_steps if part == "curve" else sizes.warmup + sizes.steps
        seconds += steps * shape.rows * shape.length * a_token / 4e14
    return seconds


def run_here(part: str, name: str, setting: Setting) -> dict[str, Any]:
    """The row of one contender; what is missing, or goes wrong, is a row too."""
    try:
        found = _measure(part, name, setting)
        state = "ok"
        if setting.device != "cpu":
            found = found | {"device": torch.cuda.get_device_name(setting.device)}
    except (ImportError, AttributeError) as error:
        missing = isinstance(error, ModuleNotFoundError)
        found, state = {}, f"missing: {error}" if missing else _failed(error)
    except torch.OutOfMemoryError:
        found, state = {}, _OUT_OF_MEMORY
    except Exception as error:  # noqa: BLE001 - a contender that fails must not end the others
        found, state = {}, _failed(error)
    return {"part": part, "contender": name, "state": state, **found}


def _failed(error: Exception) -> str:
    words = " ".join(str(error).split())
    if "No available kernel" in words or "No viable backend" in words:
        return _MISSING_KERNEL
    if "out of memory" in words or "ALLOC_FAILED" in words:  # as compilers and cuBLAS say it
        return _OUT_OF_MEMORY
    traceback.print_exception(error)
    return f"failed: {type(error).__name__}: {words[:200]}"


def _measure(part: str, name: str, setting: Setting) -> dict[str, Any]:
    if part == "curve":
        return measure_curve(CURVE[name](setting), setting)
    if part in _TRAINERS:
        shape = getattr(setting.sizes, part)
        return measure_training(_TRAINERS[part][name](setting), shape, setting)
    if part == "loss":
        return measure_loss(setting, LOSS[name])
    if part == "attention":
        return measure_attention(setting, ATTENTION[name])
    found: dict[str, Any] = _CALLED[part][name](setting)
    return found


def can_fork(device: str) -> bool:
    """Whether a fork of this process can use the card."""

    def touch(record: Path) -> None:
        record.write_text(str(float(torch.ones(2, device=device).sum())))

    with tempfile.TemporaryDirectory(prefix="shardwise-bench-") as scratch:
        record = Path(scratch) / "touched"
        _wait(_fork(lambda: touch(record), Path(scratch) / "log"), 60.0)
        return record.exists()


def run_apart(
    part: str, name: str, setting: Setting, *, until: float, most: float, forks: bool
) -> list[dict[str, Any]]:
    """The row of one contender out of a process of its own; where a trainer runs out of memory, that of its second try
    with recomputation besides.

    Args:
        until: when the time of all is over, by `time.monotonic`.
        most: seconds of one process.
        forks: whether a fork can use the card.
    """
    rows = [_run_once(part, name, setting, min(until - time.monotonic(), most), forks=forks)]
    if part in _TRAINERS and rows[0]["state"] == _OUT_OF_MEMORY and until - time.monotonic() > 10:
        again = Setting(**(asdict(setting) | {"recomputes": True}))
        seconds = min(until - time.monotonic(), most)
        rows.append(_run_once(part, name, again, seconds, forks=forks) | {"contender": f"{name}, recomputed"})
    return rows


def _run_once(part: str, name: str, setting: Setting, seconds: float, *, forks: bool) -> dict[str, Any]:
    row: dict[str, Any] = {"part": part, "contender": name}
    with tempfile.TemporaryDirectory(prefix="shardwise-bench-") as scratch:
        record, log = Path(scratch) / "row.json", Path(scratch) / "log"

        def measure() -> None:
            record.write_text(json.dumps(run_here(part, name, setting)), encoding="utf-8")

        script = Path(__file__).resolve().parents[1] / "gpu.py"
        words = ["--contender", part, name, "--setting", json.dumps(asdict(setting)), "--json", str(record)]
        code = _wait(_fork(measure, log) if forks else _start([str(script), *words], log), seconds)
        said = log.read_text(encoding="utf-8", errors="replace")[-4000:] if log.exists() else ""
        if record.exists():  # also where the process did not end
            with contextlib.suppress(ValueError):
                found: dict[str, Any] = json.loads(record.read_text(encoding="utf-8"))
                if found["state"].startswith("failed"):
                    print(said, file=sys.stderr)
                return found
        print(said, file=sys.stderr)
        return row | {"state": f"not done in {seconds:.0f} s" if code is None else f"failed: exit code {code}"}


def _fork(run: Callable[[], None], log: Path) -> int:
    """Runs in a fork that leads a group of its own, its output in `log`; the id of its process."""
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        os.setsid()
        target = os.open(log, os.O_WRONLY | os.O_CREAT)
        os.dup2(target, 1)
        os.dup2(target, 2)
        run()
        code = 0
    except BaseException as error:  # noqa: BLE001 - nothing of this process goes on in the fork
        traceback.print_exception(error)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _start(words: list[str], log: Path) -> int:
    with log.open("wb") as out:
        return subprocess.Popen([sys.executable, *words], stdout=out, stderr=out, start_new_session=True).pid


def _wait(child: int, seconds: float) -> int | None:
    """The exit code of a process; None where it was ended with all of its group, because the time was over."""
    until = time.monotonic() + seconds
    try:
        while time.monotonic() < until:
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.05)
    finally:  # also at Ctrl-C, which goes to this process's group alone
        _end_group(child)
    os.waitpid(child, 0)
    return None


def _end_group(leader: int) -> None:
    """Ranks that a contender has left would hold memory of the card."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)
