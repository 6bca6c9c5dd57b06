"""Saves and loads of one training, by Shardwise and by torch's DCP, on the ranks of a layout."""

from __future__ import annotations

import functools
import os
import resource
import shutil
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.distributed import DistributedConfig

import shardwise

__all__ = ["OURS", "THEIRS", "measure_checkpoints"]

OURS, THEIRS = "shardwise", "DCP"


def measure_checkpoints(
    layout: str, values: dict[str, Any], rounds: int, base: str
) -> dict[str, list[dict[str, float]]]:
    """On each rank: what every round of every kind of save and load took."""
    warnings.simplefilter("ignore")
    with shardwise.Mesh.open(layout) as mesh:
        model = shardwise.load(LlamaConfig(**values), mesh)
        optimizer = shardwise.build_optimizer(model, torch.optim.AdamW, lr=1e-3)
        ids = torch.arange(64).view(2, 32)
        shardwise.TrainStep(model, mesh)({"input_ids": ids, "labels": ids})
        optimizer.step()
        optimizer.zero_grad()
        ours, theirs = Path(base) / "ours", Path(base) / "theirs"
        stager = [torch.empty_like(value) for value in _locals(model, optimizer)]
        kinds: dict[str, Callable[[], Any]] = {
            "save": lambda: shardwise.save_checkpoint(ours, model=model, optimizer=optimizer, tag="a"),
            "DCP save": functools.partial(_dcp_save, model, optimizer, theirs),
            "load": lambda: shardwise.load_checkpoint(ours, model=model, optimizer=optimizer),
            "load unverified": lambda: shardwise.load_checkpoint(ours, model=model, optimizer=optimizer, verify=False),
            "DCP load": functools.partial(_dcp_load, model, optimizer, theirs),
            "pure copy": lambda: [
                out.copy_(value) for out, value in zip(stager, _locals(model, optimizer), strict=True)
            ],
        }
        if theirs_split := _transformers_model(shardwise.full_state_dict(model), values, Path(base) / "plain"):
            place = Path(base) / "transformers"
            kinds["transformers save"] = lambda: theirs_split.save_pretrained(place, distributed_checkpoint=True)
        pending: list[Any] = []

        def begin() -> None:
            pending.append(shardwise.save_checkpoint(ours, model=model, optimizer=optimizer, tag="b", async_save=True))

        found: dict[str, list[dict[str, float]]] = {name: [] for name in (*kinds, "async stall", "async whole")}
        for number in range(rounds + 1):
            for name, work in kinds.items():
                taken = _timed(work)
                if number:
                    found[name].append(taken)
            stall = _timed(begin)
            whole = _timed(lambda: pending.pop().wait())
            if number:
                found["async stall"].append(stall)
                found["async whole"].append({key: stall[key] + whole[key] for key in stall})
        size = sum(value.nbytes for value in _locals(model, optimizer))
        weights = sum(value.nbytes for value in _locals(model, None))
        found["bytes"] = [{"bytes": float(size), "weights": float(weights)}]
        return found


def _transformers_model(state: dict[str, torch.Tensor], values: dict[str, Any], path: Path) -> Any:
    """The same model, split as transformers does; only its weights are saved by `distributed_checkpoint=True`."""
    if dist.get_rank() == 0:
        with torch.device("meta"):
            whole = AutoModelForCausalLM.from_config(LlamaConfig(**values))
        whole.load_state_dict(state, assign=True)
        whole.save_pretrained(path)
    dist.barrier()
    return AutoModelForCausalLM.from_pretrained(path, distributed_config=DistributedConfig(fsdp_size=2))


def _locals(model: Any, optimizer: torch.optim.Optimizer | None) -> list[torch.Tensor]:
    states = optimizer.state.values() if optimizer is not None else ()
    values = [*model.parameters(), *(v for s in states for v in s.values() if v.ndim)]
    return [value.to_local() if hasattr(value, "to_local") else value.detach() for value in values]


def _dcp_save(model: Any, optimizer: torch.optim.Optimizer, path: Path) -> None:
    if dist.get_rank() == 0:
        shutil.rmtree(path, ignore_errors=True)
    dist.barrier()
    weights, states = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": states}, checkpoint_id=path)


def _dcp_load(model: Any, optimizer: torch.optim.Optimizer, path: Path) -> None:
    weights, states = get_state_dict(model, optimizer)
    state = {"model": weights, "optimizer": states}
    dcp.load(state, checkpoint_id=path)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])


def _timed(work: Callable[[], Any]) -> dict[str, float]:
    dist.barrier()
    os.sync() if dist.get_rank() == 0 else None
    dist.barrier()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    started, busy = time.perf_counter(), time.process_time()
    work()
    taken = {"seconds": time.perf_counter() - started, "busy_seconds": time.process_time() - busy}
    return {**taken, "peak_growth_bytes": (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak) * 1024.0}
