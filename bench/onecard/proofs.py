"""Whether what is fast is right: Shardwise on the card beside the unsplit model there, and what the host waits for."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

import shardwise
from onecard.measuring import synchronize
from onecard.reads import ReadCount
from onecard.setting import QUICK, Setting, Training
from onecard.training import ours
from shardwise.data.batch import split_rows
from shardwise.proof.parity import measure
from shardwise.ranks.spawn import spawn
from shardwise.train.step import TrainStep

__all__ = ["HOST", "RIGHT"]

_NUM_ROWS = 4


def _step(model: nn.Module, mesh: Any, batch: Mapping[str, Any]) -> Tensor:
    part = split_rows(batch, _NUM_ROWS, mesh.data_size)[mesh.data_rank]
    return TrainStep(model, mesh)(part).loss


def prove_on_rank(setting: Setting, layout: str, *, sequence_parallel: bool, compiles: bool) -> dict[str, Any]:
    """In float32, as `shardwise.verify` does on the CPU; replicas after 20 steps."""
    shared = None if layout == "tp1" else "gloo"  # two ranks on one card, which NCCL cannot serve
    with shardwise.Mesh.open(layout, device=setting.device, backend=shared) as mesh:
        torch.manual_seed(0)
        model = nn.Module.to(_tiny_llama(), mesh.device)
        ids = torch.randint(QUICK.lora.vocabulary, (_NUM_ROWS, 16), generator=torch.Generator().manual_seed(0))
        options: dict[str, Any] = {"sequence_parallel": sequence_parallel}
        if compiles:
            options["compilation"] = shardwise.Compile(backend=setting.backend)
        found = measure(
            model,
            {"input_ids": ids.to(mesh.device), "labels": ids.to(mesh.device)},
            mesh,
            split=lambda model, mesh: shardwise.parallelize(model, mesh, **options),
            step=_step,
            num_steps=3 if setting.quick else 20,
        )
    return {
        "verdict": "ok" if found.passed else "WRONG",
        "loss_error": found.loss.error,
        "gradient_error": found.gradient.error,
        "gradient_allowed": found.gradient.allowed,
        "parameter_error": found.parameter.error,
    }


def _tiny_llama() -> nn.Module:
    from transformers import LlamaForCausalLM

    return LlamaForCausalLM(QUICK.lora.config)


def _prove(layout: str, *, sequence_parallel: bool = False, compiles: bool = False) -> Callable[[Setting], Any]:
    def prove(setting: Setting) -> dict[str, Any]:
        options = {"sequence_parallel": sequence_parallel, "compiles": compiles}
        if layout == "tp1":
            return prove_on_rank(setting, layout, **options)
        ranks = spawn(prove_on_rank, 2, setting, layout, timeout=200.0, **options)
        return max(ranks, key=lambda each: (each["verdict"] != "ok", each["gradient_error"]))

    return prove


def prove_recomputation(setting: Setting) -> dict[str, Any]:
    """A step with dropout, by every recomputation: the same loss and gradients as without."""
    found: dict[str, list[Tensor]] = {}
    with shardwise.Mesh.open("tp1", device=setting.device) as mesh:
        ids = torch.randint(QUICK.lora.vocabulary, (2, 16), generator=torch.Generator().manual_seed(0)).to(mesh.device)
        for mode in ("none", "full", "attention", "selective"):
            config = QUICK.lora.config
            config.attention_dropout = 0.1
            model = shardwise.load(config, mesh, recompute=shardwise.Recompute(mode=mode), dtype=torch.float32).train()
            torch.manual_seed(0)
            loss = TrainStep(model, mesh)({"input_ids": ids, "labels": ids}).loss
            found[mode] = [loss, *(each.grad for each in model.parameters())]
    worst = {
        mode: max(float((one - other).abs().max()) for one, other in zip(values, found["none"], strict=True))
        for mode, values in found.items()
    }
    is_right = max(worst.values()) <= 1e-5
    return {"verdict": "ok" if is_right else "WRONG", "gradient_error": max(worst.values()), "gradient_allowed": 1e-5}


def count_waits(setting: Setting) -> dict[str, Any]:
    """What the host asks the device in steps without a log line."""
    training, number = _pretraining(setting), 10
    if setting.device == "cpu":
        with ReadCount() as reads:
            training.run(number)
        return {"waits": reads.total, "notes": "; ".join(reads.places)}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            training.run(number)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    waits = [each for each in caught if "called a synchronizing" in str(each.message)]  # not that the mode is new
    places = {f"{each.filename.rpartition('/')[2]}:{each.lineno}" for each in waits}
    return {"waits": len(waits), "notes": "; ".join(sorted(places))}


def measure_idle(setting: Setting) -> dict[str, Any]:
    """How long the device has nothing to do; a process of its own, for a profiler may take it along."""
    training = _pretraining(setting)
    return {"idle_share": _idle_share(training.run)} if setting.device != "cpu" else {"notes": "of a card alone"}


def _pretraining(setting: Setting) -> Training:
    shape = setting.sizes.pretrain
    training = ours(setting, shape, dtype=torch.float32, compiles=not setting.quick)
    training.run(setting.sizes.warmup)
    synchronize(setting.device)
    return training


def _idle_share(run: Callable[[int], Any]) -> float:
    """The share of some steps in which no kernel ran, by torch's profiler."""
    activity = torch.profiler.ProfilerActivity
    with torch.profiler.profile(activities=[activity.CUDA]) as profiler:
        run(3)
        torch.cuda.synchronize()
    device = torch.autograd.DeviceType.CUDA
    spans = sorted(
        (each.time_range.start, each.time_range.end) for each in profiler.events() if each.device_type == device
    )
    if not spans:
        raise RuntimeError("torch's profiler has recorded no kernel")
    busy, until = 0.0, spans[0][0]
    for start, end in spans:
        busy += max(0.0, end - max(start, until))
        until = max(until, end)
    return 1 - busy / (until - spans[0][0])


RIGHT: dict[str, Callable[[Setting], Any]] = {
    "tp1": _prove("tp1"),
    "tp1, compiled": _prove("tp1", compiles=True),
    "tp2": _prove("tp2"),
    "tp2, compiled": _prove("tp2", compiles=True),
    "tp2 with sp": _prove("tp2", sequence_parallel=True),
    "tp2 with sp, compiled": _prove("tp2", sequence_parallel=True, compiles=True),
    "fsdp2": _prove("fsdp2"),
    "fsdp2, compiled": _prove("fsdp2", compiles=True),
    "dropout, recomputed": prove_recomputation,
}
HOST: dict[str, Callable[[Setting], Any]] = {
    "shardwise, pretraining": count_waits,
    "shardwise, pretraining, profiled": measure_idle,
}
