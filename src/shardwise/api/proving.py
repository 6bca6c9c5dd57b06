"""`verify` and `describe`: what a layout does to a model, proved and explained before any weight is read."""

from __future__ import annotations

import copy
import functools
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedConfig

from shardwise.api.building import parallelize
from shardwise.api.planning import plan_for
from shardwise.api.rehearsal import Rehearsal
from shardwise.comm.operations import all_reduce_
from shardwise.errors import UnsupportedError
from shardwise.estimate.memory import state_bytes
from shardwise.layout.placement import Chunk
from shardwise.layout.tensor import Layout, Step
from shardwise.mesh import Mesh
from shardwise.plan.explain import Explanation, explain
from shardwise.plan.options import FsdpPolicy, Precision, Recompute
from shardwise.plan.resolve import SplitPlan, resolve
from shardwise.plan.spec import Plan
from shardwise.proof.objective import has_loss, objective_of
from shardwise.proof.parity import Measurement, Tolerance, measure
from shardwise.proof.report import Report
from shardwise.proof.twins import build_twin, make_batch, settle, shrink_config
from shardwise.split.apply import check_axes
from shardwise.split.build import build_meta_model, read_config
from shardwise.split.choices import Choices
from shardwise.split.facts import read_facts
from shardwise.testing.spawn import spawn
from shardwise.topology.axes import DATA_AXES
from shardwise.topology.shape import MeshShape
from shardwise.train.batch import count_targets, split_rows, target_names
from shardwise.train.gradients import reduce_gradients
from shardwise.train.step import TrainStep

__all__ = ["Proof", "describe", "verify"]


def describe(  # noqa: PLR0913 - as `load`, whose choices it explains
    source: str | os.PathLike[str] | PreTrainedConfig,
    layout: str | MeshShape,
    *,
    auto_class: Any = None,
    plan: str | Plan | Mapping[str, str] = "auto",
    sequence_parallel: bool = False,
    fsdp: FsdpPolicy | None = None,
    precision: Precision | None = None,
    recompute: Recompute | None = None,
    batch: tuple[int, int] | None = None,
    **options: Any,
) -> Explanation:
    """What a layout does to a model, without a mesh, a process group or weights: rules, placements, what stays whole
    and why, and the bytes a rank holds.

    Args:
        batch: rows of one microbatch on a data rank, and tokens in each: adds what is held between its forward and its
            backward, counted by running the forward on fake tensors. Only in a process that is no rank of a job.
        fsdp, precision, recompute: as in `load`; they only matter for that.

    Raises:
        PlanError: the plan cannot be followed; every problem is listed.
        UnsupportedError: the layout has an axis that is not supported yet.
    """
    shape = layout if isinstance(layout, MeshShape) else MeshShape.parse(layout)
    check_axes(shape)
    config, model_options = (source, options) if isinstance(source, PreTrainedConfig) else read_config(source, options)
    model = build_meta_model(copy.deepcopy(config), auto_class, dtype=None, options=model_options)
    facts = read_facts(model)
    rules = plan_for(model, plan, tp_size=shape.size("tp"), sequence_parallel=sequence_parallel)
    split_plan = resolve(rules, facts, tp_size=shape.size("tp"), sequence_parallel=sequence_parallel)
    memory = _at_rest(split_plan, shape, dtype="float32" if precision is None else precision.params)
    if batch is not None:
        rehearsal = Rehearsal(
            source=config,
            shape=shape,
            plan=plan,
            sequence_parallel=sequence_parallel,
            choices=Choices(fsdp=fsdp or FsdpPolicy(), precision=precision, recompute=recompute or Recompute()),
            dtype=None if precision is None else getattr(torch, precision.params),
            auto_class=auto_class,
            options=model_options,
        )
        memory += "\n" + _held(rehearsal, batch)
    return explain(split_plan, facts, layout=str(shape), memory=memory)


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


def verify(
    source: nn.Module | str | os.PathLike[str] | PreTrainedConfig,
    layout: str | MeshShape = "tp2",
    *,
    auto_class: Any = None,
    plan: str | Plan | Mapping[str, str] = "auto",
    sequence_parallel: bool = False,
    timeout_seconds: float = 300.0,
    **options: Any,
) -> Report:
    """Proves on the CPU that a split computes what the whole model does.

    Builds a tiny twin (the same architecture, few and narrow layers), trains it whole and split over as many gloo ranks
    as the layout has, and compares loss, logits, every gradient, the parameters after three AdamW steps, and after
    twenty the copies that ranks hold of the same parameters. Starts its own ranks; call it from one process.

    Args:
        source: a model, a directory, a hub id or a config; only its architecture matters.
        layout: as in `Mesh.open`.
        auto_class, plan, sequence_parallel, options: as in `load`.

    Returns:
        A `Report`: `report.passed`, and `str(report)` as a table.

    Raises:
        UnsupportedError: no tiny twin of the architecture can be built.
        PlanError: the plan cannot be followed.
    """
    shape = layout if isinstance(layout, MeshShape) else MeshShape.parse(layout)
    if isinstance(source, nn.Module):
        config: Any = source.config
        auto_class = auto_class or type(source)
    else:
        config = source if isinstance(source, PreTrainedConfig) else read_config(source, options)[0]
    twin = shrink_config(config, without_dropout=True)
    proof = Proof(twin, auto_class or AutoModelForCausalLM, str(shape), plan, sequence_parallel)
    return proof.run(f"a twin of {config.model_type}", timeout_seconds=timeout_seconds)


@dataclass(frozen=True)
class Proof:
    """A proof to be run: what every rank of it is told."""

    config: PreTrainedConfig
    model_class: Any
    layout: str
    plan: str | Plan | Mapping[str, str] = "auto"
    sequence_parallel: bool = False
    tolerance: Tolerance = Tolerance()  # noqa: RUF009 - frozen
    num_steps: int = 20

    def run(self, subject: str, *, timeout_seconds: float = 300.0) -> Report:
        """Starts the ranks and reports what they find."""
        start = time.perf_counter()
        size = MeshShape.parse(self.layout).world_size
        measurements = spawn(_prove_on_this_rank, size, self, timeout=timeout_seconds)
        return Report(
            subject=subject,
            layout=f"{self.layout} with sequence parallelism" if self.sequence_parallel else self.layout,
            measurements=tuple(measurements),
            seconds=time.perf_counter() - start,
        )


def _prove_on_this_rank(proof: Proof) -> Measurement:
    with Mesh.open(proof.layout, device="cpu") as mesh:
        whole = build_twin(proof.config, proof.model_class, seed=0)
        batch = make_batch(whole, batch_size=max(2, mesh.data_size), seed=0)
        settle(whole, batch)
        if not has_loss(whole, batch):
            batch.pop("labels", None)  # it takes them, and computes nothing of them

        def split(model: nn.Module, mesh: Mesh) -> nn.Module:
            return parallelize(model, mesh, plan=proof.plan, sequence_parallel=proof.sequence_parallel)

        return measure(
            whole,
            batch,
            mesh,
            split=split,
            step=_train,
            reference_loss=functools.partial(_loss_of_parts, num_parts=mesh.data_size),
            tolerance=proof.tolerance,
            num_steps=proof.num_steps,
        )


def _train(model: nn.Module, mesh: Mesh, batch: Mapping[str, Any]) -> Tensor:
    """Forward and backward of a split model as a user runs them; models without a loss are driven by hand."""
    part = split_rows(batch, _num_rows(batch, mesh.data_size), mesh.data_size)[mesh.data_rank]
    if any(name in batch for name in target_names(model)):
        return TrainStep(model, mesh)(part).loss
    loss = objective_of(model(**part))
    loss.backward()
    reduce_gradients(model)
    total, group = loss.detach(), mesh.group(*DATA_AXES)
    if group is not None:
        all_reduce_(total, group)
    return total / mesh.data_size


def _loss_of_parts(model: nn.Module, batch: Mapping[str, Any], *, num_parts: int) -> Tensor:
    """The whole model's loss of the whole batch. Where it adds a balance of experts to it, which is computed for each
    data rank's rows, the mean of the parts' losses.
    """
    output = model(**batch)
    if num_parts == 1 or not any("aux_loss" in name for name in output):
        return objective_of(output)
    parts = split_rows(batch, _num_rows(batch, num_parts), num_parts)
    counts = [count_targets(model, part) for part in parts]
    weighted = [objective_of(model(**part)) * (n / sum(counts)) for part, n in zip(parts, counts, strict=True)]
    return torch.stack(weighted).sum()


def _num_rows(batch: Mapping[str, Any], num_parts: int) -> int:
    """Rows that divide among the data ranks: of the labels, or of what has fewest."""
    sizes = [value.shape[0] for value in batch.values() if isinstance(value, Tensor) and value.ndim]
    return min(size for size in sizes if size % num_parts == 0)
