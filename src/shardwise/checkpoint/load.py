"""Loads a checkpoint: all ranks check everything (`LoadPlan`) before any rank changes anything (`apply`)."""

import json
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.checkpoint.collect import (
    LocalShard,
    by_name,
    called,
    is_unsharded,
    local_shards,
    model_key,
    named_groups,
    restore_random,
    state_for_groups,
    state_key,
)
from shardwise.checkpoint.store import find_tag, root_of
from shardwise.checkpoint.stored import StoredParts, decode_tree, open_checkpoint
from shardwise.checkpoint.trainer_files import is_trainer
from shardwise.comm.agree import agree_on, check_calls, gather_from_all, raise_on_all_ranks
from shardwise.errors import LoadError, listed
from shardwise.mesh import Mesh
from shardwise.parameters.registry import Registry, local_part, registry_of, reshard, unchanged_names
from shardwise.sharding.boxes import full_box
from shardwise.sharding.layout import Copy, Piece
from shardwise.topology.shape import MeshShape

logger = logging.getLogger("shardwise.checkpoint")

Put = Callable[[str, Tensor], None]
_MOST_NAMES = 10


@dataclass(frozen=True, kw_only=True)
class LoadTarget:
    """Destination of a load; see `shardwise.load_checkpoint`.

    Attributes:
        strict: whether differing names are an error.
        fills_model: False if the model's tensors are already loaded.
    """

    model: nn.Module | None = None
    optimizer: Any = None
    scheduler: Any = None
    strict: bool = True
    fills_model: bool = True


def check_same_target(target: LoadTarget, mesh: Mesh, *, verifies: bool = True) -> None:
    """Raises unless every rank loads into the same objects.

    Communicates: what `Agreement` does.
    """
    kinds = {"the optimizer": target.optimizer, "the scheduler": target.scheduler}
    described = {
        **{what: _described(by_name(value)) or "none" for what, value in kinds.items()},
        "strict": str(target.strict),
        "verify": str(verifies),
        "whether the model is filled": str(target.fills_model),
    }
    check_calls(mesh.group(), described, doing="load_checkpoint")


def _described(given: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} a {type(each).__name__}".lstrip() for name, each in given.items())


def open_on_all_ranks(
    path: Any,
    tag: str | None,
    mesh: Mesh | None,
    *,
    verifies: bool = True,
    open_trainer: Callable[[Path], StoredParts] | None = None,
) -> StoredParts:
    """Opens the checkpoint that rank 0 finds, on every rank. Rank 0 checks that every file exists.

    Args:
        mesh: mesh of the ranks that open it; None: only this process.
        open_trainer: opens a checkpoint of transformers' Trainer; None: such a one is refused.

    Communicates: one gather of a small object over all ranks, and what `Agreement` does.
    """
    group = mesh.group() if mesh is not None else None
    is_first = group is None or group.rank() == 0

    def find() -> str | None:
        root = root_of(path)
        is_trainers = open_trainer is not None and tag is None and is_trainer(root)
        return str(find_tag(root, tag).relative_to(root)) if is_first and not is_trainers else None

    found = gather_from_all(group, "looking for the checkpoint", find)[0]

    def open_it() -> tuple[StoredParts, dict[str, str]]:
        root = root_of(path)
        stored = open_trainer(root) if found is None else open_checkpoint(root / found, verifies=verifies)  # type: ignore[misc]
        if is_first:
            stored.check_all_files()
        return stored, {"the checkpoint": repr(stored.manifest)}

    return agree_on(
        group,
        open_it,
        doing="opening the checkpoint",
        what="ranks see different checkpoints",
        fix="load from a directory that all machines share",
        error=LoadError,
    )


def load_into(stored: StoredParts, target: LoadTarget, *, put: Put) -> Any:
    """Loads a checkpoint; returns the saved `extra`. All ranks call it.

    Args:
        put: sets the model's parameter or buffer of that name, if it is still on the meta device.

    Communicates: three gathers of small objects over all ranks.
    """
    model = target.model
    if model is None:
        plan = LoadPlan(stored, target, None, {})
        plan.apply(put)
        return plan.extra
    registry = registry_of(model)
    group = registry.mesh.group()
    reshard(model)
    shards: dict[str, LocalShard] = {}

    def compare() -> _Differences:
        shards.update(local_shards(model, registry))
        return _find_differences(stored, shards, model, registry)

    everyone = gather_from_all(group, "comparing the checkpoint with the model", compare)
    with stored:
        with raise_on_all_ranks(group, "checking the checkpoint"):
            if target.fills_model:
                _check_names(stored, everyone, registry.mesh, strict=target.strict)
                _check_source(stored, everyone, registry, strict=target.strict)
            plan = LoadPlan(stored, target, registry, shards)
        with raise_on_all_ranks(group, "filling the model"), torch.no_grad():
            plan.apply(put)
    return plan.extra


class LoadPlan:
    """The changes of a load on this rank. The constructor checks them; `apply` makes them. Communicates nothing."""

    def __init__(
        self, stored: StoredParts, target: LoadTarget, registry: Registry | None, shards: Mapping[str, LocalShard]
    ) -> None:
        self._stored, self._target, self._registry, self._shards = stored, target, registry, shards
        values = stored.index.values
        self.extra = decode_tree(values.get("extra"), stored.read_all("extra"))
        self._copies: dict[str, tuple[Copy, ...]] = {}
        self._optimizers: list[OptimizerLoad] = []
        if registry is not None:
            coords, saved = registry.mesh.coords, _saved_names(stored)
            for name in (name for name in shards if name in saved and target.fills_model):
                self._copies[name] = stored.plan(model_key(name), shards[name].layout.pieces(coords))
            optimizers = by_name(target.optimizer)
            if optimizers:
                _check_given("optimizer", stored.index.optimizers, optimizers, at=str(stored.directory))
            self._optimizers = [
                OptimizerLoad(stored, name, each, shards, registry, strict=target.strict)
                for name, each in optimizers.items()
            ]
        self._schedules = _read_schedules(stored, target, shards)
        self._random = stored.read_all("random/") if registry is not None else {}

    def apply(self, put: Put) -> None:
        """Changes model, optimizer, scheduler and random states; see `load_into`."""
        model, registry, stored = self._target.model, self._registry, self._stored
        for name, copies in self._copies.items():
            assert registry is not None
            value = self._shards[name].value
            if value.is_meta:
                shape = self._shards[name].layout.local_shape(registry.mesh.coords)
                new = torch.empty(shape, dtype=value.dtype, device=registry.device_of(name))
                stored.fill(new, model_key(name), copies)
                put(name, new)
            else:
                stored.fill(local_part(value).detach(), model_key(name), copies)
        for optimizer in self._optimizers:
            optimizer.apply()
        for scheduler, state in self._schedules:
            scheduler.load_state_dict(state)
        if model is not None and registry is not None:
            for each in (model, registry.model() or model):
                each.zero_grad()  # gradients so far are of the weights before
        if registry is not None and self._random:
            restore_random(registry.mesh, stored.index.values.get("random", {}), self._random)


@dataclass(frozen=True)
class _Differences:
    """Differences between a checkpoint and a model, on one rank.

    Attributes:
        changed: names of frozen parameters that the checkpoint leaves out, and that have changed since they were read.
    """

    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    shapes: tuple[str, ...]
    changed: tuple[str, ...]


def _find_differences(
    stored: StoredParts, shards: Mapping[str, LocalShard], model: nn.Module, registry: Registry
) -> _Differences:
    tensors, saved = stored.index.tensors, _saved_names(stored)
    is_partial = stored.manifest.content == "trained"
    left_out = {name for name, each in shards.items() if name not in saved and not each.value.requires_grad}
    shapes = {name: tensors[model_key(name)].shape for name in shards if name in saved}
    unchanged = unchanged_names(model, registry)
    return _Differences(
        missing=tuple(name for name in shards if name not in saved and not (is_partial and name in left_out)),
        unexpected=tuple(sorted(saved - {*shards, *registry.entries})),
        shapes=tuple(
            f"{name}: {list(shape)} in the checkpoint, {list(shards[name].layout.shape)} in the model"
            for name, shape in shapes.items()
            if shape != shards[name].layout.shape
        ),
        changed=tuple(name for name in registry.entries if is_partial and name in left_out - unchanged),
    )


def _saved_names(stored: StoredParts) -> set[str]:
    return {key.removeprefix("model/") for key in stored.index.tensors if key.startswith("model/")}


def _check_names(stored: StoredParts, everyone: Sequence[_Differences], mesh: Mesh, *, strict: bool) -> None:
    """Lists missing and unexpected names like transformers; raises if `strict`, else warns."""
    missing = list(dict.fromkeys(name for each in everyone for name in each.missing))
    shapes = list(dict.fromkeys(text for each in everyone for text in each.shapes))
    # What one rank does not know may be another's: of another stage.
    unexpected = [name for name in everyone[0].unexpected if all(name in each.unexpected for each in everyone)]
    lines = [
        f"{what}: {listed(names, _MOST_NAMES)}"
        for what, names in (("missing", missing), ("unexpected", unexpected), ("of other shapes", shapes))
        if names
    ]
    if shapes or (strict and lines):
        raise LoadError(
            f"the checkpoint {stored.manifest.tag} does not fit the model",
            at=str(stored.directory),
            why="\n".join(lines),
            fix="build the model that was saved" + ("" if shapes else ", or pass strict=False to load what fits"),
        )
    if lines and mesh.rank == 0:
        logger.warning("%s: %s", stored.directory, "; ".join(lines))


def _check_source(stored: StoredParts, everyone: Sequence[_Differences], registry: Registry, *, strict: bool) -> None:
    """Raises, or warns, if the checkpoint's adapters were trained on another base than the model's."""
    saved, own = stored.index.values.get("source"), registry.source
    if saved is None:
        return
    changed = list(dict.fromkeys(name for each in everyone for name in each.changed))
    is_known = saved["digest"] and own.digest
    if is_known and saved["digest"] != own.digest:
        why = f"its weights were read from {saved['name']!r}, the model's from other files: {own.name!r}"
    elif changed and (own.name or own.digest):
        why = f"frozen weights have changed since they were read: {listed(changed, _MOST_NAMES)}"
    else:
        if not is_known and saved["name"] != own.name and registry.mesh.rank == 0:
            say = "%s holds adapters of %r; nothing tells whether the model's base, %r, is the same"
            logger.warning(say, stored.directory, saved["name"], own.name)
        return
    if strict:
        raise LoadError(
            f"the checkpoint {stored.manifest.tag} was trained on another base than this model's",
            at=str(stored.directory),
            why=why,
            fix="load the base that it was trained on, or pass strict=False to load_checkpoint to go on with this one",
        )
    if registry.mesh.rank == 0:
        logger.warning("%s was trained on another base: %s", stored.directory, why)


def _check_given(kind: str, saved: Mapping[str, Any], given: Mapping[str, Any], *, at: str) -> None:
    """Raises if other names were saved than are given. A single one where none was saved has an error of its own."""
    if given.keys() != saved.keys() and not (given.keys() == {""} and not saved):
        raise LoadError(
            f"the checkpoint holds {_listed(kind, saved)}, and is loaded into {_listed(kind, given)}",
            at=at,
            fix=f"pass {kind}= as it was saved, or load without it",
        )


def _listed(kind: str, names: Mapping[str, Any]) -> str:
    if not names or "" in names:
        return f"one {kind} without a name" if names else f"no {kind}"
    return f"the {kind}s {', '.join(map(repr, names))}"


def _read_schedules(stored: StoredParts, target: LoadTarget, shards: Mapping[str, LocalShard]) -> list[tuple[Any, Any]]:
    """Returns the schedulers with their saved states, which have entries for their optimizers' current groups."""
    values, given = stored.index.values, by_name(target.scheduler)
    if not given:
        return []
    states = decode_tree(values.get("scheduler"), stored.read_all("scheduler"))
    classes = values.get("scheduler_class")
    if not isinstance(classes, Mapping):
        states, classes = {"": states}, {"": classes} if classes else {}
    _check_given("scheduler", classes, given, at=str(stored.directory))
    for name, each in given.items():
        own, saved = type(each).__name__, classes.get(name)
        if saved != own:
            what = f"that of a {saved}" if saved else "none"
            of = f" for {name!r}" if name else ""
            raise LoadError(f"the checkpoint has no state of a {own}{of}: {what}", at=str(stored.directory))
    return [(each, _for_groups(stored, states[name], each, target, shards)) for name, each in given.items()]


def _for_groups(
    stored: StoredParts, state: Any, scheduler: Any, target: LoadTarget, shards: Mapping[str, LocalShard]
) -> Any:
    """Returns a scheduler's state with entries for its optimizer's current groups."""
    optimizer = getattr(scheduler, "optimizer", None)
    if optimizer is None:
        return state
    loaded = by_name(target.optimizer).items()
    name = next((name for name, each in loaded if each.param_groups is optimizer.param_groups), "")
    saved = stored.index.optimizers.get(name)
    if saved is None or not shards:  # rank 0's lists are of the groups of its stage
        groups, rates = optimizer.param_groups, state.get("_last_lr") if isinstance(state, Mapping) else None
        is_of_others = MeshShape.parse(stored.manifest.layout).pp_size > 1 or (rates and len(rates) != len(groups))
        return state_for_groups(state, groups, keeps_last=True) if is_of_others else state
    pairs = named_groups(optimizer, shards)
    return state_for_groups(state, [{**group, **saved_options(stored, saved, members)} for group, members in pairs])


_HOW = ("foreach", "fused", "capturable", "differentiable")  # how an optimizer computes, not what: those stay


@dataclass(frozen=True)
class _State:
    """One state of one parameter: the copies that fill a tensor, or a value."""

    facts: Mapping[str, Any]
    key: str = ""
    copies: tuple[Copy, ...] = ()


class OptimizerLoad:
    """The changes that loading a checkpoint makes to an optimizer. The constructor checks them; `apply` makes them."""

    def __init__(
        self,
        stored: StoredParts,
        name: str,
        optimizer: torch.optim.Optimizer,
        shards: Mapping[str, LocalShard],
        registry: Registry,
        *,
        strict: bool,
    ) -> None:
        self._stored, self._name, self._optimizer, self._mesh = stored, name, optimizer, registry.mesh
        self._groups: list[tuple[dict[str, Any], Mapping[str, Any], dict[str, dict[str, _State]]]] = []
        self._shards = shards
        kind, own_name = type(optimizer), called("optimizer", name)
        own, saved = f"{kind.__module__}.{kind.__qualname__}", stored.index.optimizers.get(name)
        if saved is None or saved["class"] != own:
            what = "of none" if saved is None else f"of {saved['class']}"
            raise LoadError(
                f"the checkpoint holds the state {what}, {own_name} is {own}",
                at=str(stored.directory),
                fix="build the optimizer that was saved, or load without one",
            )
        parameters, unknown = saved["parameters"], list[str]()
        for group, members in named_groups(optimizer, shards, name):
            unknown += [each.name for each in members if each.value.requires_grad and each.name not in parameters]
            known = [each for each in members if each.name in parameters]
            states = {each.name: self._plan_states(each, parameters[each.name]["states"]) for each in known}
            self._groups.append((group, saved_options(stored, saved, members), states))
        if unknown and strict:
            raise LoadError(
                f"the checkpoint has no optimizer state of {len(unknown)} parameters"
                + (f" for {own_name}" if name else ""),
                at=str(stored.directory),
                why=", ".join(unknown[:5]),
                fix="train the parameters that were trained, or pass strict=False",
            )

    def _plan_states(self, shard: LocalShard, states: Mapping[str, Mapping[str, Any]]) -> dict[str, _State]:
        found = {}
        for name, facts in states.items():
            key, pieces = state_key(shard.name, name, self._name), shard.layout.pieces(self._mesh.coords)
            if "whole" in facts or "ranks" in facts:
                key = self._key_of_other_shape(key, shard, facts)
                own = self._stored.index.tensors.get(key)  # ranks may hold parts of unlike shapes
                box = full_box(tuple(facts["shape"]) if own is None else own.shape)
                pieces = (Piece(box, box),)
            is_value = "value" in facts or "scalar" in facts
            found[name] = _State(facts, key, () if is_value else self._stored.plan(key, pieces))
        return found

    def _key_of_other_shape(self, key: str, shard: LocalShard, facts: Mapping[str, Any]) -> str:
        """Returns the key of a state with another shape than the parameter, if it can be loaded here."""
        saved_with = self._stored.manifest.layout
        if "whole" in facts and is_unsharded(shard.layout):
            return key
        stored = self._stored.index.tensors.get(model_key(shard.name))
        is_same = stored is not None and stored.layout == shard.layout and saved_with == str(self._mesh.shape)
        if "ranks" in facts and is_same:
            return f"{key}@{self._mesh.position}"
        raise LoadError(
            f"the optimizer's state {key.partition('/')[2]} fits no layout but its own",
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


def saved_options(stored: StoredParts, saved: Mapping[str, Any], shards: Iterable[LocalShard]) -> Mapping[str, Any]:
    """Returns an optimizer's saved options for the parameters of one group; empty if none of them was saved."""
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
    """Converts `value` to the types of `old`: tuples and tensors."""
    if isinstance(old, tuple) and isinstance(value, list | tuple):
        return tuple(map(_like, old, value)) if len(old) == len(value) else tuple(value)
    if isinstance(old, Tensor) and not isinstance(value, Tensor):
        return torch.full_like(old, value)
    return value
