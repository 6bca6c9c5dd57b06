"""`describe`: what a layout does to a model, explained before any weight is read."""

import copy
import os
from collections.abc import Collection
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import PreTrainedConfig

from shardwise.api.prepare import decide
from shardwise.api.rehearsal import Rehearsal
from shardwise.errors import ConfigError, UnsupportedError, counted
from shardwise.estimate.memory import StateBytes, describe_stages, mib, schedule_of, state_bytes
from shardwise.lora.inject import inject
from shardwise.parallel.build import build_meta_model, num_positions, read_config
from shardwise.plan.decision import SplitPlan
from shardwise.plan.explain import Explanation
from shardwise.plan.options import ParallelSpec
from shardwise.runtime.host_masks import can_take_host_masks
from shardwise.schedule.schedule import Schedule
from shardwise.topology.shape import MeshShape

_FEW_TOKENS = (1, 16)
MOST_TOKENS = 2**26
"""Of a microbatch: its loss is rehearsed some rows at a time."""


def describe(
    source: str | os.PathLike[str] | PreTrainedConfig,
    layout: str | MeshShape,
    *,
    auto_class: Any = None,
    batch: tuple[int, int] | None = None,
    num_microbatches: int | None = None,
    adapter: Any = None,
    **options: Any,
) -> Explanation:
    """What a layout does to a model, without a mesh, a process group or weights: rules, placements, what is replicated
    and why, and the bytes a rank holds.

    Args:
        batch: rows of one microbatch on a data rank, and tokens in each: adds what is kept between its forward and its
            backward, counted by running the forward on fake tensors. Only in a process that is no rank of a job.
        num_microbatches: of a step; of a pipeline by default the fewest that its schedule takes.
        adapter: as in `load`.
        options: every option of `load`.
    """
    spec, options = ParallelSpec.take(options)
    shape = layout if isinstance(layout, MeshShape) else MeshShape.parse(layout)
    config, model_options = (source, options) if isinstance(source, PreTrainedConfig) else read_config(source, options)
    if batch is not None:
        _check_batch(config, *batch)
    model = build_meta_model(copy.deepcopy(config), auto_class, dtype=None, options=model_options)
    if adapter is not None:
        inject(model, adapter)
    plan = decide(model, shape, spec)
    dtype = "float32" if spec.precision is None else spec.precision.params
    in_full = batch is not None or plan.pipeline is not None
    rehearsal = Rehearsal(
        source=config,
        shape=shape if in_full else MeshShape(tp_size=shape.tp_size),
        spec=spec,
        dtype=None if spec.precision is None else getattr(torch, dtype),
        auto_class=auto_class,
        options=model_options,
        adapter=adapter,
    )
    frozen = {fqn for fqn, value in model.named_parameters() if not value.requires_grad}
    if plan.pipeline is not None:
        schedule = schedule_of(plan, num_microbatches)
        return _explain_stages(plan, rehearsal, schedule, _attention(model), frozen=frozen, dtype=dtype, batch=batch)
    kept = _at_rest(plan, frozen, dtype=dtype)
    parts = f"parameters {mib(kept.parameters)}, gradients {mib(kept.gradients)}, AdamW {mib(kept.optimizer)}"
    memory = f"{_attention(model)}\na rank keeps {mib(kept.total)} from step to step in {dtype}: {parts}"
    if batch is None and (shape.tp_size == 1 or dist.is_initialized()):
        return Explanation(plan=plan, memory=memory)
    activations, collectives = _rehearsed(rehearsal, batch or _FEW_TOKENS, kept)
    memory = memory if batch is None else f"{memory}\n{activations}"
    return Explanation(plan=plan, collectives=collectives, memory=memory)


def _check_batch(config: PreTrainedConfig, num_rows: int, seq_length: int) -> None:
    window = num_positions(config)
    if window is not None and seq_length > window:
        raise ConfigError(f"rows of {seq_length:,} tokens", why=f"the model sees {window:,} positions", fix="use fewer")
    if (num_tokens := num_rows * seq_length) > MOST_TOKENS:
        fix = f"ask for at most {MOST_TOKENS:,}: what a step keeps grows with them"
        raise ConfigError(f"a microbatch of {num_tokens:,} tokens on a data rank", fix=fix)


def _explain_stages(
    plan: SplitPlan,
    rehearsal: Rehearsal,
    schedule: Schedule,
    attention: str,
    *,
    frozen: Collection[str],
    dtype: str,
    batch: tuple[int, int] | None,
) -> Explanation:
    """The explanation of a pipeline: what each stage holds, and sends, with a microbatch as far as it is known."""
    itemsize, lines, found = getattr(torch, dtype).itemsize, [], {}
    if batch is not None:
        try:
            steps = rehearsal.run_stages(num_rows=batch[0], seq_length=batch[1])
            found = {number: step.held_bytes for number, step in steps.items()}
            lines = [
                f"over pp, a microbatch: stage {number} sends {counted(step.num_sent, 'tensor')} "
                f"of {mib(step.sent_bytes)}, and is sent the gradients"
                for number, step in steps.items()
                if step.num_sent
            ]
            if plan.num_parts > 1:
                lines += [f"over tp, a microbatch: stage {number}: {step.tp}" for number, step in steps.items()]
        except UnsupportedError as error:
            lines = [f"what stages hold between forward and backward is not known: {error.why or error.summary}"]
    stages = describe_stages(plan, schedule, itemsize=itemsize, frozen=frozen, activations=found)
    return Explanation(plan=plan, collectives=tuple(lines), memory=attention, stages=stages)


def _at_rest(plan: SplitPlan, frozen: Collection[str], *, dtype: str) -> StateBytes:
    """What rank 0, which holds most, keeps from step to step with AdamW."""
    trained = [planned.layout for fqn, planned in plan.parameters.items() if fqn not in frozen]
    kept = [planned.layout for fqn, planned in plan.parameters.items() if fqn in frozen]
    return state_bytes(trained, plan.shape.coords(0), itemsize=getattr(torch, dtype).itemsize, frozen=kept)


def _rehearsed(rehearsal: Rehearsal, batch: tuple[int, int], at_rest: StateBytes) -> tuple[str, tuple[str, ...]]:
    """What rank 0 holds in the middle of a step, and what it communicates, in words."""
    num_rows, seq_length = batch
    middle = f"between forward and backward of {num_rows} x {seq_length:,} tokens"
    try:
        step = rehearsal.run_step(num_rows=num_rows, seq_length=seq_length)
    except UnsupportedError as error:
        why = error.why or error.summary
        return f"what it holds {middle} is not known: {why}", (f"cannot be counted: {why}",)
    gathered = f", gathered or cast parameters {mib(step.activations.gathered)}" if step.activations.gathered else ""
    kept = step.activations
    activations = f"{middle} it holds {mib(kept.total)} besides: activations {mib(kept.activations)}{gathered}"
    peak = at_rest.parameters + at_rest.optimizer + step.peak_bytes
    activations += (
        f"\npeak during a step: {mib(peak)} (parameters, AdamW state, and {mib(step.peak_bytes)} of gradients, "
        "activations and temporary tensors)"
    )
    lines = []
    if rehearsal.shape.tp_size > 1:
        lines.append(f"over tp, a microbatch of {num_rows} x {seq_length:,} tokens: {step.tp}")
        if step.layer is not None:
            forward, backward = step.layer
            lines.append(f"of these in a layer: {forward:g} in its forward, {backward:g} in its backward")
    if rehearsal.shape.data_size > 1:
        lines.append(f"over the data axes, a microbatch: {step.data}")
    if step.after.calls:
        lines.append(f"gradient phase, once a step: {step.after}")
    return activations, tuple(lines)


def _attention(model: nn.Module) -> str:
    """By what a model attends in a `TrainStep`, in words."""
    if not can_take_host_masks(model):
        return f"attention: the model's own ({getattr(model.config, '_attn_implementation', None)})"
    return "attention: PyTorch SDPA; packed documents are separated by a mask"
