"""Trainers of whole models: LoRA and full fine-tuning of 8B, pretraining of 1.2B; by hand, by peers and by us.

Those of a curve are ours alone: the narrow weights and states of `full` beside float32 masters, from the same weights.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from itertools import repeat
from typing import Any

import torch
from transformers import AutoModelForCausalLM

import shardwise
from onecard.setting import Setting, Shape, Training
from shardwise.estimate.flops import count_work
from shardwise.parallel.facts import read_facts, read_windows
from shardwise.parameters.registry import registry_of
from shardwise.train.loop import StepRecord, TrainingComponents, run_loop
from shardwise.train.run_config import OptimizerConfig

__all__ = ["CURVE", "FULL_TUNING", "LORA", "PRETRAINING"]


def lora_config() -> Any:
    peft: Any = importlib.import_module("peft")
    return peft.LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")


def adamw(parameters: Iterable[torch.Tensor]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-4, fused=True)


_ROUNDED = {"bf16_stochastic_round": True}
"""Weights in bfloat16 take updates that are smaller than their last bit by chance (record 0030)."""


def adamw_8bit() -> Any:
    return importlib.import_module("torchao.optim").AdamW8bit


def build(setting: Setting, shape: Shape, dtype: torch.dtype) -> Any:
    """A model with random weights, made on the card: in float32 the same numbers as in bfloat16, on every call."""
    torch.manual_seed(0)
    with torch.device(setting.device):
        model = AutoModelForCausalLM.from_config(shape.config, dtype=torch.bfloat16, attn_implementation="sdpa")
    return model.float() if dtype == torch.float32 else model  # not `to`, which would round what RoPE has in float32


def by_hand(
    setting: Setting,
    shape: Shape,
    *,
    dtype: torch.dtype,
    adapts: bool = False,
    compiles: bool = False,
    optimizer: Callable[[Any], Any] = adamw,
    autocast: bool = False,
) -> Training:
    """What a page of torch and transformers gives: SDPA, fused AdamW, blocks compiled one by one if asked for."""
    model = build(setting, shape, dtype)
    layers = model.model.layers
    if setting.recomputes:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if adapts:
        peft: Any = importlib.import_module("peft")
        model.enable_input_require_grads() if setting.recomputes else None
        model = peft.get_peft_model(model, lora_config(), autocast_adapter_dtype=False)
    model.train()
    trained = {name: each for name, each in model.named_parameters() if each.requires_grad}
    work = count_work(read_facts(model), trained, read_windows(model))
    if compiles:
        for layer in layers:
            layer.compile(backend=setting.backend)
    updates, batch = optimizer(trained.values()), setting.batch(shape)
    narrow = torch.autocast(torch.device(setting.device).type, torch.bfloat16) if autocast else nullcontext()

    def run(number: int) -> torch.Tensor:
        for _ in range(number):
            with narrow:
                loss = model(**batch, use_cache=False).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(trained.values(), 1.0)
            updates.step()
            updates.zero_grad()
        return loss.detach()

    return Training(run=run, work=work, notes="recomputed" if setting.recomputes else "")


def with_liger(setting: Setting) -> Training:
    """transformers with Liger's kernels, which it exchanges in the classes: a process of its own is needed."""
    kernels: Any = importlib.import_module("liger_kernel.transformers")
    kernels.apply_liger_kernel_to_llama()
    return by_hand(setting, setting.sizes.lora, dtype=torch.bfloat16, adapts=True)


def ours(
    setting: Setting,
    shape: Shape,
    *,
    dtype: torch.dtype,
    adapts: bool = False,
    compiles: bool = True,
    optimizer_class: Any = torch.optim.AdamW,
    logs: bool = False,
    batches: Iterator[dict[str, torch.Tensor]] | None = None,
) -> Training:
    """Shardwise in one process, compiled unless that would be for nothing (toy sizes); float32 weights are masters."""
    mesh = shardwise.Mesh.open("tp1", device=setting.device)
    model = build(setting, shape, dtype)
    if adapts:
        model = importlib.import_module("peft").get_peft_model(model, lora_config(), autocast_adapter_dtype=False)
    model = shardwise.parallelize(
        model,
        mesh,
        precision=shardwise.Precision() if dtype == torch.float32 else None,
        compilation=shardwise.Compile(backend=setting.backend) if compiles else None,
        recompute=shardwise.Recompute(mode="full") if setting.recomputes else None,
    ).train()
    options: dict[str, Any] = {"fused": True} if optimizer_class is torch.optim.AdamW else _ROUNDED
    updates = shardwise.build_optimizer(model, optimizer_class, lr=1e-4, **options)
    step = shardwise.TrainStep(model, mesh)
    if batches is None:
        batches = repeat({name: value.cpu() for name, value in setting.batch(shape).items()})  # where data comes from

    def run(number: int) -> torch.Tensor:
        for _ in range(number):
            loss = step(next(batches)).loss
            shardwise.clip_grad_norm_(model, 1.0)
            updates.step()
            updates.zero_grad()
        return loss

    def run_logged(number: int) -> torch.Tensor:
        return _run_logged(number, model, mesh, step, updates, batches)

    notes = "recomputed" if setting.recomputes else ""
    return Training(run=run_logged if logs else run, work=registry_of(model).plan.work, notes=notes)


class _Losses:
    """A log that keeps what it is told."""

    def __init__(self) -> None:
        self.last = math.nan

    def report(self, record: StepRecord) -> None:
        self.last = record.loss


def _run_logged(number: int, model: Any, mesh: Any, step: Any, updates: Any, batches: Any) -> torch.Tensor:
    """By the trainer of `shardwise train`, with a log."""
    log = _Losses()
    parts = TrainingComponents(
        step=step,
        clip=lambda norm: shardwise.clip_grad_norm_(model, norm),
        optimizer=updates,
        batches=batches,
        device=mesh.device,
        nonfinite="raised",
    )
    run_loop(parts, num_steps=number, settings=OptimizerConfig(lr=1e-4), reporters=[log], report_every=10)
    return torch.tensor(log.last)


def _full(setting: Setting, *, is_ours: bool, narrow_states: bool) -> Training:
    shape, compiles = setting.sizes.full, not setting.quick
    optimizer_class = adamw_8bit() if narrow_states else torch.optim.AdamW
    if is_ours:
        return ours(setting, shape, dtype=torch.bfloat16, compiles=compiles, optimizer_class=optimizer_class)
    chosen = (lambda parameters: optimizer_class(list(parameters), lr=1e-4, **_ROUNDED)) if narrow_states else adamw
    return by_hand(setting, shape, dtype=torch.bfloat16, compiles=compiles, optimizer=chosen)


def _curve(setting: Setting, dtype: torch.dtype, optimizer_class: Any) -> Training:
    shape, compiles = setting.sizes.curve, not setting.quick
    batches = setting.learnable(shape, setting.sizes.curve_steps)
    return ours(setting, shape, dtype=dtype, compiles=compiles, optimizer_class=optimizer_class, batches=batches)


LORA: dict[str, Callable[[Setting], Training]] = {
    "transformers + peft": lambda s: by_hand(s, s.sizes.lora, dtype=torch.bfloat16, adapts=True),
    "transformers + peft + Liger": with_liger,
    "blocks compiled by hand": lambda s: by_hand(
        s, s.sizes.lora, dtype=torch.bfloat16, adapts=True, compiles=not s.quick
    ),
    "shardwise": lambda s: ours(s, s.sizes.lora, dtype=torch.bfloat16, adapts=True),
}
FULL_TUNING: dict[str, Callable[[Setting], Training]] = {
    "by hand, torchao 8-bit AdamW": lambda s: _full(s, is_ours=False, narrow_states=True),
    "shardwise, torchao 8-bit AdamW": lambda s: _full(s, is_ours=True, narrow_states=True),
    "by hand, AdamW in bfloat16": lambda s: _full(s, is_ours=False, narrow_states=False),
    "shardwise, AdamW in bfloat16": lambda s: _full(s, is_ours=True, narrow_states=False),
}
PRETRAINING: dict[str, Callable[[Setting], Training]] = {
    "by hand, float32 masters": lambda s: by_hand(
        s, s.sizes.pretrain, dtype=torch.float32, compiles=not s.quick, autocast=True
    ),
    "shardwise, float32 masters, logging": lambda s: ours(
        s, s.sizes.pretrain, dtype=torch.float32, compiles=not s.quick, logs=True
    ),
}
CURVE: dict[str, Callable[[Setting], Training]] = {
    "shardwise, torchao 8-bit AdamW": lambda s: _curve(s, torch.bfloat16, adamw_8bit()),
    "shardwise, float32 masters": lambda s: _curve(s, torch.float32, torch.optim.AdamW),
}
