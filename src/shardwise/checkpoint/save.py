"""What of a model, its optimizer and its surroundings a checkpoint holds, and which rank writes what of it."""

from __future__ import annotations

import copy
import functools
import json
import operator
import platform
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedModel

from shardwise.checkpoint.base import base_sums, check_unmerged, fingerprint
from shardwise.checkpoint.content import HeldTensor, OptimizerContent, held_tensors, read_optimizer, slices_of
from shardwise.checkpoint.random_states import random_axes, read_random
from shardwise.checkpoint.save_job import OwnPortions, SaveJob, SaveRequest
from shardwise.checkpoint.schedules import common_state
from shardwise.checkpoint.tree import encode_tree
from shardwise.comm.agree import check_same, compare_later, gather_from_all
from shardwise.errors import ConfigError
from shardwise.parameters.at_rest import reshard
from shardwise.parameters.registry import Registry, local_part, registry_of
from shardwise.parameters.replicas import Copies, balance_of, check_replicas
from shardwise.runtime.adapters import is_adapter
from shardwise.runtime.same_batch import describe_steps
from shardwise.sharding.boxes import full_box, volume
from shardwise.sharding.division import Portion, divide_boxes
from shardwise.sharding.layout import Layout

__all__ = ["prepare_save"]


@dataclass(frozen=True)
class _Division:
    """Who writes what: decided from what every rank says that it holds, and kept until one holds something else.

    Attributes:
        described: what this rank has said.
        is_partial: whether frozen parameters are left out.
        base: what tells these from others.
        portions: of every tensor, over all ranks.
        own: this rank's, each with where it is in the local tensor.
    """

    described: Mapping[str, Any]
    is_partial: bool
    base: Mapping[str, str]
    portions: Mapping[str, tuple[Portion, ...]]
    own: dict[str, OwnPortions]


_DIVISIONS: weakref.WeakKeyDictionary[Registry, _Division] = weakref.WeakKeyDictionary()
"""The division of the last save of each model: training saves the same tensors again and again."""


@torch.no_grad()
def prepare_save(
    make_request: Callable[[], SaveRequest],
    *,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    scheduler: Any,
    loss_scale: Mapping[str, Any] | None,
    extra: Any,
    companions: Mapping[str, Callable[[], bytes]] | None = None,
) -> SaveJob:
    """The checkpoint as it is to be written, views of what is saved. All ranks call it.

    Args:
        make_request: where it goes; what it raises is raised on every rank.
        companions: makes further files, by name, besides the model's configuration.

    Raises:
        ConfigError: something cannot be saved, or ranks ask for different checkpoints. The same on every rank.
        LayoutError: ranks hold different copies of a parameter, or of an optimizer's state of one.

    Communicates: one all-gather of 40 bytes over all ranks; where ranks hold something else
        than at the last save, or do not agree, one gather of a small object.
    """
    registry = registry_of(model)
    mesh = registry.mesh
    reshard(model)
    seen: list[_Seen] = []

    def look() -> dict[str, Any]:
        if not seen:
            seen.append(_look(make_request(), model, registry, optimizer=optimizer, scheduler=scheduler, extra=extra))
            if loss_scale is not None:
                seen[0].values["loss_scale"] = dict(loss_scale)
        return _describe_held(seen[0], registry, has_adapters=any(map(is_adapter, model.modules())))

    def make(division: _Division) -> SaveJob:
        return _make_job(seen[0], division, model, registry, companions or {})

    known, job = _DIVISIONS.get(registry), None
    with suppress(Exception):  # raised below, on every rank
        if known is not None and look() != known.described:
            known = None
    same = json.dumps(_describe_request(seen[0], registry)) if seen and known is not None else None
    balance = seen[0].balance if same else 0
    agree = compare_later(mesh.group(), same, doing="save_checkpoint", balance=balance)
    if same is not None and known is not None:
        job = make(known)
    if agree() and job is not None:
        return job
    everyone = gather_from_all(
        mesh.group(), "preparing the checkpoint", lambda: {"held": look(), **_described(seen[0], registry)}
    )
    check_same(everyone, what="ranks ask for different checkpoints")
    if sum(each["balance"] for each in everyone) % 2**64:
        check_replicas(model, seen[0].copies())
    return make(_divide(registry, seen[0].held, sorted(everyone, key=operator.itemgetter("rank"))))


def _described(seen: _Seen, registry: Registry) -> dict[str, Any]:
    return {"rank": registry.mesh.position, "same": _describe_request(seen, registry), "balance": seen.balance}


def _make_job(
    own: _Seen,
    division: _Division,
    model: nn.Module,
    registry: Registry,
    companions: Mapping[str, Callable[[], bytes]],
) -> SaveJob:
    mesh = registry.mesh
    split = registry.model() or model
    job = SaveJob(
        request=own.request,
        mesh=mesh,
        rank=mesh.position,
        content="trained" if division.is_partial else "all",
        model_name=type(split).__name__,
        optimizer=(own.optimizer.class_name, {}) if own.optimizer is not None else None,
        tied=dict(registry.tied),
        values={**own.values, **({"base": division.base} if division.is_partial else {})},
        companions={**_companions(split), **companions} if mesh.position == 0 else {},
        versions=_versions(),
    )
    for name, portions in division.portions.items():
        if name in own.held:
            job.add_portions(own.held[name], portions, division.own[name], own.optimizer)
    job.add_tensors(read_random(mesh))
    if job.rank == 0:
        job.add_tensors(own.tensors)
    return job


@dataclass(frozen=True)
class _Seen:
    """What this rank is asked to save, and has; `tensors` are those in `values`."""

    request: SaveRequest
    held: dict[str, HeldTensor]
    optimizer: OptimizerContent | None
    values: dict[str, Any]
    tensors: dict[str, Tensor]

    def copies(self) -> Copies:
        """What has been trained: parameters, and states of the optimizer that have their shape."""
        for held in self.held.values():
            if held.entry is not None and held.value.requires_grad:
                yield held.name, held.entry, local_part(held.value)
        states = self.optimizer.tensors if self.optimizer is not None else {}
        for (name, state), value in states.items():
            entry = self.held[name].entry
            if entry is not None and value.shape == local_part(self.held[name].value).shape:
                yield f"the optimizer's {state} of {name}", entry, value

    @functools.cached_property
    def balance(self) -> int:
        """See `balance_of`."""
        return balance_of(self.copies())


def _look(
    request: SaveRequest,
    model: nn.Module,
    registry: Registry,
    *,
    optimizer: torch.optim.Optimizer | None,
    scheduler: Any,
    extra: Any,
) -> _Seen:
    check_unmerged(model)
    held = held_tensors(model, registry)
    content = read_optimizer(optimizer, held) if optimizer is not None else None
    tensors: dict[str, Tensor] = {}
    values = {"extra": encode_tree(extra, "extra", tensors), "random": random_axes(registry.mesh)}
    if scheduler is not None:
        values.update(_read_scheduler(scheduler, tensors))
    return _Seen(request, held, content, values, tensors)


def _read_scheduler(scheduler: Any, tensors: dict[str, Tensor]) -> dict[str, Any]:
    if not callable(getattr(scheduler, "state_dict", None)):
        raise ConfigError(f"the scheduler is a {type(scheduler).__name__}, which has no state_dict")
    state = encode_tree(scheduler.state_dict(), "scheduler", tensors)
    return {"scheduler": state, "scheduler_class": type(scheduler).__name__}


@functools.cache
def _versions() -> dict[str, str]:
    return {
        "shardwise": version("shardwise"),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }


def _describe_request(seen: _Seen, registry: Registry) -> dict[str, str]:
    """What this rank asks for and has done, which must be the same on all."""
    return {
        "the call": "save_checkpoint",
        **describe_steps(registry.context),
        **{name: str(value) for name, value in vars(seen.request).items()},
        "optimizer": seen.optimizer.class_name if seen.optimizer is not None else "",
        **{
            name: json.dumps(common_state(value) if name == "scheduler" else value)
            for name, value in seen.values.items()
        },
    }


def _describe_held(seen: _Seen, registry: Registry, *, has_adapters: bool) -> dict[str, Any]:
    """Of what this rank holds what the others cannot know; of frozen parameters its share of the sums."""
    held, states = seen.held.values(), seen.optimizer.described if seen.optimizer is not None else {}
    parameters = [each for each in held if isinstance(each.value, nn.Parameter)]
    # A frozen one with a state was trained before: nobody else has its values.
    sizes = {each.name: volume(full_box(each.layout.shape)) for each in parameters}
    frozen = {each.name for each in parameters if not each.value.requires_grad and not states.get(each.name)}
    return {
        "adapters": has_adapters,
        "frozen": {name: size for name, size in sizes.items() if name in frozen},
        "trained": {name: size for name, size in sizes.items() if name not in frozen},
        "unknown": {each.name: each.layout for each in held if not each.is_known},
        "buffers": tuple(each.name for each in held if not isinstance(each.value, nn.Parameter)),
        "base": base_sums({name: seen.held[name] for name in sizes if name in frozen}, registry),
    }


def _left_out(everyone: Sequence[Mapping[str, Any]]) -> set[str]:
    """The frozen parameters that are not saved: those under adapters."""
    trained = {name: size for each in everyone for name, size in each["trained"].items()}
    frozen = {name: size for each in everyone for name, size in each["frozen"].items() if name not in trained}
    return set(frozen) if trained and any(each["adapters"] for each in everyone) else set()


def _divide(registry: Registry, held: Mapping[str, HeldTensor], everyone: Sequence[Mapping[str, Any]]) -> _Division:
    """Which rank writes what of the parameters and buffers that are saved, decided alike on every rank."""
    left_out = _left_out([each["held"] for each in everyone])
    portions = _divide_portions(registry, [each["held"] for each in everyone], left_out)
    rank, coords = registry.mesh.position, registry.mesh.coords
    own = {
        name: slices_of(held[name].layout, coords, [portion.box for portion in each if portion.rank == rank])
        for name, each in portions.items()
        if name in held
    }
    sums = fingerprint(each["held"]["base"] for each in everyone)
    base = {name: text for name, text in sums.items() if name in left_out}
    _DIVISIONS[registry] = _Division(everyone[rank]["held"], bool(left_out), base, portions, own)
    return _DIVISIONS[registry]


def _divide_portions(
    registry: Registry, everyone: list[dict[str, Any]], left_out: Collection[str]
) -> Mapping[str, tuple[Portion, ...]]:
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
    layouts = {name: layout for name, layout in layouts.items() if name not in left_out}
    return divide_boxes(layouts, shape, holders=holders)


def _companions(model: nn.Module) -> dict[str, Callable[[], bytes]]:
    """The model's configuration, as transformers would write it: with it, the weights are a model."""
    if not isinstance(model, PreTrainedModel):
        return {}
    config = copy.deepcopy(model.config)
    config.architectures = [type(model).__name__]
    found: dict[str, Callable[[], bytes]] = {"config.json": functools.partial(_as_json, config)}
    if model.can_generate() and model.generation_config is not None:
        found["generation_config.json"] = functools.partial(_as_json, copy.deepcopy(model.generation_config))
    return found


def _as_json(config: Any) -> bytes:
    text: str = config.to_json_string(use_diff=True)
    return text.encode()
