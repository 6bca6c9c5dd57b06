"""The functions behind the front door: the one place that composes planning, splitting, loading and saving."""

from __future__ import annotations

import copy
import os
import time
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from shardwise.checkpoint.export import write_pretrained
from shardwise.comm.agree import failing_together
from shardwise.errors import ConfigError
from shardwise.layers.canonical import canonical_tensor
from shardwise.layers.registry import Registry, registry_of
from shardwise.mesh import Mesh
from shardwise.plan.explain import Explanation, explain
from shardwise.plan.spec import Plan
from shardwise.proof.parity import Measurement, measure
from shardwise.proof.report import Report
from shardwise.proof.twins import build_twin, make_batch, shrink_config
from shardwise.split.apply import apply_layout, decide_plan
from shardwise.split.build import HUB_OPTIONS, build_meta_model, read_config, read_generation_config
from shardwise.split.door import open_door
from shardwise.split.facts import read_facts
from shardwise.split.loading import load_weights
from shardwise.split.materialize import initialize_missing
from shardwise.testing.spawn import spawn
from shardwise.topology.shape import MeshShape
from shardwise.train.gradients import reduce_gradients
from shardwise.train.step import TrainStep
from shardwise.weights.index import CheckpointIndex

__all__ = ["describe", "export_pretrained", "full_gradients", "full_state_dict", "load", "parallelize", "verify"]


def load(
    source: str | os.PathLike[str] | PreTrainedConfig,
    mesh: Mesh,
    *,
    auto_class: Any = None,
    plan: str | Plan | Mapping[str, str] = "auto",
    sequence_parallel: bool = False,
    dtype: torch.dtype | str | None = None,
    seed: int = 0,
    **options: Any,
) -> PreTrainedModel:
    """Loads a model into its split form: each rank reads only the slices it keeps.

    Args:
        source: a directory that `save_pretrained` wrote, a hub id, or a config to initialise at random.
        auto_class: any transformers auto class or model class; by default `AutoModelForCausalLM`.
        plan: as in `parallelize`.
        sequence_parallel: as in `parallelize`.
        dtype: what floating-point weights are converted to; by default they keep the config's, or else the checkpoint's.
        seed: of the values that no checkpoint gives; they depend on it alone, not on the layout.
        options: handed on: to the hub (`revision`, `token`, …), to the config (its attributes), to the model class
            (`attn_implementation`, …); `ignore_mismatched_sizes` and `key_mapping` as in `from_pretrained`.

    Returns:
        The split model on the mesh's device, in eval mode as `from_pretrained` leaves it.

    Raises:
        LoadError: files are missing or damaged, or do not fit the model. The same error on every rank.
        PlanError: the plan cannot be followed.
        UnsupportedError: the class does not serve the config, or the checkpoint is quantized.

    Communicates: one small gather over all ranks at the end, so that a fault of one rank is raised on all.
    """
    request = _LoadRequest(source, auto_class, plan, sequence_parallel, dtype, seed, options)
    with failing_together(mesh, "loading"):
        model, registry = _load_local(request, mesh)
    _open_subgroups(registry)
    return model


@dataclass(frozen=True)
class _LoadRequest:
    """The arguments of `load`."""

    source: str | os.PathLike[str] | PreTrainedConfig
    auto_class: Any
    plan: str | Plan | Mapping[str, str]
    sequence_parallel: bool
    dtype: torch.dtype | str | None
    seed: int
    options: dict[str, Any]


def _load_local(request: _LoadRequest, mesh: Mesh) -> tuple[PreTrainedModel, Registry]:
    """What this rank does alone: build on the meta device, split, read its slices, initialise the rest."""
    options = dict(request.options)
    reading = {name: options.pop(name) for name in ("ignore_mismatched_sizes", "key_mapping") if name in options}
    where = {name: options[name] for name in HUB_OPTIONS if name in options}
    index: CheckpointIndex | None = None
    if isinstance(request.source, PreTrainedConfig):
        config = copy.deepcopy(request.source)
    else:
        config, options = read_config(request.source, options)
        index = CheckpointIndex.open(request.source, **where)
    with index or nullcontext():
        dtype = _as_dtype(request.dtype) or config.dtype or (_stored_dtype(index) if index is not None else None)
        model = build_meta_model(config, request.auto_class, dtype=dtype, options=options)
        registry = apply_layout(model, mesh, plan=request.plan, sequence_parallel=request.sequence_parallel)
        if index is not None:
            load_weights(model, registry, index, dtype=dtype, **reading)
            model.config.name_or_path = model.name_or_path = os.fspath(request.source)  # type: ignore[arg-type]
            read_generation_config(model, request.source, where)  # type: ignore[arg-type]
        initialize_missing(model, registry, seed=request.seed)
    return model, registry


def _as_dtype(dtype: torch.dtype | str | None) -> torch.dtype | None:
    if dtype is None or dtype == "auto" or isinstance(dtype, torch.dtype):
        return None if isinstance(dtype, str) else dtype
    found = getattr(torch, dtype, None) if isinstance(dtype, str) else None
    if not isinstance(found, torch.dtype):
        raise ConfigError(f"unknown dtype {dtype!r}", fix='use a torch dtype or its name, such as "bfloat16"')
    return found


def _stored_dtype(index: CheckpointIndex) -> torch.dtype | None:
    """The dtype of the checkpoint's first floating-point tensor, as transformers takes it."""
    return next((entry.dtype for entry in index.values() if entry.dtype.is_floating_point), None)


def parallelize(
    model: nn.Module,
    mesh: Mesh,
    *,
    plan: str | Plan | Mapping[str, str] = "auto",
    sequence_parallel: bool = False,
    dtype: torch.dtype | None = None,
) -> nn.Module:
    """Splits an existing transformers model over `mesh`, in place; parameter names stay.

    Args:
        model: a real model, the same on every rank, or one on the meta device (whose weights are loaded afterwards).
        plan: "auto" (family corrections on the model's own plan), or rules to put on top of those: a dictionary of
            pattern to style, or a `Plan`.
        sequence_parallel: split hidden states between blocks along the sequence too; same bytes on the wire, less memory.
        dtype: what the parameters are converted to; by default they keep their dtype.

    Returns:
        `model` itself, on the mesh's device unless it is meta.

    Raises:
        PlanError: the plan cannot be followed; every problem is listed, with the sizes that work.
        UnsupportedError: the layout or the model needs something that does not exist yet.

    Communicates: nothing (the first use of replicated key/value heads creates their groups).
    """
    registry = apply_layout(model, mesh, plan=plan, sequence_parallel=sequence_parallel)
    if dtype is not None:
        model.to(dtype)
    if not any(parameter.is_meta for parameter in model.parameters()):
        model.to(mesh.device)
    _open_subgroups(registry)
    return model


def full_state_dict(model: nn.Module, *, rank0_only: bool = False) -> dict[str, Tensor]:
    """The state dict of the whole model: Hugging Face names, full CPU tensors, tied names included.

    Args:
        rank0_only: only rank 0 receives it, and the others an empty dict: they never hold a whole tensor.

    Communicates: over tp, one all-gather (with `rank0_only` a gather) of each split parameter.
    """
    registry = registry_of(model)
    with open_door(model):
        local = model.state_dict()
    state: dict[str, Tensor] = {}
    done: dict[str, Tensor | None] = {}
    for fqn, value in local.items():
        canonical = registry.tied.get(fqn, fqn)
        if canonical in registry.entries:
            if canonical not in done:
                layout = registry.entries[canonical].layout
                done[canonical] = canonical_tensor(value, layout, registry.mesh, rank0_only=rank0_only)
            whole = done[canonical]
        else:
            whole = None if rank0_only and registry.mesh.rank else value.detach().to("cpu", copy=True)
        if whole is not None:
            state[fqn] = whole
    return state


def full_gradients(model: nn.Module, *, rank0_only: bool = False) -> dict[str, Tensor]:
    """The gradients of the whole model by Hugging Face name: full CPU tensors, for parameters that have one.

    Communicates: sums gradients that are still partial, then gathers as `full_state_dict` does.
    """
    registry = registry_of(model)
    reduce_gradients(model)
    gradients: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is None:
            continue
        whole = canonical_tensor(parameter.grad, registry.entry(name).layout, registry.mesh, rank0_only=rank0_only)
        if whole is not None:
            gradients[name] = whole
    return gradients


def _open_subgroups(registry: Registry) -> None:
    """Creates the groups of replicated heads now, where every rank is at the same point."""
    for entry in registry.entries.values():
        if entry.split is not None and entry.split.shared():
            blocks = tuple(sorted({holders for _, holders in entry.split.shared()}))
            registry.mesh.subgroup("tp", blocks)


def export_pretrained(
    model: nn.Module, directory: str | os.PathLike[str], *, max_shard_bytes: int = 5 * 10**9, tokenizer: Any = None
) -> None:
    """Writes a split model as a plain Hugging Face directory, which `from_pretrained` loads without Shardwise.

    Weights are streamed tensor by tensor, in the names and format of the checkpoint they came from; memory is bounded by one
    shard, on rank 0 alone. The directory appears complete or not at all.

    Args:
        directory: where to; other files in it are kept, its old weights replaced.
        max_shard_bytes: of tensors per file.
        tokenizer: saved beside the weights; by default that of the directory the model was loaded from, if it has one.

    Raises:
        LoadError: a file cannot be written. The same error on every rank; the directory is then as it was.

    Communicates: over tp, one gather to rank 0 of each split parameter.
    """
    write_pretrained(model, directory, max_shard_bytes=max_shard_bytes, tokenizer=tokenizer)


def describe(
    source: str | os.PathLike[str] | PreTrainedConfig,
    layout: str | MeshShape,
    *,
    auto_class: Any = None,
    plan: str | Plan | Mapping[str, str] = "auto",
    sequence_parallel: bool = False,
    **options: Any,
) -> Explanation:
    """What a layout does to a model, without a mesh, a process group or weights: rules, placements, what stays whole and why.

    Raises:
        PlanError: the plan cannot be followed; every problem is listed.
    """
    shape = layout if isinstance(layout, MeshShape) else MeshShape.parse(layout)
    config, model_options = (source, options) if isinstance(source, PreTrainedConfig) else read_config(source, options)
    model = build_meta_model(copy.deepcopy(config), auto_class, dtype=None, options=model_options)
    facts = read_facts(model)
    split_plan = decide_plan(model, facts, plan, tp_size=shape.size("tp"), sequence_parallel=sequence_parallel)
    return explain(split_plan, facts, layout=str(shape))


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

    Builds a tiny twin (the same architecture, few and narrow layers), trains it whole and split over as many gloo ranks as
    the layout has, and compares loss, logits, every gradient, the parameters after three AdamW steps, and after twenty the
    copies that ranks hold of the same parameters. Starts its own ranks; call it from one process.

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
        config, auto_class = source.config, auto_class or type(source)
    else:
        config = source if isinstance(source, PreTrainedConfig) else read_config(source, options)[0]
    twin = shrink_config(config, without_dropout=True)
    request = _Proof(twin, auto_class or AutoModelForCausalLM, str(shape), plan, sequence_parallel)
    start = time.perf_counter()
    measurements = spawn(_prove_on_this_rank, shape.world_size, request, timeout=timeout_seconds)
    return Report(
        subject=f"a twin of {config.model_type}",
        layout=f"{shape} with sequence parallelism" if sequence_parallel else str(shape),
        measurements=tuple(measurements),
        seconds=time.perf_counter() - start,
    )


@dataclass(frozen=True)
class _Proof:
    """What every rank of a proof is told."""

    config: PreTrainedConfig
    model_class: Any
    layout: str
    plan: str | Plan | Mapping[str, str]
    sequence_parallel: bool


def _prove_on_this_rank(proof: _Proof) -> Measurement:
    with Mesh.open(proof.layout, device="cpu") as mesh:
        whole = build_twin(proof.config, proof.model_class, seed=0).eval()
        return measure(
            whole,
            make_batch(whole, seed=0),
            mesh,
            split=lambda model, mesh: parallelize(
                model, mesh, plan=proof.plan, sequence_parallel=proof.sequence_parallel
            ),
            step=lambda model, mesh, batch: TrainStep(model, mesh)(batch).loss,
        )
