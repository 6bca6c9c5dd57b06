"""The state and options of an optimizer, found by the names of its parameters and put into place."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardwise.checkpoint.content import HeldTensor, is_unsharded, model_key, state_key
from shardwise.checkpoint.stored_parts import StoredParts
from shardwise.checkpoint.tree import decode_tree, fits
from shardwise.errors import ConfigError, LoadError
from shardwise.parameters.registry import Registry, local_part
from shardwise.sharding.boxes import full_box
from shardwise.sharding.layout import Piece
from shardwise.sharding.reshard import Copy

__all__ = ["OptimizerLoad"]

_HOW = ("foreach", "fused", "capturable", "differentiable")
"""Options that say how an optimizer computes, not what: those it has stay."""


@dataclass(frozen=True)
class _State:
    """One state of one parameter: a tensor to be copied, or a value or number, which is there already."""

    held: HeldTensor
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
        held: Mapping[str, HeldTensor],
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
            if options := self._options(known, saved):
                self._check_options(group, options)
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

    def _options(self, known: Sequence[HeldTensor], saved: Mapping[str, Any]) -> Mapping[str, Any]:
        """The saved options of a group's parameters."""
        numbers = {saved["parameters"][each.name]["group"]: each.name for each in known}
        if not numbers:
            return {}
        found = [decode_tree(saved["groups"][number], {}) for number in numbers]
        texts = {json.dumps({name: str(value) for name, value in each.items() if name not in _HOW}) for each in found}
        if len(texts) > 1:
            raise LoadError(
                f"{' and '.join(list(numbers.values())[:2])} are in one parameter group, and had different options",
                at=str(self._stored.directory),
                fix="build the optimizer with the groups it had",
            )
        first: Mapping[str, Any] = found[0]
        return first

    def _check_options(self, group: Mapping[str, Any], options: Mapping[str, Any]) -> None:
        for name, value in options.items():
            if not fits(group.get(name), value):
                raise LoadError(
                    f"the saved option {name} is {value!r:.100}",
                    at=str(self._stored.directory),
                    why=f"it is {group[name]!r:.100} in the optimizer, which is of another kind",
                )

    def _add(self, held: HeldTensor, states: Mapping[str, Mapping[str, Any]], group: Mapping[str, Any]) -> None:
        pieces = held.layout.pieces(self._registry.mesh.coords) if states else ()
        for name, facts in states.items():
            key = state_key(held.name, name)
            copies: tuple[Copy, ...] = ()
            value = self._number(key, facts) if "scalar" in facts else decode_tree(facts.get("value"), {})
            if "like" in facts:
                copies = self._stored.plan(key, pieces)
            elif "whole" in facts or "ranks" in facts:
                key = self._placed(key, held, facts)
                stored = self._stored.index.tensors.get(key)
                box = full_box(stored.shape if stored is not None else ())
                copies = self._stored.plan(key, [Piece(box, box)])
            self._states.append(_State(held, held.value, name, facts, key, copies, group, value))

    def _number(self, key: str, facts: Mapping[str, Any]) -> Tensor:
        try:
            return torch.tensor(decode_tree(facts["scalar"], {}), dtype=getattr(torch, facts["dtype"]))
        except (RuntimeError, TypeError, ValueError, OverflowError) as error:
            raise LoadError(
                f"the state {key} is no {facts['dtype']}", at=str(self._stored.directory), why=str(error)[:200]
            ) from error

    def _placed(self, key: str, held: HeldTensor, facts: Mapping[str, Any]) -> str:
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


def _like(old: Any, value: Any) -> Any:
    """`value`, a tuple or a tensor where what it replaces is one, or holds some."""
    if isinstance(old, tuple) and isinstance(value, list | tuple):
        return tuple(map(_like, old, value)) if len(old) == len(value) else tuple(value)
    if isinstance(old, Tensor) and not isinstance(value, Tensor):
        return torch.full_like(old, value)
    return value
