"""One load of one checkpoint, seen from a fresh rank of `bench/load.py`."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.distributed import DistributedConfig
from transformers.utils import logging as transformers_logging

import shardwise
import shardwise.api.building
from shardwise.weights.index import CheckpointIndex

__all__ = ["OURS", "THEIRS", "measure_load", "write_checkpoint"]

OURS, THEIRS = "shardwise", "transformers"
SAMPLE_SECONDS = 0.002


def write_checkpoint(config: LlamaConfig, directory: str, max_shard_size: str) -> int:
    """Writes a checkpoint whose values do not matter; returns its bytes."""
    transformers_logging.disable_progress_bar()
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    model = model.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.01)
    model.save_pretrained(directory, max_shard_size=max_shard_size)
    return sum(path.stat().st_size for path in Path(directory).glob("*.safetensors"))


def measure_load(name: str, directory: str) -> dict[str, float]:
    """Loads once, as the first thing a rank does after its imports and the rendezvous.

    Returns:
        seconds that passed, and that the processor worked; bytes owned (of parameters), of the largest of them,
        requested of the checkpoint (0 where only the kernel knows), and of anonymous memory at its peak, what stood
        there before not counted.
    """
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    requested = _record_requests()
    dist.init_process_group("gloo")
    dist.barrier()
    gc.collect()
    with _AnonymousMemory() as memory:
        start, busy_start = time.perf_counter(), time.process_time()
        model = _LOADERS[name](directory)
        seconds, busy_seconds = time.perf_counter() - start, time.process_time() - busy_start
    parts = [p.to_local() if isinstance(p, DTensor) else p for p in model.parameters()]
    return {
        "seconds": seconds,
        "busy_seconds": busy_seconds,
        "owned_bytes": sum(part.nbytes for part in parts),
        "largest_bytes": max(part.nbytes for part in parts),
        "requested_bytes": sum(index.bytes_read for index in requested),
        "peak_bytes": memory.peak_bytes,
    }


def _load_ours(directory: str) -> nn.Module:
    return shardwise.load(directory, shardwise.Mesh.open("tp2", device="cpu"))


def _load_theirs(directory: str) -> nn.Module:
    model: nn.Module = AutoModelForCausalLM.from_pretrained(directory, distributed_config=DistributedConfig(tp_size=2))
    return model


_LOADERS: dict[str, Callable[[str], nn.Module]] = {OURS: _load_ours, THEIRS: _load_theirs}


def _record_requests() -> list[CheckpointIndex]:
    """The indexes that `shardwise.load` opens from now on; each counts the bytes asked of it."""
    opened: list[CheckpointIndex] = []
    build = CheckpointIndex.__init__

    def build_and_record(self: CheckpointIndex, *args: Any) -> None:
        build(self, *args)
        opened.append(self)

    CheckpointIndex.__init__ = build_and_record  # type: ignore[method-assign]
    return opened


class _AnonymousMemory:
    """Samples this process's anonymous memory; `peak_bytes` is the most it grew by. Mapped files do not count."""

    def __init__(self) -> None:
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._before = self._peak = _anonymous_bytes()

    @property
    def peak_bytes(self) -> int:
        return self._peak - self._before

    def _sample(self) -> None:
        while not self._done.wait(SAMPLE_SECONDS):
            self._peak = max(self._peak, _anonymous_bytes())

    def __enter__(self) -> _AnonymousMemory:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._done.set()
        self._thread.join()
        self._peak = max(self._peak, _anonymous_bytes())


def _anonymous_bytes() -> int:
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("this kernel does not tell anonymous memory from mapped files")
