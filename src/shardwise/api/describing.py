"""`describe`: what a layout does to a model, explained before any weight is read."""

from __future__ import annotations

import copy
import os
from typing import Any

import torch
from transformers import PreTrainedConfig

from shardwise.api.prepare import decide
from shardwise.api.rehearsal import Rehearsal
from shardwise.errors import UnsupportedError
from shardwise.estimate.memory import state_bytes
from shardwise.layout.placement import Chunk
from shardwise.layout.tensor import Layout, Step
from shardwise.plan.decision import SplitPlan
from shardwise.plan.explain import Explanation, explain
from shardwise.plan.options import ParallelSpec
from shardwise.split.build import build_meta_model, read_config
from shardwise.split.facts import read_facts
from shardwise.topology.shape import MeshShape

__all__ = ["describe"]


def describe(
    source: str | os.PathLike[str] | PreTrainedConfig,
    layout: str | MeshShape,
    *,
    auto_class: Any = None,
    batch: tuple[int, int] | None = None,
    **options: Any,
) -> Explanation:
    """What a layout does to a model, without a mesh, a process group or weights: rules, placements, what stays whole
    and why, and the bytes a rank holds.

    Args:
        batch: rows of one microbatch on a data rank, and tokens in each: adds what is held between its forward and its
            backward, counted by running the forward on fake tensors. Only in a process that is no rank of a job.
        options: every option of `load`.

    Raises:
        PlanError: the plan cannot be followed; every problem is listed.
        UnsupportedError: the layout has an axis that is not supported yet.
    """
    spec, options = ParallelSpec.take(options)
    shape = layout if isinstance(layout, MeshShape) else MeshShape.parse(layout)
    config, model_options = (source, options) if isinstance(source, PreTrainedConfig) else read_config(source, options)
    model = build_meta_model(copy.deepcopy(config), auto_class, dtype=None, options=model_options)
    plan = decide(model, shape, spec)
    memory = _at_rest(plan, shape, dtype="float32" if spec.precision is None else spec.precision.params)
    if batch is not None:
        rehearsal = Rehearsal(
            source=config,
            shape=shape,
            spec=spec,
            dtype=None if spec.precision is None else getattr(torch, spec.precision.params),
            auto_class=auto_class,
            options=model_options,
        )
        memory += "\n" + _held(rehearsal, batch)
    return explain(plan, read_facts(model), layout=str(shape), memory=memory)


def _at_rest(plan: SplitPlan, shape: MeshShape, *, dtype: str) -> str:
    """What rank 0, which holds most, keeps from step to step with AdamW, in words."""
    layouts = [
        Layout(
            planned.shape,
            (Step("tp", plan.tp_size, planned.placement), Step("fsdp", shape.fsdp_size, Chunk(0)))
            if planned.shape
            else (),
        )
        for planned in plan.parameters.values()
    ]
    found = state_bytes(layouts, shape.coords(0), itemsize=getattr(torch, dtype).itemsize)
    parts = f"parameters {_mib(found.parameters)}, gradients {_mib(found.gradients)}, AdamW {_mib(found.optimizer)}"
    return f"a rank keeps {_mib(found.total)} from step to step in {dtype}: {parts}"


def _held(rehearsal: Rehearsal, batch: tuple[int, int]) -> str:
    """What rank 0 holds in the middle of a step, in words."""
    num_rows, seq_length = batch
    middle = f"between forward and backward of {num_rows} x {seq_length:,} tokens"
    try:
        found = rehearsal.count_held(num_rows=num_rows, seq_length=seq_length)
    except UnsupportedError as error:
        return f"what it holds {middle} cannot be told: {error.why or error.summary}"
    gathered = f", gathered or cast parameters {_mib(found.gathered)}" if found.gathered else ""
    return f"{middle} it holds {_mib(found.total)} besides: activations {_mib(found.activations)}{gathered}"


def _mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:,.1f} MiB"
