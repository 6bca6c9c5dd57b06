"""Time and memory of what runs on a device."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from onecard.setting import Setting, Shape, Training
from shardwise.estimate.flops import peak_flops

__all__ = ["measure_call", "measure_curve", "measure_training", "synchronize"]


def synchronize(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize(device)


def measure_training(training: Training, shape: Shape, setting: Setting) -> dict[str, Any]:
    """Steps in a row, as they are in real runs: nothing waits for the device between them."""
    sizes, device = setting.sizes, setting.device
    training.run(sizes.warmup)
    synchronize(device)
    start = time.perf_counter()
    loss = training.run(sizes.steps)
    synchronize(device)
    seconds = (time.perf_counter() - start) / sizes.steps
    tokens = shape.rows * shape.length
    flops = tokens * training.work.flops(shape.length)
    peak = peak_flops(torch.cuda.get_device_name(device)) if device != "cpu" else None
    return {
        "tokens_per_second": tokens / seconds,
        "step_seconds": seconds,
        "tflops": flops / seconds / 1e12,
        "mfu": flops / seconds / peak if peak else None,
        "peak_gib": gib(torch.cuda.max_memory_allocated(device)) if device != "cpu" else None,
        "reserved_gib": gib(torch.cuda.max_memory_reserved(device)) if device != "cpu" else None,
        "loss": float(loss),
        "notes": training.notes,
    }


def measure_curve(training: Training, setting: Setting) -> dict[str, Any]:
    """The loss of every step from the first on, read when all are done."""
    losses = torch.stack([training.run(1) for _ in range(setting.sizes.curve_steps)]).tolist()
    peak = gib(torch.cuda.max_memory_allocated(setting.device)) if setting.device != "cpu" else None
    return {"losses": losses, "peak_gib": peak, "notes": training.notes}


def measure_call(call: Callable[[], Any], setting: Setting, *, held_bytes: int = 0) -> dict[str, Any]:
    """The median time of `call`, and the most memory that it takes over `held_bytes`, what must be there anyway."""
    device = setting.device
    for _ in range(2):
        call()
    synchronize(device)
    if device != "cpu":
        torch.cuda.reset_peak_memory_stats(device)
    times = []
    for _ in range(setting.sizes.repeats):
        start = time.perf_counter()
        call()
        synchronize(device)
        times.append(time.perf_counter() - start)
    extra = gib(torch.cuda.max_memory_allocated(device) - held_bytes) if device != "cpu" else None
    return {"milliseconds": 1e3 * statistics.median(times), "extra_gib": extra}


def gib(nbytes: int) -> float:
    return nbytes / 2**30
