"""What a checkpoint is made of: the tensors of a model and its optimizer by name, as this rank holds them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.checkpoint.tree import encode_tree
from shardwise.errors import ConfigError, UnsupportedError
from shardwise.parameters.canonical import state_tensors
from shardwise.parameters.registry import ParameterEntry, Registry, find_parameters, local_part
from shardwise.sharding.boxes import Box, intersect, move, slices
from shardwise.sharding.layout import Layout, Piece
from shardwise.sharding.placement import Held, Replicate
from shardwise.weights.tensor_file import DTYPES

__all__ = [
    "HeldTensor",
    "OptimizerContent",
    "held_tensors",
    "is_unsharded",
    "model_key",
    "read_optimizer",
    "slices_of",
    "state_key",
]


@dataclass(frozen=True)
class HeldTensor:
    """A parameter or persistent buffer, as this rank holds it.

    Attributes:
        name: canonical: of the unsplit model, whatever is wrapped around it.
        value: the parameter or buffer.
        layout: how it is stored over the ranks.
        entry: of the registry; None of a buffer, and of what came into the model later and is frozen.
        is_known: whether every rank knows its layout, since the model was split with it.
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


def held_tensors(model: nn.Module, registry: Registry) -> dict[str, HeldTensor]:
    """Every parameter and persistent buffer that this rank holds, by canonical name, tied ones once. Of further split
    models inside of `model`, which must be frozen, nothing.

    Raises:
        UnsupportedError: they are not.
    """
    held: dict[str, HeldTensor] = {}
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
            held[name] = HeldTensor(name, parameter, Layout(tuple(parameter.shape)), None, False)
        elif entry.is_held:
            is_known = registry.entries.get(entry.fqn) is entry
            held[entry.fqn] = HeldTensor(entry.fqn, parameter, entry.layout, entry, is_known)
    for name, value in {**state_tensors(model if root is None else root), **beside}.items():
        if not isinstance(value, nn.Parameter) and name not in held:
            held[name] = HeldTensor(name, value, Layout(tuple(value.shape)), None, False)
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


def read_optimizer(optimizer: torch.optim.Optimizer, held: Mapping[str, HeldTensor]) -> OptimizerContent:
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


def _read_states(held: HeldTensor, states: Mapping[str, Any], content: OptimizerContent) -> None:
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
