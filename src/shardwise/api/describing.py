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

from shardwise.api.fitting import describe_fit
from shardwise.api.prepare import decide, observe_labels, open_subgroups
from shardwise.comm.count import CommunicationCount, Traffic
from shardwise.errors import ConfigError, MeshError, ShardwiseError, UnsupportedError, counted, sized
from shardwise.estimate.memory import (
    ActivationBytes,
    Card,
    StateBytes,
    alike,
    describe_stages,
    schedule_of,
    stage_parts,
    stages_named,
    states_of,
)
from shardwise.lora.inject import inject
from shardwise.loss.logits import dropped_output
from shardwise.mesh import Mesh
from shardwise.optim.clip import clip_grad_norm_
from shardwise.optim.gradients import gradients_of, track_gradients
from shardwise.optim.steps import stepping_class
from shardwise.parallel.activation_memory import FakeTensorCorrections, MemoryCount, PeakCount, fake_tensors
from shardwise.parallel.apply import apply_plan
from shardwise.parallel.build import allocate_meta, build_meta_model, num_positions, read_config
from shardwise.parameters.registry import registry_of
from shardwise.plan.decision import Explanation, SplitPlan
from shardwise.plan.options import ParallelSpec, Precision
from shardwise.proof.counting import counted_layers
from shardwise.runtime.adapter_facts import find_model
from shardwise.runtime.host_masks import can_take_host_masks, read_host_mask, take_host_masks
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

    def decide(self) -> tuple[PreTrainedModel, SplitPlan]:
        """Returns the model on the meta device, not yet split, and its plan. Raises the errors of `load`."""
        model = build_meta_model(
            copy.deepcopy(self.source), self.auto_class, dtype=self.dtype, options=dict(self.options)
        )
        if self.adapter is not None:
            inject(model, self.adapter)
        return model, decide(model, self.shape, self.spec)

    @contextmanager
    def open(self, *, rank: int = 0) -> Iterator[PreTrainedModel]:
        """Context manager that gives a rank's split model in training mode, on fake tensors.

        Raises the errors of `load`, and a `MeshError` if this process already belongs to a distributed job.
        """
        model, plan = self.decide()
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

    @property
    def precision(self) -> Precision:
        """Dtypes of parameters, computation and gradient reduction; by default all float32."""
        return self.spec.precision or Precision(compute="float32")

    def step_bytes(self, batch: tuple[int, int], num_microbatches: int | None, *, most: int) -> int:
        """Returns the bytes that the fullest rank needs in a step; only those kept between steps if they exceed `most`.

        Args:
            batch: rows and tokens of a microbatch.
        """
        model, plan = self.decide()
        frozen = _frozen(model)
        of_all = [self._states(plan, frozen, coord) for coord in range(plan.shape.pp_size)]
        if (kept := max(each.total for each in of_all)) > most:
            return kept
        if plan.pipeline is None:
            step = self.run_step(num_rows=batch[0], seq_length=batch[1])
            return of_all[0].parameters + of_all[0].optimizer + step.peak_bytes
        steps = self.run_stages(num_rows=batch[0], seq_length=batch[1])
        held = {number: step.held_bytes for number, step in steps.items()}
        schedule = schedule_of(plan, num_microbatches)
        parts = stage_parts(plan, schedule, held, precision=self.precision, frozen=frozen)
        return max(sum(each.values()) for each in parts)

    def _states(self, plan: SplitPlan, frozen: Collection[str], coord: int = 0) -> StateBytes:
        itemsize = getattr(torch, self.precision.params).itemsize
        return states_of(plan, itemsize=itemsize, frozen=frozen, coord=coord)

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
        held_bytes: bytes kept between forward and backward, including received and sent tensors. What FSDP2 gathers is
            not counted: it exists once for all microbatches.
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
            held = count.total().activations if registry.mesh.shape.data_size > 1 else count.total().total
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
        card: adds whether a step fits it, and if not what would.
    """
    spec, options = ParallelSpec.take(options)
    shape = layout if isinstance(layout, MeshShape) else MeshShape.parse(layout)
    config, model_options = (source, options) if isinstance(source, PreTrainedConfig) else read_config(source, options)
    if batch is not None:
        _check_batch(config, *batch)
    rehearsal = Rehearsal(
        source=config,
        shape=shape,
        spec=spec,
        dtype=None if spec.precision is None else getattr(torch, spec.precision.params),
        auto_class=auto_class,
        options=model_options,
        adapter=adapter,
    )
    model, plan = rehearsal.decide()
    explain = _explain_step if plan.pipeline is None else _explain_stages
    found, needed = explain(plan, rehearsal, batch, num_microbatches, frozen=_frozen(model))
    memory = [_attention(model), *found.memory.splitlines()]
    if card is not None and needed is None:
        memory.append(f"fits {card.name}: not known, as what a step holds is not")
    elif card is not None and needed is not None:
        memory.append(describe_fit(rehearsal, card, needed, batch=batch, num_microbatches=num_microbatches))
    return replace(found, memory="\n".join(memory))


def _check_batch(config: PreTrainedConfig, num_rows: int, seq_length: int) -> None:
    window = num_positions(config)
    if window is not None and seq_length > window:
        raise ConfigError(f"rows of {seq_length:,} tokens", why=f"the model sees {window:,} positions", fix="use fewer")
    if (num_tokens := num_rows * seq_length) > MOST_TOKENS:
        fix = f"ask for at most {MOST_TOKENS:,}: what a step keeps grows with them"
        raise ConfigError(f"a microbatch of {num_tokens:,} tokens on a data rank", fix=fix)


def _frozen(model: nn.Module) -> set[str]:
    return {fqn for fqn, value in model.named_parameters() if not value.requires_grad}


def _explain_stages(
    plan: SplitPlan,
    rehearsal: Rehearsal,
    batch: tuple[int, int] | None,
    num_microbatches: int | None,
    *,
    frozen: Collection[str],
) -> tuple[Explanation, int | None]:
    """Returns what each stage of a pipeline holds and sends, and the bytes that the fullest rank needs in a step:
    without a batch those that it keeps between steps, None if they are not known.
    """
    schedule, precision = schedule_of(plan, num_microbatches), rehearsal.precision
    itemsize, lines, held, memory = getattr(torch, precision.params).itemsize, [], {}, ""
    needed: int | None = max(rehearsal._states(plan, frozen, coord).total for coord in range(plan.shape.pp_size))
    if batch is not None:
        try:
            steps = rehearsal.run_stages(num_rows=batch[0], seq_length=batch[1])
        except UnsupportedError as error:
            lines, needed = (
                [f"what stages hold between forward and backward is not known: {error.why or error.summary}"],
                None,
            )
        else:
            held = {number: step.held_bytes for number, step in steps.items()}
            parts = stage_parts(plan, schedule, held, precision=precision, frozen=frozen)
            fullest = max(range(len(parts)), key=lambda coord: sum(parts[coord].values()))
            needed = sum(parts[fullest].values())
            memory = f"a step needs about {sized(needed)} on the fullest rank, of pp {fullest}: "
            memory += ", ".join(f"{name} {sized(size)}" for name, size in parts[fullest].items())
            memory += "; an estimate by parts, without temporary tensors"
            lines = [*_sent(steps), *(_over_tp(steps) if plan.num_parts > 1 else ())]
    stages = describe_stages(plan, schedule, itemsize=itemsize, frozen=frozen, activations=held)
    return Explanation(plan=plan, collectives=tuple(lines), memory=memory, stages=stages), needed


def _sent(steps: Mapping[int, RehearsedStage]) -> Iterator[str]:
    for first, last in alike({number: (step.num_sent, step.sent_bytes) for number, step in steps.items()}):
        if (step := steps[first]).num_sent:
            sent = f"sends {counted(step.num_sent, 'tensor')} of {sized(step.sent_bytes)}, and is sent the gradients"
            yield f"over pp, a microbatch: {stages_named(first, last)} {sent}"


def _over_tp(steps: Mapping[int, RehearsedStage]) -> Iterator[str]:
    for first, last in alike({number: str(step.tp) for number, step in steps.items()}):
        yield f"over tp, a microbatch: {stages_named(first, last).removesuffix(':')}: {steps[first].tp}"


def _explain_step(
    plan: SplitPlan,
    rehearsal: Rehearsal,
    batch: tuple[int, int] | None,
    num_microbatches: int | None,
    *,
    frozen: Collection[str],
) -> tuple[Explanation, int | None]:
    """Returns what rank 0 holds and communicates, and the bytes that it needs in a step: without a batch those that it
    keeps between steps, None if they are not known.
    """
    kept = rehearsal._states(plan, frozen)
    memory = f"a rank keeps {sized(kept.total)} from step to step in {rehearsal.precision.params}: "
    memory += f"parameters {sized(kept.parameters)}, gradients {sized(kept.gradients)}, AdamW {sized(kept.optimizer)}"
    if batch is None and (plan.num_parts == 1 or dist.is_initialized()):
        return Explanation(plan=plan, memory=memory), kept.total
    if batch is None:
        rehearsal = replace(rehearsal, shape=MeshShape(tp_size=plan.num_parts))
    num_rows, seq_length = batch or _FEW_TOKENS
    middle = f"between forward and backward of {num_rows} x {seq_length:,} tokens"
    try:
        step = rehearsal.run_step(num_rows=num_rows, seq_length=seq_length)
    except UnsupportedError as error:
        why = error.why or error.summary
        lines: tuple[str, ...] = (f"cannot be counted: {why}",)
        if batch is None:
            return Explanation(plan=plan, collectives=lines, memory=memory), kept.total
        memory += f"\nwhat it holds {middle} is not known: {why}"
        return Explanation(plan=plan, collectives=lines, memory=memory), None
    lines = tuple(_communicated(rehearsal.shape, step, num_rows=num_rows, seq_length=seq_length))
    if batch is None:
        return Explanation(plan=plan, collectives=lines, memory=memory), kept.total
    held, needed = step.activations, kept.parameters + kept.optimizer + step.peak_bytes
    gathered = f", gathered or cast parameters {sized(held.gathered)}" if held.gathered else ""
    memory += f"\n{middle} it holds {sized(held.total)} besides: activations {sized(held.activations)}{gathered}"
    memory += f"\npeak during a step: {sized(needed)} (parameters, AdamW state, and {sized(step.peak_bytes)} of "
    memory += "gradients, activations and temporary tensors)"
    return Explanation(plan=plan, collectives=lines, memory=memory), needed


def _communicated(shape: MeshShape, step: RehearsedStep, *, num_rows: int, seq_length: int) -> Iterator[str]:
    """Yields what rank 0 communicates, in words."""
    if shape.tp_size > 1:
        yield f"over tp, a microbatch of {num_rows} x {seq_length:,} tokens: {step.tp}"
        if step.layer is not None:
            forward, backward = step.layer
            yield f"of these in a layer: {forward:g} in its forward, {backward:g} in its backward"
    if shape.data_size > 1:
        yield f"over the data axes, a microbatch: {step.data}"
    if step.after.calls:
        yield f"gradient phase, once a step: {step.after}"


def _attention(model: nn.Module) -> str:
    """By what a model attends in a `TrainStep`, in words."""
    if not can_take_host_masks(model):
        return f"attention: the model's own ({getattr(model.config, '_attn_implementation', None)})"
    return "attention: PyTorch SDPA; packed documents are separated by a mask"
