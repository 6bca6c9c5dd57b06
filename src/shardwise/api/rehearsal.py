"""`Rehearsal`: one rank of a layout without values: what it holds, and what a step communicates and keeps."""

import copy
import math
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import astuple, dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedConfig, PreTrainedModel

from shardwise.api.prepare import decide, observe_labels, open_subgroups
from shardwise.comm.count import CommunicationCount, Traffic
from shardwise.errors import MeshError, UnsupportedError, counted
from shardwise.estimate.memory import ActivationBytes, StateBytes, schedule_of, states_of
from shardwise.lora.inject import inject
from shardwise.loss.logits import dropped_output
from shardwise.mesh import Mesh
from shardwise.optim.clip import clip_grad_norm_
from shardwise.optim.gradients import gradients_of, track_gradients
from shardwise.optim.steps import stepping_class
from shardwise.parallel.activation_memory import FakeTensorCorrections, MemoryCount, PeakCount, fake_tensors
from shardwise.parallel.apply import apply_plan
from shardwise.parallel.build import allocate_meta, build_meta_model
from shardwise.parameters.registry import registry_of
from shardwise.plan.decision import SplitPlan
from shardwise.plan.families import PROVED
from shardwise.plan.options import ParallelSpec, Precision
from shardwise.plan.pipeline_plan import PipelinePlan
from shardwise.probe.trial import Verdict, reraise_as
from shardwise.proof.counting import LayerCollectives, counted_layers
from shardwise.runtime.adapter_facts import find_model
from shardwise.runtime.host_masks import read_host_mask, take_host_masks
from shardwise.stages.model import Stages
from shardwise.tiny.inputs import MEDIA, encoder_of, make_batch, make_medium, missing_media
from shardwise.tiny.shrink import keep_layers, layer_kinds, repeating_lengths
from shardwise.topology.shape import AXES, MeshShape

_FEW_PATCHES = (1, 32, 32)  # frames, rows and columns of an image of any size


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
        single = Mesh(shape, rank=0, device=torch.device("cpu")) if shape.world_size == 1 else None
        with single or Mesh.open(shape, device="cpu") as mesh:
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

    def _build(self) -> PreTrainedModel:
        model = build_meta_model(
            copy.deepcopy(self.source), self.auto_class, dtype=self.dtype, options=dict(self.options)
        )
        if self.adapter is not None:
            inject(model, self.adapter)
        return model

    @contextmanager
    def open(self, *, rank: int = 0, plan: SplitPlan | None = None) -> Iterator[PreTrainedModel]:
        """Context manager that gives a rank's split model in training mode, on fake tensors; `plan`: if decided before.

        Raises the errors of `load`, and a `MeshError` if this process already belongs to a distributed job.
        """
        model = self._build()
        plan = plan or decide(model, self.shape, self.spec)
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
        """Dtypes of parameters, computation and gradient reduction; by default those of `dtype`, or all float32."""
        name = str(self.dtype or torch.float32).removeprefix("torch.")
        if self.spec.precision is None:
            return Precision(params=name, compute=name, reduce=name)
        return replace(self.spec.precision, params=name) if self.dtype is not None else self.spec.precision

    def forecast(
        self, batch: tuple[int, int] | None, num_microbatches: int | None, *, most: float = math.inf
    ) -> "Forecast":
        """Returns what the ranks need in a step with microbatches of these rows and tokens. Without a batch, or where a
        rank keeps more than `most` bytes between steps, no step is run.
        """
        model = self._build()
        plan = decide(model, self.shape, self.spec)
        kinds = (self.precision.params, self.precision.compute, self.precision.reduce)
        itemsizes = [getattr(torch, each).itemsize for each in kinds]
        frozen = {fqn for fqn, value in model.named_parameters() if not value.requires_grad}
        kept = [states_of(plan, coord, frozen, itemsize=itemsizes[0]) for coord in range(self.shape.pp_size)]
        parts = [{"parameters": each.parameters, "gradients": each.gradients, "AdamW": each.optimizer} for each in kept]
        found = Forecast(self, batch, num_microbatches, model, plan, kept, parts)
        if batch is None or max(each.total for each in kept) > most:
            return found
        try:
            if plan.pipeline is None:
                step = self.run_step(num_rows=batch[0], seq_length=batch[1], plan=plan)
                parts[0]["gradients"] = step.peak_bytes
                return replace(found, step=step)
            stages = self.run_stages(plan, plan.pipeline, batch)
        except UnsupportedError as error:
            return replace(found, unknown=error.why or error.summary)
        schedule = schedule_of(plan, num_microbatches)
        held = schedule.most_held({number: step.held_bytes for number, step in stages.items()})
        for coord, count in enumerate(schedule.in_flight):
            if self.shape.data_size > 1:  # FSDP2 shards neither of a stage's until the last microbatch
                whole = states_of(plan, coord, frozen, itemsize=1, is_sharded=False)
                del parts[coord]["gradients"]
                parts[coord]["unsharded parameters"] = whole.parameters * itemsizes[1]
                parts[coord]["unsharded gradients"] = whole.gradients * itemsizes[2]
            parts[coord][f"activations of {counted(count, 'microbatch')}"] = held[coord]
        return replace(found, stages=stages)

    def _eager(self) -> "Rehearsal":
        if self.spec.recompute.mode == "budget":
            raise UnsupportedError(
                "a rehearsal of Recompute mode 'budget'",
                why="what is kept is chosen when blocks are compiled",
                fix="rehearse modes none and full, between which it is",
            )
        return replace(self, spec=replace(self.spec, compilation=None))

    def run_step(self, *, num_rows: int, seq_length: int, plan: SplitPlan | None = None) -> "RehearsedStep":
        """Runs one microbatch eagerly on rank 0; returns memory and communication, with those of the gradient phase."""
        with self._eager().open(plan=plan) as model:
            batch = _full_rows(model, num_rows, seq_length)
            with reraise_as(partial(_depends_on_values, model)):
                return _run_step(model, batch)

    def count_step(self, *, num_rows: int, seq_length: int) -> "RehearsedStep":
        """Like `run_step`, but knows no memory. Where layers repeat, it runs two models of few layers."""
        is_known = self.spec.plan == "auto" and self.source.model_type in PROVED and self.adapter is None
        lengths = repeating_lengths(layer_kinds(self.source)) if is_known else None
        if lengths is None:
            return self.run_step(num_rows=num_rows, seq_length=seq_length)
        few, more, times = lengths
        short = (keep_layers(self.source, num_layers=number) for number in (few, more))
        a, b = (replace(self, source=each).run_step(num_rows=num_rows, seq_length=seq_length) for each in short)
        grown = {name: getattr(a, name).extrapolate(getattr(b, name), times) for name in ("tp", "data", "after")}
        counts = [x + times * (y - x) for x, y in zip(astuple(a.layers), astuple(b.layers), strict=True)]
        return replace(b, **grown, layers=LayerCollectives(*counts))

    def count_media(self) -> Iterator[str]:
        """Yields what encoding an image, or a sound, beside tokens communicates over tp in forward and backward."""
        over_tp = replace(self, shape=MeshShape(tp_size=self.shape.tp_size))
        generator = torch.Generator().manual_seed(0)
        with over_tp.open() as model, FakeTensorCorrections(makes_integers=True):
            for name in MEDIA.keys() & missing_media(model, make_batch(model, seed=0)):
                what = f"{MEDIA[name][0]}, {name}"
                try:
                    given = make_medium(model, name, [_FEW_PATCHES], generator=generator)
                    what += f" of {' x '.join(f'{size:,}' for size in given[name].shape)}"
                    with reraise_as(partial(_depends_on_values, model)):
                        counted = str(_encode(model, encoder_of(model, name), given))
                except UnsupportedError as error:
                    counted = f"cannot be counted: {error.why}"
                yield f"over tp, for each {what}, besides: {counted}"

    def run_stages(self, plan: SplitPlan, cut: PipelinePlan, batch: tuple[int, int]) -> "dict[int, RehearsedStage]":
        """Runs one microbatch through the first of alike pipeline stages: forward, and over tp backward."""
        of_layers, cuts, last = layer_kinds(self.source), cut.order.cut_tensors, cut.num_stages - 1
        kinds: list[Hashable] = list(range(last + 1))
        if len(of_layers) == len(cut.order.calls):
            inner = [(each.start, each.stop) for each in map(cut.segments, range(1, last))]
            kinds[1:-1] = [(tuple(of_layers[a:b]), cuts[a - 1 : a], cuts[b - 1 : b]) for a, b in inner]
        found: dict[Hashable, RehearsedStage] = {}
        for coord in range(self.shape.pp_size):
            if all(kinds[stage] in found for stage in cut.stages_on(coord)):
                continue
            rank = self.shape.rank(**dict.fromkeys(AXES, 0) | {"pp": coord})
            with self._eager().open(rank=rank, plan=plan) as model:
                rows = _full_rows(model, *batch)
                stages = registry_of(model).stages
                assert stages is not None
                with reraise_as(partial(_depends_on_values, model)):
                    found |= {kinds[stage]: _run_stage(model, stages, stage, rows) for stage in stages.own}
        return {stage: found[kind] for stage, kind in enumerate(kinds)}


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
        layers: tp collectives in forward and in backward of the layers with split parts.
    """

    activations: ActivationBytes
    peak_bytes: int
    tp: Traffic
    data: Traffic
    after: Traffic
    layers: LayerCollectives


@dataclass(frozen=True)
class Forecast:
    """What the first rank of every pp coordinate, which holds most, keeps between steps and needs in one.

    Attributes:
        parts: needed bytes by what they are for; without a pipeline "gradients" includes activations and the rest.
        unknown: why no step could run.
    """

    rehearsal: Rehearsal
    batch: tuple[int, int] | None
    num_microbatches: int | None
    model: PreTrainedModel
    plan: SplitPlan
    kept: list[StateBytes]
    parts: list[dict[str, int]]
    step: RehearsedStep | None = None
    stages: Mapping[int, RehearsedStage] = field(default_factory=dict)
    unknown: str = ""

    @property
    def needed(self) -> int:
        """Bytes of the fullest rank."""
        return max(sum(each.values()) for each in self.parts)


def _depends_on_values(model: nn.Module, verdict: Verdict) -> UnsupportedError:
    return UnsupportedError(
        f"what {type(model).__name__} does in a step depends on more than shapes", why=verdict.reason
    )


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


def _encode(model: nn.Module, encode: Callable[..., Any], medium: Mapping[str, Any]) -> Traffic:
    """Returns what a method such as `get_image_features` communicates over tp, in forward and backward."""
    with CommunicationCount(group=registry_of(model).mesh.group("tp")) as count:
        output = encode(**medium)
        encoded = [each for each in tree_leaves(getattr(output, "pooler_output", output)) if isinstance(each, Tensor)]
        trained = [each for each in encoded if each.requires_grad]
        with gradients_of(model).no_sync():
            torch.autograd.backward(trained, [torch.ones_like(each) for each in trained])
        return count.traffic()


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
        activations=activations, peak_bytes=peak.peak_bytes, tp=tp, data=total - tp, after=after, layers=layers
    )
