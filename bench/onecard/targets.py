"""What is to be reached on one card, and whether a run has reached it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any

__all__ = ["judged"]

Row = Mapping[str, Any]


def judged(rows: Sequence[Row], device: str) -> list[tuple[str, str, str]]:
    """Every target, what was measured, and "pass", "FAIL" or why nothing can be said."""
    found = [_right(rows)]
    if "H200" in device:
        found.append(_compared(rows, "lora", "tokens_per_second", "at least 13,500 tok/s", lambda x: x >= 13_500))
    for part in ("lora", "full", "pretrain"):
        found.append(_against(rows, part, "tokens_per_second", "tok/s at least the best contender's", lambda x: x >= 1))
    for part, most in (("lora", 70), ("full", 120)):
        # 10**9 bytes, as cards are sold
        found.append(
            _compared(rows, part, "peak_gib", f"peak at most {most} GB", lambda x, most=most: x * 2**30 / 1e9 <= most)
        )
    for part in ("full", "pretrain"):
        found.append(_compared(rows, part, "mfu", "at least 55 % MFU", lambda x: x >= 0.55))
    found.append(_curve(rows))
    found.append(_compared(rows, "loss", "extra_gib", "at most 1 GiB over inputs and gradients", lambda x: x <= 1))
    found.append(
        _against(rows, "loss", "milliseconds", "time at most 1.1 of the fastest contender's", lambda x: x <= 1.1)
    )
    found.append(_compared(rows, "host", "waits", "no call that waits for the device in 10 steps", lambda x: x == 0))
    found.append(_compared(rows, "host", "idle_share", "idle at most 3 % of a step", lambda x: x <= 0.03))
    return found


def _right(rows: Iterable[Row]) -> tuple[str, str, str]:
    chosen = [row for row in rows if row["part"] == "right"]
    done = [row for row in chosen if "verdict" in row]
    wrong = [row["contender"] for row in done if row["verdict"] != "ok"]
    measured = f"{len(done) - len(wrong)} of {len(chosen)} ok"
    verdict = "FAIL" if wrong else "pass" if chosen and len(done) == len(chosen) else "not all measured"
    return "right: equal to the unsplit model", measured, verdict


# Both runs start from the same weights and see the same tokens, so that they differ by rounding alone. 2 % separates
# stochastic rounding, which is to pass, from rounding to the nearest, which is not: 1.1 % and 3.9 % on a CPU, with a
# llama of 0.3M at a learning rate of 3e-3, where float32 masters from other random weights were 2.9 % away.
_APART = 0.02


def _curve(rows: Iterable[Row]) -> tuple[str, str, str]:
    """How far the losses in bfloat16 are from those of float32 masters: the means of ten steps, from step 21 on."""
    target = f"curve: in bfloat16 within {_APART:.0%} of float32 masters"
    curves = {row["contender"]: row["losses"] for row in rows if row.get("losses")}
    masters = next((curves.pop(name) for name in list(curves) if "float32 masters" in name), None)
    if masters is None or not curves:
        return target, "", _why_missing(rows, "curve")
    (losses,) = curves.values()
    means = [(fmean(losses[end - 10 : end]), fmean(masters[end - 10 : end]), end) for end in range(21, len(losses) + 1)]
    apart, step = max(((abs(ours / theirs - 1), step) for ours, theirs, step in means), key=_nan_last)
    return target, f"{apart:.2%} at step {step}", "pass" if apart <= _APART else "FAIL"


def _nan_last(found: tuple[float, int]) -> tuple[bool, float]:
    return math.isnan(found[0]), found[0]


def _compared(
    rows: Iterable[Row], part: str, key: str, target: str, is_reached: Callable[[float], bool]
) -> tuple[str, str, str]:
    """Of the best row of ours that has the value."""
    values = [row[key] for row in _ours(rows, part) if row.get(key) is not None]
    if not values:
        return f"{part}: {target}", "", _why_missing(rows, part)
    value = max(values, key=lambda each: (is_reached(each), each))
    return f"{part}: {target}", f"{value:,.4g}", "pass" if is_reached(value) else "FAIL"


def _against(
    rows: Sequence[Row], part: str, key: str, target: str, is_reached: Callable[[float], bool]
) -> tuple[str, str, str]:
    """The ratio of ours to the best contender of the same run."""
    best = max if key == "tokens_per_second" else min
    own = [row[key] for row in _ours(rows, part) if row.get(key)]
    others = [row[key] for row in rows if row["part"] == part and not _is_ours(row) and row.get(key)]
    if not own or not others:
        return f"{part}: {target}", "", _why_missing(rows, part) if not own else "no contender was measured"
    ratio = best(own) / best(others)
    return f"{part}: {target}", f"{ratio:.3f} of it", "pass" if is_reached(ratio) else "FAIL"


def _ours(rows: Iterable[Row], part: str) -> list[Row]:
    return [row for row in rows if row["part"] == part and _is_ours(row)]


def _is_ours(row: Row) -> bool:
    return str(row["contender"]).startswith("shardwise")


def _why_missing(rows: Iterable[Row], part: str) -> str:
    states = dict.fromkeys(row["state"] for row in _ours(rows, part) if row["state"] != "ok")
    return f"not measured: {'; '.join(states)}" if states else "not measured"
