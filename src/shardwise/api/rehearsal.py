"""Runs rank 0's model on fake tensors, to learn what shapes alone can tell."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from transformers import PreTrainedConfig, PreTrainedModel

from shardwise.api.prepare import decide, observe_labels, open_subgroups
from shardwise.comm.count import CommunicationCount, Traffic
from shardwise.errors import ShardwiseError, UnsupportedError
from shardwise.estimate.memory import ActivationBytes
from shardwise.lora.inject import inject
from shardwise.loss.deferred_logits import dropped_output
from shardwise.optim.clip import clip_grad_norm_
from shardwise.optim.gradients import gradients_of, track_gradients
from shardwise.optim.plain_step import stepping_class
from shardwise.parallel.activation_memory import (
    FakeTensorCorrections,
    MemoryCount,
    PeakCount,
    fake_tensors,
    materialize_fake,
)
from shardwise.parallel.apply import apply_plan
from shardwise.parallel.build import build_meta_model
from shardwise.parameters.registry import registry_of
from shardwise.plan.options import ParallelSpec
from shardwise.proof.counting import counted_layers
from shardwise.ranks.fake_mesh import fake_mesh
from shardwise.runtime.adapter_facts import find_model
from shardwise.runtime.host_masks import read_host_mask, take_host_masks
from shardwise.stages.model import Stages
from shardwise.tiny.inputs import make_batch
from shardwise.topology.shape import AXES, MeshShape


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
            materialize_fake(model)
            registry = apply_plan(model, mesh, plan, spec)
            registry.context.has_dropout = False  # which stream draws a mask changes no shape, and seeds are values
            with unset_fake_temporarily():
                open_subgroups(registry)
            track_gradients(model, registry)
            yield model.train()

    def _eager(self) -> Rehearsal:
        if self.spec.recompute.mode == "budget":
            raise UnsupportedError(
                "a rehearsal of Recompute mode 'budget'",
                why="what is kept is chosen when blocks are compiled",
                fix="rehearse modes none and full, between which it is",
            )
        return replace(self, spec=replace(self.spec, compilation=None))

    def run_step(self, *, num_rows: int, seq_length: int) -> RehearsedStep:
        """Runs one microbatch eagerly on rank 0; returns memory and communication of forward, backward and gradient
        phase.
        """
        with self._eager().open() as model:
            batch = _full_rows(model, num_rows, seq_length)
            with as_data_dependent_error(model):
                return _run_step(model, batch)

    def run_stages(self, *, num_rows: int, seq_length: int) -> dict[int, RehearsedStage]:
        """Runs one microbatch through each pipeline stage, on the first rank of the stage: forward, and over tp
        backward.
        """
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
        num_sent: number of tensors sent to the next stage.
        sent_bytes: bytes of the sent tensors.
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
        activations: memory kept between forward and backward.
        peak_bytes: peak memory besides stored parameters and optimizer states: activations, gradients, the loss, and
            temporary memory of forward, backward, clipping and AdamW.
        tp: communication over tp in the microbatch.
        data: communication over the data axes in the microbatch.
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
    """A batch without padding. Only real values could tell the model's own code that its mask hides nothing."""
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
    """Fused AdamW with allocated states."""
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
        activations=activations,
        peak_bytes=peak.peak_bytes,
        tp=tp,
        data=total - tp,
        after=after,
        layer=layers.per_run,
    )
