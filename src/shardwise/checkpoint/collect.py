"""Collects what a checkpoint holds: model, optimizer, scheduler, random states and values, as this rank has them."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.checkpoint.random_states import random_axes, read_random
from shardwise.checkpoint.schedules import common_state
from shardwise.checkpoint.tree import encode_tree
from shardwise.errors import ConfigError, ShardwiseError, UnsupportedError
from shardwise.parameters.canonical import state_tensors
from shardwise.parameters.registry import ParameterEntry, Registry, find_parameters, local_part
from shardwise.parameters.replicas import Copies, balance_of
from shardwise.parameters.source import unchanged_names
from shardwise.runtime.adapters import is_adapter
from shardwise.runtime.same_batch import describe_steps
from shardwise.sharding.boxes import Box, intersect, move, slices
from shardwise.sharding.layout import Layout, Piece
from shardwise.sharding.placement import Held, Replicate
from shardwise.weights.foreign import open_weights
from shardwise.weights.tensor_file import DTYPES

__all__ = [
    "LocalShard",
    "OptimizerContent",
    "RankFacts",
    "SaveInputs",
    "collect_inputs",
    "is_unsharded",
    "local_shards",
    "model_key",
    "read_optimizer",
    "read_source",
    "slices_of",
    "state_key",
]


@dataclass(frozen=True)
class LocalShard:
    """What this rank holds of a parameter or persistent buffer.

    Attributes:
        name: canonical name, that of the unsplit model.
        value: the parameter or buffer.
        layout: of the canonical tensor over the ranks.
        entry: of the registry; None for a buffer, and for a frozen parameter that was added after the split.
        is_known: whether every rank knows the layout, because the model was split with this tensor.
    """

    name: str
    value: Tensor
    layout: Layout
    entry: ParameterEntry | None
    is_known: bool


def model_key(name: str) -> str:
    """What a checkpoint calls a tensor of the model."""
    return f"model/{name}"


def state_key(name: str, state: str) -> str:
    """What a checkpoint calls an optimizer's state of a parameter."""
    return f"optimizer/{name}/{state}"


def local_shards(model: nn.Module, registry: Registry) -> dict[str, LocalShard]:
    """Every parameter and persistent buffer that this rank holds, by canonical name, tied ones once. Of further split
    models inside of `model`, which must be frozen, nothing.

    Raises:
        UnsupportedError: they are not.
    """
    held: dict[str, LocalShard] = {}
    root = registry.model()
    beside = _named_beside(model, root)
    if clashing := sorted(beside.keys() & {*registry.entries, *state_tensors(model if root is None else root)}):
        raise UnsupportedError(
            f"a checkpoint in which {clashing[0]} is of the split model, and of the module around it",
            why="tensors are stored by the split model's own names",
            fix="give the one that is beside the split model another name",
        )
    for name, parameter, entry in find_parameters(model):
        if entry is not None and entry.registry is not registry:
            if parameter.requires_grad:
                raise UnsupportedError(
                    f"a checkpoint of several models that are split and trained: {name} is of another than the first",
                    why="tensors are stored by the names that one model gives them",
                    fix="save each model by itself",
                )
        elif entry is None:
            held[name] = LocalShard(name, parameter, Layout(tuple(parameter.shape)), None, False)
        elif entry.is_held:
            is_known = registry.entries.get(entry.fqn) is entry
            held[entry.fqn] = LocalShard(entry.fqn, parameter, entry.layout, entry, is_known)
    for name, value in {**state_tensors(model if root is None else root), **beside}.items():
        if not isinstance(value, nn.Parameter) and name not in held:
            held[name] = LocalShard(name, value, Layout(tuple(value.shape)), None, False)
    return held


def _named_beside(model: nn.Module, root: nn.Module | None) -> dict[str, Tensor]:
    """Parameters and persistent buffers of a wrapper around the split model `root` that are not in it, by name."""
    if root is None or root is model:
        return {}
    split = [root, *(entry.registry.model() for _, _, entry in find_parameters(model) if entry is not None)]
    roots = {id(each): each for each in split if each is not None}.values()
    inside = {id(value) for each in roots for value in (*each.parameters(), *each.buffers())}
    return {name: value for name, value in state_tensors(model).items() if id(value) not in inside}


def is_unsharded(layout: Layout) -> bool:
    """Whether every rank that holds any of a tensor holds all of it."""
    return all(isinstance(step.placement, Replicate | Held) or step.size == 1 for step in layout.steps)


def slices_of(
    layout: Layout, coords: Mapping[str, int], boxes: Iterable[Box]
) -> tuple[tuple[Box, tuple[slice, ...]], ...]:
    """Boxes of the canonical tensor that this rank holds, each with where its elements are in the local tensor."""
    pieces = (*layout.pieces(coords), *layout.owned(coords))
    return tuple((box, slices(_local_box(box, pieces))) for box in boxes)


def _local_box(box: Box, pieces: tuple[Piece, ...]) -> Box:
    return next(move(box, piece.full, piece.local) for piece in pieces if intersect(box, piece.full) == box)


@dataclass(frozen=True)
class OptimizerContent:
    """What an optimizer holds, by parameter.

    Attributes:
        class_name: the class's, with its module.
        options: of every parameter's group, by the parameter's name, as JSON.
        described: for every parameter and state: `{"like": dtype}` where it has the parameter's shape and is split as
            it is, `{"scalar": number, "dtype": dtype}`, `{"value": JSON}`, `{"whole": dtype, "shape": …}`, or
            `{"ranks": dtype, "shape": …}` of one that only ranks with the same layout can take.
        tensors: those that are none of scalar and value, by parameter and state: this rank's part.
    """

    class_name: str
    options: dict[str, Any]
    described: dict[str, dict[str, Any]]
    tensors: dict[tuple[str, str], Tensor]


def read_optimizer(optimizer: torch.optim.Optimizer, held: Mapping[str, LocalShard]) -> OptimizerContent:
    """What `optimizer`, over parameters of the model, holds.

    Raises:
        ConfigError: it holds parameters that are not the model's, or options that are no JSON values.
        UnsupportedError: a state has a dtype that safetensors files do not have, or the optimizer is torch's
            `ZeroRedundancyOptimizer`.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigError(f"the optimizer is a {type(optimizer).__name__}", fix="pass a torch.optim.Optimizer")
    if isinstance(getattr(optimizer, "optim", None), torch.optim.Optimizer):
        raise UnsupportedError(
            f"a checkpoint of {type(optimizer).__name__}",
            why="its states are spread over data ranks by a plan of its own",
            fix="shard with the fsdp axis (FsdpPolicy(zero_stage=1)), or save what each rank holds by yourself",
        )
    names = {id(each.value): each.name for each in held.values()}
    kind = type(optimizer)
    content = OptimizerContent(f"{kind.__module__}.{kind.__qualname__}", {}, {}, {})
    for group in optimizer.param_groups:
        given = {name: _plain(value) for name, value in group.items() if name not in ("params", "param_names")}
        options = encode_tree(given, "the optimizer's options", {})
        for parameter in group["params"]:
            if id(parameter) not in names and not parameter.requires_grad:
                continue  # of a frozen model beside
            if id(parameter) not in names:
                raise ConfigError(
                    f"the optimizer holds a parameter of shape {tuple(parameter.shape)} that is not the model's",
                    fix="pass the model that holds all of its parameters, or save that optimizer's state in extra",
                )
            name = names[id(parameter)]
            content.options[name] = options
            _read_states(held[name], optimizer.state.get(parameter, {}), content)
    return content


def _read_states(held: LocalShard, states: Mapping[str, Any], content: OptimizerContent) -> None:
    described = content.described.setdefault(held.name, {})
    shape = tuple(local_part(held.value).shape)
    for state, value in states.items():
        if not isinstance(value, Tensor):
            inner: dict[str, Tensor] = {}
            described[state] = {"value": encode_tree(value, f"the optimizer's {state} of {held.name}", inner)}
            if inner:
                raise UnsupportedError(f"the optimizer's {state} of {held.name} holds several tensors")
            continue
        local = local_part(value)
        if type(local) not in (Tensor, nn.Parameter):
            raise UnsupportedError(
                f"saving the optimizer's {state} of {held.name}, a {type(local).__name__}",
                why="its values are stored in a form of its own, which other layouts could not divide",
                fix="save the model alone, or train with an optimizer whose states are plain tensors",
            )
        local = local.detach()
        if local.dtype not in DTYPES:
            raise UnsupportedError(f"the optimizer's {state} of {held.name} is {local.dtype}")
        dtype = str(local.dtype).removeprefix("torch.")
        if local.ndim == 0:
            described[state] = {"scalar": encode_tree(local.item(), "a scalar", {}), "dtype": dtype}
            continue
        form = "like" if tuple(local.shape) == shape else "whole" if is_unsharded(held.layout) else "ranks"
        described[state] = {form: dtype} if form == "like" else {form: dtype, "shape": list(local.shape)}
        content.tensors[held.name, state] = local


def _plain(option: Any) -> Any:
    """An option with numbers for tensors of one element, such as a learning rate that a compiled step reads."""
    if isinstance(option, Tensor):
        return option.item()
    return type(option)(map(_plain, option)) if type(option) in (list, tuple) else option


@dataclass(frozen=True)
class RankFacts:
    """What the other ranks must know of this one to divide a save.

    Attributes:
        has_adapters: whether there are adapters in what this rank has of the model.
        left_out: for each parameter of the registry, in its order, whether this rank lets it be left out: 1 or 0.
        unknown: layouts of the tensors that not every rank knows.
        buffers: names of the buffers.
    """

    has_adapters: bool
    left_out: bytes
    unknown: dict[str, Layout]
    buffers: tuple[str, ...]


@dataclass(frozen=True)
class SaveInputs:
    """Everything that a save writes, as this rank has it. Tensors are views.

    Attributes:
        shards: of parameters and persistent buffers, by canonical name.
        optimizer: its states and options; None where none is saved.
        values: JSON values by name: `extra`, `scheduler`, `scheduler_class`, `loss_scale`, `random`.
        tensors: those in `values`, by key.
        random: states of this rank's random number generators, by key.
        facts: for the other ranks.
        request: texts, by what they describe, that must be the same on every rank.
    """

    shards: dict[str, LocalShard]
    optimizer: OptimizerContent | None
    values: dict[str, Any]
    tensors: dict[str, Tensor]
    random: dict[str, Tensor]
    facts: RankFacts
    request: dict[str, str]

    def copies(self) -> Copies:
        """What has been trained: parameters, and states of the optimizer that have their shape."""
        for shard in self.shards.values():
            if shard.entry is not None and shard.value.requires_grad:
                yield shard.name, shard.entry, local_part(shard.value)
        states = self.optimizer.tensors if self.optimizer is not None else {}
        for (name, state), value in states.items():
            entry = self.shards[name].entry
            if entry is not None and value.shape == local_part(self.shards[name].value).shape:
                yield f"the optimizer's {state} of {name}", entry, value

    @functools.cached_property
    def balance(self) -> int:
        """See `balance_of`."""
        return balance_of(self.copies())


def collect_inputs(
    model: nn.Module,
    registry: Registry,
    request: Mapping[str, Any],
    *,
    optimizer: torch.optim.Optimizer | None,
    scheduler: Any,
    loss_scale: Mapping[str, Any] | None,
    extra: Any,
) -> SaveInputs:
    """Collects what a save writes. Communicates nothing.

    Args:
        request: what was asked for, which must be the same on every rank.

    Raises:
        ConfigError: something cannot be saved, or adapters are merged into the weights at the moment.
        UnsupportedError: several models inside of `model` are split and trained, or see `read_optimizer`.
    """
    for name, module in model.named_modules():
        if is_adapter(module) and getattr(module, "merged_adapters", None):
            raise ConfigError(f"{name} has its adapters merged into its weight", fix="call unmerge_adapter() first")
    shards = local_shards(model, registry)
    content = read_optimizer(optimizer, shards) if optimizer is not None else None
    tensors: dict[str, Tensor] = {}
    values = {"extra": encode_tree(extra, "extra", tensors), "random": random_axes(registry.mesh)}
    if scheduler is not None:
        if not callable(getattr(scheduler, "state_dict", None)):
            raise ConfigError(f"the scheduler is a {type(scheduler).__name__}, which has no state_dict")
        values["scheduler"] = encode_tree(scheduler.state_dict(), "scheduler", tensors)
        values["scheduler_class"] = type(scheduler).__name__
    if loss_scale is not None:
        values["loss_scale"] = dict(loss_scale)
    same = {
        "the call": "save_checkpoint",
        **describe_steps(registry.context),
        **{name: str(value) for name, value in request.items()},
        "optimizer": content.class_name if content is not None else "",
        **{name: json.dumps(common_state(value) if name == "scheduler" else value) for name, value in values.items()},
    }
    facts = _read_facts(model, registry, shards, content)
    return SaveInputs(shards, content, values, tensors, read_random(registry.mesh), facts, same)


def read_source(registry: Registry) -> dict[str, str]:
    """Name and digest of the files that a model's weights came from.

    Rank 0 computes the digest of a directory that transformers has read. It is empty for what is not on this machine.
    """
    source = registry.source
    if not source.digest and registry.mesh.position == 0 and source.name and Path(source.name).is_dir():
        with suppress(ShardwiseError), open_weights(source.name) as index:
            source = registry.source = replace(source, digest=index.digest())
    return {"name": source.name, "digest": source.digest}


def _read_facts(
    model: nn.Module, registry: Registry, shards: Mapping[str, LocalShard], optimizer: OptimizerContent | None
) -> RankFacts:
    unchanged = unchanged_names(model, registry)
    states = optimizer.described if optimizer is not None else {}

    def may_be_left_out(name: str, entry: ParameterEntry) -> bool:
        """Whether a parameter, or what this rank has of it, is frozen and can be read from its source again."""
        if name not in shards:
            return not entry.is_held
        return not shards[name].value.requires_grad and name in unchanged and not states.get(name)

    return RankFacts(
        has_adapters=any(map(is_adapter, model.modules())),
        left_out=bytes(may_be_left_out(name, entry) for name, entry in registry.entries.items()),
        unknown={each.name: each.layout for each in shards.values() if not each.is_known},
        buffers=tuple(each.name for each in shards.values() if not isinstance(each.value, nn.Parameter)),
    )
