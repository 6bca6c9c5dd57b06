"""`describe`: what a layout does to a model, explained before any weight is read."""

import copy
import math
import os
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from transformers import PreTrainedConfig, PreTrainedModel

from shardwise.api.prepare import decide, observe_labels, open_subgroups
from shardwise.comm.count import CommunicationCount, Traffic
from shardwise.errors import ConfigError, MeshError, ShardwiseError, UnsupportedError, counted
from shardwise.estimate.memory import ActivationBytes, StateBytes, describe_stages, mib, schedule_of, state_bytes
from shardwise.lora.inject import inject
from shardwise.loss.logits import dropped_output
from shardwise.mesh import Mesh
from shardwise.optim.clip import clip_grad_norm_
from shardwise.optim.gradients import gradients_of, track_gradients
from shardwise.optim.steps import stepping_class
from shardwise.parallel.activation_memory import FakeTensorCorrections, MemoryCount, PeakCount, fake_tensors
from shardwise.parallel.apply import apply_plan
from shardwise.parallel.build import (
    allocate_meta,
    as_dtype,
    build_meta_model,
    num_positions,
    read_config,
    take_model_options,
)
from shardwise.parameters.registry import registry_of
from shardwise.plan.decision import Explanation, SplitPlan
from shardwise.plan.options import ParallelSpec
from shardwise.proof.counting import counted_layers
from shardwise.runtime.adapter_facts import find_model
from shardwise.runtime.host_masks import can_take_host_masks, read_host_mask, take_host_masks
from shardwise.schedule.schedule import Schedule
from shardwise.stages.model import Stages
from shardwise.tiny.inputs import make_batch
from shardwise.topology.shape import AXES, MeshShape


@contextmanager
def fake_mesh(shape: MeshShape, *, rank: int = 0) -> Iterator[Mesh]:
    """Context manager: the mesh of one rank on the CPU, whose collectives do nothing. For shapes and counts only."""
    if dist.is_initialized():
        raise MeshError(
            f"this process has a process group and cannot simulate a rank of {shape}",
            fix="call this before the process group is opened, or in another process",
        )
    if shape.world_size > 1:
        from torch.testing._internal.distributed.fake_pg import FakeStore  # registers the backend "fake"

        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=shape.world_size)
    try:
        with (
            Mesh.open(shape, device="cpu")
            if shape.world_size > 1
            else Mesh(shape, rank=0, device=torch.device("cpu")) as mesh
        ):
            yield mesh
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


@dataclass(frozen=True, kw_only=True)
class Rehearsal:
    """Description of a fake run.

    Attributes:
        source: the model's config. No weights are read.
        spec, dtype, auto_class, options, adapter: see `load`.
    """

    source: PreTrainedConfig
    shape: MeshShape
    spec: ParallelSpec = field(default_factory=ParallelSpec)
    dtype: torch.dtype | None = None
    auto_class: Any = None
    options: Mapping[str, Any] = field(default_factory=dict)
    adapter: Any = None

    @contextmanager
    def open(self, *, rank: int = 0) -> Iterator[PreTrainedModel]:
        """Context manager that gives a rank's split model in training mode, on fake tensors.

        Raises the errors of `load`, and a `MeshError` if this process already belongs to a distributed job.
        """
        model = build_meta_model(
            copy.deepcopy(self.source), self.auto_class, dtype=self.dtype, options=dict(self.options)
        )
        if self.adapter is not None:
            inject(model, self.adapter)
        plan = decide(model, self.shape, self.spec)
        observe_labels(model)
        # Only the devices themselves have symmetric memory.
        spec = replace(self.spec, fsdp=replace(self.spec.fsdp, symmetric_memory=False))
        with fake_mesh(self.shape, rank=rank) as mesh, fake_tensors():
            allocate_meta(model)
            registry = apply_plan(model, mesh, plan, spec)
            registry.context.has_dropout = False  # which stream draws a mask changes no shape, and seeds are values
            with unset_fake_temporarily():
                open_subgroups(registry)
            track_gradients(model, registry)
            yield model.train()

    def _eager(self) -> "Rehearsal":
        if self.spec.recompute.mode == "budget":
            raise UnsupportedError(
                "a rehearsal of Recompute mode 'budget'",
                why="what is kept is chosen when blocks are compiled",
                fix="rehearse modes none and full, between which it is",
            )
        return replace(self, spec=replace(self.spec, compilation=None))

    def run_step(self, *, num_rows: int, seq_length: int) -> "RehearsedStep":
        """Runs one microbatch eagerly on rank 0; returns memory and communication, with those of the gradient phase."""
        with self._eager().open() as model:
            batch = _full_rows(model, num_rows, seq_length)
            with as_data_dependent_error(model):
                return _run_step(model, batch)

    def run_stages(self, *, num_rows: int, seq_length: int) -> "dict[int, RehearsedStage]":
        """Runs one microbatch through each pipeline stage, on the stage's first rank: forward, and over tp backward."""
        found: dict[int, RehearsedStage] = {}
        for coord in range(self.shape.pp_size):
            with self._eager().open(rank=self.shape.rank(**dict.fromkeys(AXES, 0) | {"pp": coord})) as model:
                batch = _full_rows(model, num_rows, seq_length)
                stages = registry_of(model).stages
                assert stages is not None
                with as_data_dependent_error(model):
                    found |= {stage: _run_stage(model, stages, stage, batch) for stage in stages.own}
        return dict(sorted(found.items()))


@dataclass(frozen=True, kw_only=True)
class RehearsedStage:
    """Memory and communication of one pipeline stage for one microbatch.

    Attributes:
        held_bytes: bytes kept between forward and backward, including received and sent tensors.
        tp: collectives over tp in forward and backward.
    """

    held_bytes: int
    num_sent: int
    sent_bytes: int
    tp: Traffic


@dataclass(frozen=True, kw_only=True)
class RehearsedStep:
    """Memory and communication of rank 0 for one microbatch.

    Attributes:
        peak_bytes: peak memory besides stored parameters and optimizer states: activations, gradients, the loss, and
            temporary memory of forward, backward, clipping and AdamW.
        after: communication of the gradient phase after the last microbatch, over any axis.
        layer: number of tp collectives in forward and in backward of one layer; None if no layer with split parts ran.
    """

    activations: ActivationBytes
    peak_bytes: int
    tp: Traffic
    data: Traffic
    after: Traffic
    layer: tuple[float, float] | None


@contextmanager
def as_data_dependent_error(model: nn.Module) -> Iterator[None]:
    """Context manager: converts the errors of a model that cannot run without values to `UnsupportedError`."""
    try:
        yield
    except ShardwiseError:
        raise
    except Exception as error:
        raise UnsupportedError(
            f"what {type(model).__name__} does in a step depends on more than shapes",
            why=f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}",
        ) from error


def _full_rows(model: PreTrainedModel, num_rows: int, seq_length: int) -> dict[str, Any]:
    """Returns a batch without padding. Only real values could tell the model's own code that its mask hides nothing."""
    batch = make_batch(model, batch_size=num_rows, sequence_length=seq_length, seed=0)
    batch.pop("attention_mask", None)
    if take_host_masks(find_model(model)):
        known = {name: value for name, value in batch.items() if name in ("input_ids", "inputs_embeds")}
        rows = read_host_mask(known, torch.device("cpu"))
        batch |= {} if rows is None else {"attention_mask": rows.mask}
    return batch


def _run_stage(model: nn.Module, stages: Stages, stage: int, batch: Mapping[str, Any]) -> RehearsedStage:
    incoming, outgoing = stages.shapes(stage, batch)
    registry = registry_of(model)
    root, group = registry.stage_roots.get(stage), registry.mesh.group("tp")
    over_tp = CommunicationCount(group=group)
    with over_tp if group is not None else nullcontext():
        with MemoryCount(model) as count, FakeTensorCorrections(), dropped_output(registry.context):
            received = [torch.empty(x.shape, dtype=x.dtype, requires_grad=x.needs_gradient) for x in incoming]
            output = stages.run(stage, batch, received) if root is None else root(batch, received)
            output = (output.loss,) if hasattr(output, "loss") else output
            held = count.total().total
        if group is not None:
            with FakeTensorCorrections():
                started = [x for x in output if x.requires_grad]
                torch.autograd.backward(started, [torch.ones_like(x) for x in started])
    del output
    sizes = [math.prod(x.shape) * x.dtype.itemsize for x in outgoing]
    return RehearsedStage(held_bytes=held, num_sent=len(sizes), sent_bytes=sum(sizes), tp=over_tp.traffic())


def _after_a_step(model: nn.Module) -> torch.optim.Optimizer:
    """Returns a fused AdamW with allocated states."""
    trained = [each for each in model.parameters() if each.requires_grad]
    made: Any = stepping_class(torch.optim.AdamW)
    optimizer: torch.optim.Optimizer = made(trained, fused=True)
    for parameter in trained:
        parameter.grad = torch.zeros_like(parameter)
    gradients_of(model).is_late = True  # nobody can read whether gradients are finite
    optimizer.step()
    optimizer.zero_grad()
    gradients_of(model).pending_fault = None
    return optimizer


def _run_step(model: nn.Module, batch: Mapping[str, Any]) -> RehearsedStep:
    mesh = registry_of(model).mesh
    group = mesh.group("tp")
    over_tp, over_all = CommunicationCount(group=group), CommunicationCount()
    optimizer = _after_a_step(model)
    peak = PeakCount(model)
    with over_all, over_tp if group is not None else nullcontext(), counted_layers(model, mesh) as layers, peak:
        with MemoryCount(model) as count, FakeTensorCorrections(), dropped_output(registry_of(model).context):
            loss = model(**batch).loss
            activations = count.total()
        with FakeTensorCorrections():
            with gradients_of(model).no_sync():
                loss.backward()
                tp, total = over_tp.traffic(), over_all.traffic()
            after = over_all.traffic() - total
            clip_grad_norm_(model, 1.0)
            optimizer.step()
    return RehearsedStep(
        activations=activations, peak_bytes=peak.peak_bytes, tp=tp, data=total - tp, after=after, layer=layers.per_run
    )


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
    **options: Any,
) -> Explanation:
    """Returns what a layout does to a model, without a mesh, a process group or weights: rules, placements, what is
    replicated and why, and the bytes a rank holds.

    Args:
        batch: rows of one microbatch on a data rank, and tokens in each: adds what is kept between its forward and its
            backward, counted by running the forward on fake tensors. Only in a process that is no rank of a job.
        num_microbatches: of a step; of a pipeline by default the fewest that its schedule takes.
        dtype: dtype of the parameters. Default: `precision.params`, else float32.
    """
    spec, options = ParallelSpec.take(options)
    torch_dtype, options = take_model_options(options)
    shape = layout if isinstance(layout, MeshShape) else MeshShape.parse(layout)
    config, model_options = (source, options) if isinstance(source, PreTrainedConfig) else read_config(source, options)
    if batch is not None:
        _check_batch(config, *batch)
    model = build_meta_model(copy.deepcopy(config), auto_class, dtype=None, options=model_options)
    if adapter is not None:
        inject(model, adapter)
    plan = decide(model, shape, spec)
    chosen = as_dtype(torch_dtype if dtype is None else dtype)
    if chosen is None and spec.precision is not None:
        chosen = as_dtype(spec.precision.params)
    dtype = str(chosen or torch.float32).removeprefix("torch.")
    in_full = batch is not None or plan.pipeline is not None
    rehearsal = Rehearsal(
        source=config,
        shape=shape if in_full else MeshShape(tp_size=shape.tp_size),
        spec=spec,
        dtype=chosen,
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
    if batch is None and (plan.num_parts == 1 or dist.is_initialized()):
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
    """Returns what rank 0, which holds most, keeps from step to step with AdamW."""
    trained = [planned.layout for fqn, planned in plan.parameters.items() if fqn not in frozen]
    kept = [planned.layout for fqn, planned in plan.parameters.items() if fqn in frozen]
    return state_bytes(trained, plan.shape.coords(0), itemsize=getattr(torch, dtype).itemsize, frozen=kept)


def _rehearsed(rehearsal: Rehearsal, batch: tuple[int, int], at_rest: StateBytes) -> tuple[str, tuple[str, ...]]:
    """Returns what rank 0 holds in the middle of a step, and what it communicates, in words."""
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
