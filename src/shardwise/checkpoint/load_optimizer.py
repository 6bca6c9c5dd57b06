"""Loads states and options of an optimizer, by the names of its parameters."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardwise.checkpoint.collect import LocalShard, is_unsharded, model_key, named_groups, state_key
from shardwise.checkpoint.reader import StoredParts
from shardwise.checkpoint.tree import decode_tree
from shardwise.errors import LoadError
from shardwise.parameters.registry import Registry, local_part
from shardwise.sharding.boxes import full_box
from shardwise.sharding.layout import Piece
from shardwise.sharding.reshard import Copy

_HOW = ("foreach", "fused", "capturable", "differentiable")
"""Options that say how an optimizer computes, not what: those it has stay."""


@dataclass(frozen=True)
class _State:
    """One state of one parameter: the copies that fill a tensor, or a value."""

    facts: Mapping[str, Any]
    key: str = ""
    copies: tuple[Copy, ...] = ()


class OptimizerLoad:
    """Changes of a load to an optimizer. The constructor checks them; `apply` makes them.

    Raises:
        ConfigError: the optimizer holds parameters of another model.
        LoadError: the checkpoint has no state of this class, or not of these parameters; a group holds parameters that
            had different options; or a state can only be loaded with the layout it was saved with.
    """

    def __init__(
        self,
        stored: StoredParts,
        optimizer: torch.optim.Optimizer,
        shards: Mapping[str, LocalShard],
        registry: Registry,
        *,
        strict: bool,
    ) -> None:
        self._stored, self._optimizer, self._mesh = stored, optimizer, registry.mesh
        self._groups: list[tuple[dict[str, Any], Mapping[str, Any], dict[str, dict[str, _State]]]] = []
        self._shards = shards
        kind = type(optimizer)
        own, saved = f"{kind.__module__}.{kind.__qualname__}", stored.index.optimizer
        if saved is None or saved["class"] != own:
            what = "of none" if saved is None else f"of {saved['class']}"
            raise LoadError(
                f"the checkpoint holds the state {what}, the optimizer is {own}",
                at=str(stored.directory),
                fix="build the optimizer that was saved, or load without one",
            )
        parameters, unknown = saved["parameters"], list[str]()
        for group, members in named_groups(optimizer, shards):
            unknown += [each.name for each in members if each.value.requires_grad and each.name not in parameters]
            known = [each for each in members if each.name in parameters]
            states = {each.name: self._plan_states(each, parameters[each.name]["states"]) for each in known}
            self._groups.append((group, saved_options(stored, members), states))
        if unknown and strict:
            raise LoadError(
                f"the checkpoint has no optimizer state of {len(unknown)} parameters",
                at=str(stored.directory),
                why=", ".join(unknown[:5]),
                fix="train the parameters that were trained, or pass strict=False",
            )

    def _plan_states(self, shard: LocalShard, states: Mapping[str, Mapping[str, Any]]) -> dict[str, _State]:
        found = {}
        for name, facts in states.items():
            key, pieces = state_key(shard.name, name), shard.layout.pieces(self._mesh.coords)
            if "whole" in facts or "ranks" in facts:
                key = self._key_of_other_shape(key, shard, facts)
                own = self._stored.index.tensors.get(key)  # ranks may hold parts of unlike shapes
                box = full_box(tuple(facts["shape"]) if own is None else own.shape)
                pieces = (Piece(box, box),)
            is_value = "value" in facts or "scalar" in facts
            found[name] = _State(facts, key, () if is_value else self._stored.plan(key, pieces))
        return found

    def _key_of_other_shape(self, key: str, shard: LocalShard, facts: Mapping[str, Any]) -> str:
        """Key of a state with another shape than the parameter, if it can be loaded here."""
        saved_with = self._stored.manifest.layout
        if "whole" in facts and is_unsharded(shard.layout):
            return key
        stored = self._stored.index.tensors.get(model_key(shard.name))
        is_same = stored is not None and stored.layout == shard.layout and saved_with == str(self._mesh.shape)
        if "ranks" in facts and is_same:
            return f"{key}@{self._mesh.position}"
        raise LoadError(
            f"the optimizer's state {key.removeprefix('optimizer/')} fits no layout but its own",
            at=str(self._stored.directory),
            why=f"its shape {facts['shape']} is not the parameter's, so it is unknown how it is divided; it was\n"
            f"saved with {saved_with}, this is {self._mesh.shape}",
            fix=f"load it with layout {saved_with}, or load without the optimizer",
        )

    def apply(self) -> None:
        """Puts options and states into the optimizer."""
        for group, options, states in self._groups:
            for name, value in options.items():
                if name not in _HOW:
                    group[name] = _like(group.get(name), value)
            for name, planned in states.items():
                shard = self._shards[name]
                self._optimizer.state.pop(shard.value, None)
                if planned:
                    made = {state: self._make(each, shard, group) for state, each in planned.items()}
                    self._optimizer.state[shard.value] = made

    def _make(self, state: _State, shard: LocalShard, group: Mapping[str, Any]) -> Any:
        facts, local = state.facts, local_part(shard.value).detach()
        if "value" in facts:
            return decode_tree(facts["value"], {})
        if "scalar" in facts:
            device = local.device if group.get("capturable") or group.get("fused") else "cpu"
            return torch.tensor(decode_tree(facts["scalar"], {}), dtype=getattr(torch, facts["dtype"]), device=device)
        tensors = self._stored.index.tensors
        dtype = tensors[state.key].dtype
        if "like" not in facts:
            made = torch.empty(tensors[state.key].shape, dtype=dtype, device=local.device)
            self._stored.fill(made, state.key, state.copies)
            return made
        follows = dtype == tensors[model_key(shard.name)].dtype  # a moment of a bfloat16 parameter is bfloat16
        made = torch.empty_like(local, dtype=local.dtype if follows else dtype)
        self._stored.fill(made, state.key, state.copies)
        return shard.entry.wrap(made) if shard.entry is not None else made


def saved_options(stored: StoredParts, shards: Iterable[LocalShard]) -> Mapping[str, Any]:
    """Saved options of the parameters of one group; empty if none of them was saved.

    Raises:
        LoadError: they were saved with different options.
    """
    saved = stored.index.optimizer or {"parameters": {}}
    parameters = saved["parameters"]
    numbers = {parameters[each.name]["group"]: each.name for each in shards if each.name in parameters}
    options = [decode_tree(saved["groups"][number], {}) for number in numbers]
    if len({json.dumps({k: str(value) for k, value in each.items() if k not in _HOW}) for each in options}) > 1:
        raise LoadError(
            f"{' and '.join(list(numbers.values())[:2])} are in one parameter group, and had different options",
            at=str(stored.directory),
            fix="build the optimizer with the groups it had",
        )
    return options[0] if options else {}


def _like(old: Any, value: Any) -> Any:
    """`value` with the types of `old`: tuples and tensors."""
    if isinstance(old, tuple) and isinstance(value, list | tuple):
        return tuple(map(_like, old, value)) if len(old) == len(value) else tuple(value)
    if isinstance(old, Tensor) and not isinstance(value, Tensor):
        return torch.full_like(old, value)
    return value
