"""`load` and `parallelize`: a transformers model in its split form."""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from shardwise.api.planning import plan_for
from shardwise.comm.agree import failing_together
from shardwise.errors import ConfigError
from shardwise.layers.registry import Registry
from shardwise.mesh import Mesh
from shardwise.plan.options import Compile, FsdpPolicy, Precision, Recompute
from shardwise.plan.spec import Plan
from shardwise.split.apply import apply_layout, check_axes
from shardwise.split.build import HUB_OPTIONS, build_meta_model, read_config, read_generation_config
from shardwise.split.choices import Choices
from shardwise.split.loading import load_weights
from shardwise.split.materialize import initialize_missing
from shardwise.weights.index import CheckpointIndex

__all__ = ["load", "parallelize"]


def load(  # noqa: PLR0913 - the public surface: each is a choice of the user's
    source: str | os.PathLike[str] | PreTrainedConfig,
    mesh: Mesh,
    *,
    auto_class: Any = None,
    plan: str | Plan | Mapping[str, str] = "auto",
    sequence_parallel: bool = False,
    fsdp: FsdpPolicy | None = None,
    precision: Precision | None = None,
    recompute: Recompute | None = None,
    compilation: Compile | None = None,
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
        fsdp, precision, recompute, compilation: as in `parallelize`.
        dtype: what floating-point weights are converted to; by default `precision.params`, or without a `precision`
            the config's, or else the checkpoint's.
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
    request = _LoadRequest(
        source,
        auto_class,
        plan,
        sequence_parallel,
        Choices(
            fsdp=fsdp or FsdpPolicy(), precision=precision, recompute=recompute or Recompute(), compilation=compilation
        ),
        dtype if dtype is not None or precision is None else precision.params,
        seed,
        options,
    )
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
    choices: Choices
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
        check_axes(mesh.shape)
        rules = plan_for(model, request.plan, tp_size=mesh.size("tp"), sequence_parallel=request.sequence_parallel)
        registry = apply_layout(model, mesh, rules, sequence_parallel=request.sequence_parallel)
        request.choices.apply(model, registry)
        if index is not None:
            load_weights(model, registry, index, dtype=dtype, **reading)
            model.config.name_or_path = model.name_or_path = os.fspath(request.source)
            read_generation_config(model, request.source, where)
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


def parallelize(  # noqa: PLR0913 - as above
    model: nn.Module,
    mesh: Mesh,
    *,
    plan: str | Plan | Mapping[str, str] = "auto",
    sequence_parallel: bool = False,
    fsdp: FsdpPolicy | None = None,
    precision: Precision | None = None,
    recompute: Recompute | None = None,
    compilation: Compile | None = None,
    dtype: torch.dtype | None = None,
) -> nn.Module:
    """Splits an existing transformers model over `mesh`, in place; parameter names stay.

    Args:
        model: a real model, the same on every rank, or one on the meta device (whose weights are loaded afterwards).
        plan: "auto" (family corrections on the model's own plan), or rules to put on top of those: a dictionary of
            pattern to style, or a `Plan`.
        sequence_parallel: split hidden states between blocks along the sequence too; same bytes on the wire, less
            memory.
        fsdp: how the `fsdp` and `ddp` axes shard parameters, gradients and optimizer states; see `FsdpPolicy`.
        precision: the dtypes of parameters, computation and gradient reduction; see `Precision`.
        recompute: what forward does not keep, but backward computes again; see `Recompute`.
        compilation: have `torch.compile` compile every block; see `Compile`.
        dtype: what the parameters are converted to; by default `precision.params`, or their own.

    Returns:
        `model` itself, on the mesh's device unless it is meta.

    Raises:
        PlanError: the plan cannot be followed; every problem is listed, with the sizes that work.
        UnsupportedError: the layout or the model needs something that does not exist yet.

    Communicates: nothing (the first use of replicated key/value heads creates their groups).
    """
    check_axes(mesh.shape)
    rules = plan_for(model, plan, tp_size=mesh.size("tp"), sequence_parallel=sequence_parallel)
    registry = apply_layout(model, mesh, rules, sequence_parallel=sequence_parallel)
    if dtype is None and precision is not None:
        dtype = _as_dtype(precision.params)
    if dtype is not None:
        model.to(dtype)
    if not any(parameter.is_meta for parameter in model.parameters()):
        model.to(mesh.device)
    Choices(
        fsdp=fsdp or FsdpPolicy(), precision=precision, recompute=recompute or Recompute(), compilation=compilation
    ).apply(model, registry)
    _open_subgroups(registry)
    return model


def _open_subgroups(registry: Registry) -> None:
    """Creates the groups of replicated heads now, where every rank is at the same point."""
    for entry in registry.entries.values():
        if entry.split is not None and entry.split.shared():
            blocks = tuple(sorted({holders for _, holders in entry.split.shared()}))
            registry.mesh.subgroup("tp", blocks)
