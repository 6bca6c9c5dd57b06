"""`describe`: what a layout does to a model, explained before any weight is read."""

import os
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import PreTrainedConfig

from shardwise.api.fitting import describe_fit
from shardwise.api.rehearsal import Forecast, Rehearsal
from shardwise.errors import ConfigError, UnsupportedError, counted, sized
from shardwise.estimate.memory import Card, alike, describe_stages, schedule_of
from shardwise.parallel.build import as_dtype, num_positions, read_config, take_model_options
from shardwise.plan.decision import Explanation
from shardwise.plan.options import ParallelSpec
from shardwise.runtime.host_masks import can_take_host_masks
from shardwise.topology.shape import MeshShape

_FEW_TOKENS = (1, 16)
MOST_TOKENS = 2**26  # of a microbatch: its loss is rehearsed some rows at a time


def describe(
    source: str | os.PathLike[str] | PreTrainedConfig,
    layout: str | MeshShape,
    *,
    auto_class: Any = None,
    batch: tuple[int, int] | None = None,
    num_microbatches: int | None = None,
    dtype: torch.dtype | str | None = None,
    adapter: Any = None,
    card: Card | None = None,
    **options: Any,
) -> Explanation:
    """Returns what a layout does to a model, without a mesh, a process group or weights: rules, placements, what is
    replicated and why, and the bytes a rank holds.

    Args:
        batch: rows of one microbatch on a data rank, and tokens in each: adds what is kept between its forward and its
            backward, counted by running the forward on fake tensors. Only in a process that is no rank of a job.
        num_microbatches: of a step; of a pipeline by default the fewest that its schedule takes.
        dtype: dtype of the parameters. Default: `precision.params`, else float32.
        card: adds whether a step fits it, and if not what would.
    """
    spec, options = ParallelSpec.take(options)
    torch_dtype, options = take_model_options(options)
    shape = layout if isinstance(layout, MeshShape) else MeshShape.parse(layout)
    config, model_options = (source, options) if isinstance(source, PreTrainedConfig) else read_config(source, options)
    if batch is not None:
        _check_batch(config, *batch)
    chosen = as_dtype(torch_dtype if dtype is None else dtype)
    if chosen is None and spec.precision is not None:
        chosen = as_dtype(spec.precision.params)
    values = {"dtype": chosen, "auto_class": auto_class, "options": model_options, "adapter": adapter}
    rehearsal = Rehearsal(source=config, shape=shape, spec=spec, **values)
    found = rehearsal.forecast(batch, num_microbatches)
    memory, stages = [_attention(found.model)], tuple[str, ...]()
    if found.plan.pipeline is None:
        memory += _held(found)
        lines = tuple(_communicated(found))
    else:
        held = {number: step.held_bytes for number, step in found.stages.items()}
        stages = describe_stages(found.plan, schedule_of(found.plan, num_microbatches), found.kept, held)
        lines = tuple(_sent(found))
        if held:
            fullest = max(found.parts, key=lambda parts: sum(parts.values()))
            parts = ", ".join(f"{name} {sized(size)}" for name, size in fullest.items())
            who = f"the fullest rank, of pp {found.parts.index(fullest)}: {parts}"
            memory.append(f"a step needs about {sized(found.needed)} on {who}; without temporary tensors, an estimate")
    if (found.stages or found.step or found.plan.pipeline is None) and shape.tp_size > 1 and not dist.is_initialized():
        lines += tuple(rehearsal.count_media())
    if card is not None:
        memory.append(describe_fit(card, found))
    return Explanation(plan=found.plan, collectives=lines, memory="\n".join(memory), stages=stages)


def _check_batch(config: PreTrainedConfig, num_rows: int, seq_length: int) -> None:
    window = num_positions(config)
    if window is not None and seq_length > window:
        raise ConfigError(f"rows of {seq_length:,} tokens", why=f"the model sees {window:,} positions", fix="use fewer")
    if (num_tokens := num_rows * seq_length) > MOST_TOKENS:
        fix = f"ask for at most {MOST_TOKENS:,}: what a step keeps grows with them"
        raise ConfigError(f"a microbatch of {num_tokens:,} tokens on a data rank", fix=fix)


def _sent(found: Forecast) -> Iterator[str]:
    """Yields what the stages of a pipeline send, in words."""
    if found.unknown:
        yield f"what stages hold between forward and backward is not known: {found.unknown}"
    steps = found.stages
    for who, first in alike({number: (step.num_sent, step.sent_bytes) for number, step in steps.items()}):
        if (number := steps[first].num_sent) > 0:
            sent = f"sends {counted(number, 'tensor')} of {sized(steps[first].sent_bytes)}, and is sent the gradients"
            yield f"over pp, a microbatch: {who} {sent}"
    if found.plan.num_parts > 1:
        for who, first in alike({number: str(step.tp) for number, step in steps.items()}):
            yield f"over tp, a microbatch: {who.removesuffix(':')}: {steps[first].tp}"


def _held(found: Forecast) -> Iterator[str]:
    """Yields what rank 0 holds, in words."""
    kept, step, dtype = found.kept[0], found.step, found.rehearsal.precision.params
    parts = f"parameters {sized(kept.parameters)}, gradients {sized(kept.gradients)}, AdamW {sized(kept.optimizer)}"
    yield f"a rank keeps {sized(kept.total)} from step to step in {dtype}: {parts}"
    middle = "between forward and backward of {} x {:,} tokens".format(*found.batch or (0, 0))
    if found.unknown:
        yield f"what it holds {middle} is not known: {found.unknown}"
    if step is not None:
        held = step.activations
        gathered = f", gathered or cast parameters {sized(held.gathered)}" if held.gathered else ""
        yield f"{middle} it holds {sized(held.total)} besides: activations {sized(held.activations)}{gathered}"
        rest = f"{sized(step.peak_bytes)} of gradients, activations and temporary tensors"
        yield f"peak during a step: {sized(found.needed)} (parameters, AdamW state, and {rest})"


def _communicated(found: Forecast) -> Iterator[str]:
    """Yields what rank 0 communicates, in words."""
    num_rows, seq_length = found.batch or _FEW_TOKENS
    rehearsal, step, unknown, tp_size = found.rehearsal, found.step, found.unknown, found.plan.num_parts
    if found.batch is None and tp_size > 1 and not dist.is_initialized():
        rehearsal = replace(rehearsal, shape=MeshShape(tp_size=tp_size))
        try:
            step = rehearsal.count_step(num_rows=num_rows, seq_length=seq_length)
        except UnsupportedError as error:
            unknown = error.why or error.summary
    if unknown:
        yield f"cannot be counted: {unknown}"
    if step is None:
        return
    if tp_size > 1:
        yield f"over tp, a microbatch of {num_rows} x {seq_length:,} tokens: {step.tp}"
        if (per_run := step.layers.per_run) is not None:
            yield f"of these in a layer: {per_run[0]:g} in its forward, {per_run[1]:g} in its backward"
    if rehearsal.shape.data_size > 1:
        yield f"over the data axes, a microbatch: {step.data}"
    if step.after.calls:
        yield f"gradient phase, once a step: {step.after}"


def _attention(model: nn.Module) -> str:
    """By what a model attends in a `TrainStep`, in words."""
    if not can_take_host_masks(model):
        return f"attention: the model's own ({getattr(model.config, '_attn_implementation', None)})"
    return "attention: PyTorch SDPA; packed documents are separated by a mask"
