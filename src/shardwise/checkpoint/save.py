"""What of a model, its optimizer and its surroundings a checkpoint holds, and which rank writes what of it."""

from __future__ import annotations

import copy
import json
import platform
import weakref
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedModel

from shardwise.checkpoint.content import HeldTensor, OptimizerContent, held_tensors, read_optimizer
from shardwise.checkpoint.random_states import random_axes, read_random
from shardwise.checkpoint.save_job import SaveJob, SaveRequest
from shardwise.checkpoint.tree import encode_tree
from shardwise.comm.agree import raise_on_all_ranks
from shardwise.comm.operations import all_gather_objects
from shardwise.errors import ConfigError
from shardwise.mesh import Mesh
from shardwise.runtime.registry import Registry, registry_of, reshard
from shardwise.sharding.division import Portion, divide_boxes
from shardwise.sharding.layout import Layout

__all__ = ["prepare_save"]

_Divisions = weakref.WeakKeyDictionary[Registry, tuple[Any, dict[str, tuple[Portion, ...]]]]
_DIVISIONS: _Divisions = weakref.WeakKeyDictionary()
"""The division of the last save of each model: training saves the same tensors again and again."""


def prepare_save(
    request: SaveRequest,
    *,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    scheduler: Any,
    loss_scale: Mapping[str, Any] | None,
    extra: Any,
) -> SaveJob:
    """The checkpoint as it is to be written, views of what is saved. All ranks call it.

    Raises:
        ConfigError: something cannot be saved, or ranks ask for different checkpoints. The same on every rank.

    Communicates: two gathers of small objects over all ranks.
    """
    registry = registry_of(model)
    mesh = registry.mesh
    reshard(model)
    tensors: dict[str, Tensor] = {}
    with raise_on_all_ranks(mesh.group(), "preparing the checkpoint"):
        held = held_tensors(model, registry)
        content = read_optimizer(optimizer, held) if optimizer is not None else None
        values: dict[str, Any] = {"extra": encode_tree(extra, "extra", tensors), "random": random_axes(mesh)}
        if scheduler is not None:
            values["scheduler"] = encode_tree(scheduler.state_dict(), "scheduler", tensors)
            values["scheduler_class"] = type(scheduler).__name__
        if loss_scale is not None:
            values["loss_scale"] = dict(loss_scale)
        own = {"rank": _position(mesh), **_describe_own(request, values, held, content)}
    everyone = sorted(all_gather_objects(own, mesh.group()), key=lambda each: each["rank"])
    _check_same(everyone)
    divided = _divide(registry, [each["held"] for each in everyone])
    job = SaveJob(
        request=request,
        mesh=mesh,
        rank=_position(mesh),
        content="trained" if _is_partial([each["held"] for each in everyone]) else "all",
        model_name=_split_model(model, registry).__class__.__name__,
        optimizer=(content.class_name, {}) if content is not None else None,
        tied=dict(registry.tied),
        values=values,
        companions=_companions(_split_model(model, registry)),
        versions={
            "shardwise": version("shardwise"),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "python": platform.python_version(),
        },
    )
    for name, portions in divided.items():
        if name in held:
            job.add_portions(held[name], portions, content)
    job.add_tensors(read_random(mesh))
    if job.rank == 0:
        job.add_tensors(tensors)
    return job


def _describe_own(
    request: SaveRequest, values: Mapping[str, Any], held: Mapping[str, HeldTensor], optimizer: OptimizerContent | None
) -> dict[str, Any]:
    """What this rank asks for, which must be the same on all, and what it holds."""
    parameters = [each for each in held.values() if isinstance(each.value, nn.Parameter)]
    frozen = [each for each in parameters if not each.value.requires_grad]
    trained = [each.name for each in parameters if each.value.requires_grad]
    return {
        "same": {
            **{name: str(value) for name, value in vars(request).items()},
            "optimizer": optimizer.class_name if optimizer is not None else "",
            **{name: json.dumps(value) for name, value in values.items()},
        },
        "held": {
            "trained": tuple(trained) if frozen else None,
            "unknown": {each.name: each.layout for each in held.values() if not each.is_known},
            "buffers": tuple(each.name for each in held.values() if not isinstance(each.value, nn.Parameter)),
        },
    }


def _check_same(everyone: Sequence[Mapping[str, Any]]) -> None:
    for name, value in everyone[0]["same"].items():
        others = {rank: each["same"].get(name) for rank, each in enumerate(everyone) if each["same"].get(name) != value}
        if others:
            rank, other = next(iter(others.items()))
            raise ConfigError(
                f"ranks ask for different checkpoints: {name} is not the same on all",
                why=f"on rank 0: {value[:200]}\non rank {rank}: {str(other)[:200]}",
                fix="pass the same on every rank; what belongs to a rank alone is not kept",
            )


def _is_partial(everyone: Sequence[Mapping[str, Any]]) -> bool:
    """Whether only trained parameters are saved: where others are frozen."""
    return any(each["trained"] is not None for each in everyone) and any(each["trained"] != () for each in everyone)


def _divide(registry: Registry, everyone: list[dict[str, Any]]) -> dict[str, tuple[Portion, ...]]:
    """Which rank writes what of the parameters and buffers that are saved, decided alike on every rank."""
    known = _DIVISIONS.get(registry)
    if known is not None and known[0] == everyone:
        return known[1]
    shape = registry.mesh.shape
    layouts: dict[str, Layout] = {name: entry.layout for name, entry in registry.entries.items()}
    holders: dict[str, list[int]] = {}
    buffers = {name for each in everyone for name in each["buffers"]}
    pipeline = registry.plan.pipeline
    for rank, each in enumerate(everyone):
        for name, layout in each["unknown"].items():
            layouts.setdefault(name, layout)
            if pipeline is not None and name in buffers and shape.coords(rank)["pp"] != pipeline.coord_computing(name):
                continue  # what a forward has counted is with the stage that runs it
            if name not in registry.entries and not (name in buffers and name in holders):
                holders.setdefault(name, []).append(rank)  # of buffers the first rank's: others may have counted more
    if _is_partial(everyone):
        saved = {name for each in everyone for name in each["trained"] or ()} | buffers
        for rank, each in enumerate(everyone):
            if each["trained"] is None:
                coords = shape.coords(rank)
                saved |= {name for name, entry in registry.entries.items() if entry.layout.pieces(coords)}
        layouts = {name: layout for name, layout in layouts.items() if name in saved}
    divided = divide_boxes(layouts, shape, holders=holders)
    _DIVISIONS[registry] = (everyone, divided)
    return divided


def _position(mesh: Mesh) -> int:
    """This rank's number in the mesh."""
    return mesh.shape.rank(**mesh.coords)


def _split_model(model: nn.Module, registry: Registry) -> nn.Module:
    return registry.model() or model


def _companions(model: nn.Module) -> dict[str, bytes]:
    """The model's configuration, as transformers would write it: with it, the weights are a model."""
    if not isinstance(model, PreTrainedModel):
        return {}
    config = copy.deepcopy(model.config)
    config.architectures = [type(model).__name__]
    found = {"config.json": config.to_json_string(use_diff=True).encode()}
    if model.can_generate() and model.generation_config is not None:
        found["generation_config.json"] = model.generation_config.to_json_string(use_diff=True).encode()
    return found
