"""The state and options of an optimizer, found by the names of its parameters and put into place."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardwise.checkpoint.collect import LocalShard, is_unsharded, model_key, state_key
from shardwise.checkpoint.reader import StoredParts
from shardwise.checkpoint.tree import decode_tree
from shardwise.errors import ConfigError, LoadError
from shardwise.parameters.registry import Registry, local_part
from shardwise.sharding.boxes import full_box
from shardwise.sharding.layout import Piece
from shardwise.sharding.reshard import Copy

__all__ = ["OptimizerLoad", "saved_options"]

_HOW = ("foreach", "fused", "capturable", "differentiable")
"""Options that say how an optimizer computes, not what: those it has stay."""


@dataclass(frozen=True)
class _State:
    """One state of one parameter: a tensor to be copied, or a value or number, which is there already."""

    held: LocalShard
    parameter: Tensor
    name: str
    facts: Mapping[str, Any]
    key: str = ""
    copies: tuple[Copy, ...] = ()
    group: Mapping[str, Any] | None = None
    value: Any = None


class OptimizerLoad:
    """What is to be loaded into an optimizer, checked when it is made; `apply` changes it.

    Raises:
        ConfigError: the optimizer holds parameters that are not the model's.
        LoadError: the checkpoint has no state of this class, or not of these parameters; groups now hold parameters
            that had different options; or a state can only be loaded with the layout it was saved with.
    """

    def __init__(
        self,
        stored: StoredParts,
        optimizer: torch.optim.Optimizer,
        held: Mapping[str, LocalShard],
        registry: Registry,
        *,
        strict: bool,
    ) -> None:
        self._stored, self._optimizer, self._registry = stored, optimizer, registry
        self._groups: list[tuple[dict[str, Any], Mapping[str, Any]]] = []
        self._states: list[_State] = []
        self._known: list[Tensor] = []
        kind = type(optimizer)
        own, saved = f"{kind.__module__}.{kind.__qualname__}", stored.index.optimizer
        if saved is None or saved["class"] != own:
            what = "of none" if saved is None else f"of {saved['class']}"
            raise LoadError(
                f"the checkpoint holds the state {what}, the optimizer is {own}",
                at=str(stored.directory),
                fix="build the optimizer that was saved, or load without one",
            )
        names = {id(each.value): each for each in held.values()}
        unknown: list[str] = []
        for group in optimizer.param_groups:
            trained = [each for each in group["params"] if each.requires_grad]
            if strays := [parameter for parameter in trained if id(parameter) not in names]:
                raise ConfigError(
                    f"the optimizer holds a parameter of shape {tuple(strays[0].shape)} that is not the model's",
                    fix="pass the model that holds all of its parameters",
                )
            found = [names[id(parameter)] for parameter in group["params"] if id(parameter) in names]
            unknown += [
                each.name for each in found if each.value.requires_grad and each.name not in saved["parameters"]
            ]
            known = [each for each in found if each.name in saved["parameters"]]
            if options := saved_options(stored, group, held):
                self._groups.append((group, options))
            self._known += [each.value for each in known]
            for each in known:
                self._add(each, saved["parameters"][each.name]["states"], group)
        if unknown and strict:
            raise LoadError(
                f"the checkpoint has no optimizer state of {len(unknown)} parameters",
                at=str(stored.directory),
                why=", ".join(unknown[:5]),
                fix="train the parameters that were trained, or pass strict=False",
            )

    def _add(self, held: LocalShard, states: Mapping[str, Mapping[str, Any]], group: Mapping[str, Any]) -> None:
        pieces = held.layout.pieces(self._registry.mesh.coords) if states else ()
        for name, facts in states.items():
            key = state_key(held.name, name)
            copies: tuple[Copy, ...] = ()
            value = decode_tree(facts.get("scalar", facts.get("value")), {})
            if "scalar" in facts:
                value = torch.tensor(value, dtype=getattr(torch, facts["dtype"]))
            if "like" in facts:
                copies = self._stored.plan(key, pieces)
            elif "whole" in facts or "ranks" in facts:
                key = self._placed(key, held, facts)
                stored = self._stored.index.tensors.get(key)
                box = full_box(stored.shape if stored is not None else ())
                copies = self._stored.plan(key, [Piece(box, box)])
            self._states.append(_State(held, held.value, name, facts, key, copies, group, value))

    def _placed(self, key: str, held: LocalShard, facts: Mapping[str, Any]) -> str:
        """The key of a state that has not the parameter's shape, where it can be used here at all."""
        if "whole" in facts and is_unsharded(held.layout):
            return key
        stored = self._stored.index.tensors.get(model_key(held.name))
        mesh = self._registry.mesh
        is_same = (
            stored is not None and stored.layout == held.layout and self._stored.manifest.layout == str(mesh.shape)
        )
        if "ranks" in facts and is_same:
            return f"{key}@{mesh.position}"
        raise LoadError(
            f"the optimizer's state {key.removeprefix('optimizer/')} fits no layout but its own",
            at=str(self._stored.directory),
            why=f"its shape {facts['shape']} is not the parameter's, so nobody can say how it is divided; it was\n"
            f"saved with {self._stored.manifest.layout}, this is {mesh.shape}",
            fix=f"load it with layout {self._stored.manifest.layout}, or load without the optimizer",
        )

    def apply(self) -> None:
        """Puts options and states into the optimizer."""
        for group, options in self._groups:
            for name, value in options.items():
                if name not in _HOW:
                    group[name] = _like(group.get(name), value)
        fresh: dict[int, dict[str, Any]] = {id(parameter): {} for parameter in self._known}
        for each in self._states:
            old = self._optimizer.state.get(each.parameter, {}).get(each.name)
            fresh[id(each.parameter)][each.name] = self._made(each, old)
        for parameter in self._known:
            self._optimizer.state.pop(parameter, None)
            if fresh[id(parameter)]:
                self._optimizer.state[parameter] = fresh[id(parameter)]

    def _made(self, state: _State, old: Any) -> Any:
        facts = state.facts
        local = local_part(state.parameter)
        if "value" in facts:
            return _like(old, state.value)
        if "scalar" in facts:
            on_device = any(state.group.get(name) for name in ("capturable", "fused")) if state.group else False
            device = old.device if isinstance(old, Tensor) else local.device if on_device else "cpu"
            return state.value.to(device)
        stored = self._stored.index.tensors[state.key]
        if "like" not in facts:
            made = torch.empty(stored.shape, dtype=stored.dtype, device=local.device)
            self._stored.fill(made, state.key, state.copies)
            return made
        follows = stored.dtype == self._stored.index.tensors[model_key(state.held.name)].dtype
        dtype = local.dtype if follows else stored.dtype
        is_alike = isinstance(old, DTensor) == isinstance(state.parameter, DTensor)
        if isinstance(old, Tensor) and old.dtype == dtype and is_alike:
            there = local_part(old).detach()
            if there.shape == local.shape:
                self._stored.fill(there, state.key, state.copies)
                return old
        made = torch.empty_like(local, dtype=dtype)
        self._stored.fill(made, state.key, state.copies)
        return state.held.entry.wrap(made) if state.held.entry is not None else made


def saved_options(stored: StoredParts, group: Mapping[str, Any], shards: Mapping[str, LocalShard]) -> Mapping[str, Any]:
    """The options that the parameters of an optimizer's group were saved with; none where none of them was.

    Raises:
        LoadError: they were saved with different options.
    """
    saved = stored.index.optimizer or {"parameters": {}}
    names = {id(each.value): each.name for each in shards.values()}
    known = [names[id(each)] for each in group["params"] if names.get(id(each)) in saved["parameters"]]
    numbers = {saved["parameters"][name]["group"]: name for name in known}
    options = [decode_tree(saved["groups"][number], {}) for number in numbers]
    if len({json.dumps({k: str(value) for k, value in each.items() if k not in _HOW}) for each in options}) > 1:
        raise LoadError(
            f"{' and '.join(list(numbers.values())[:2])} are in one parameter group, and had different options",
            at=str(stored.directory),
            fix="build the optimizer with the groups it had",
        )
    return options[0] if options else {}


def _like(old: Any, value: Any) -> Any:
    """`value`, a tuple or a tensor where what it replaces is one, or holds some."""
    if isinstance(old, tuple) and isinstance(value, list | tuple):
        return tuple(map(_like, old, value)) if len(old) == len(value) else tuple(value)
    if isinstance(old, Tensor) and not isinstance(value, Tensor):
        return torch.full_like(old, value)
    return value
