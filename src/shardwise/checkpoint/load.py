"""Loading: everything is found and checked on all ranks before anything is changed on any of them."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.checkpoint.base import Sums, base_differences, base_sums, fingerprint, forget_sums
from shardwise.checkpoint.content import HeldTensor, held_tensors, model_key
from shardwise.checkpoint.directory import find_tag, root_of
from shardwise.checkpoint.load_optimizer import OptimizerLoad
from shardwise.checkpoint.manifest import INDEX, read_index, read_manifest
from shardwise.checkpoint.random_states import check_random, restore_random
from shardwise.checkpoint.schedules import state_for_groups
from shardwise.checkpoint.schema import Manifest
from shardwise.checkpoint.stored_parts import StoredParts, check_companion, check_files
from shardwise.checkpoint.tree import decode_tree, fits
from shardwise.comm.agree import agree, check_calls, gather_from_all, raise_on_all_ranks
from shardwise.comm.operations import Group
from shardwise.errors import ConfigError, LoadError
from shardwise.mesh import Mesh
from shardwise.parameters.at_rest import reshard
from shardwise.parameters.registry import Registry, local_part, registry_of
from shardwise.sharding.reshard import Copy

__all__ = ["Loaded", "Session", "load_into", "open_checkpoint"]

logger = logging.getLogger("shardwise.checkpoint")

Put = Callable[[str, Tensor], None]
_MOST_NAMES = 10


@dataclass(frozen=True)
class Loaded:
    """What was loaded besides tensors of the model and optimizer.

    Attributes:
        manifest: of the checkpoint.
        extra: as it was saved.
        loss_scale: as it was saved, None where there was none.
    """

    manifest: Manifest
    extra: Any
    loss_scale: Mapping[str, Any] | None


@dataclass(frozen=True, kw_only=True)
class Session:
    """What a checkpoint is loaded into; see `shardwise.load_checkpoint`.

    Attributes:
        model: split, or None.
        optimizer: over its parameters, or None.
        scheduler: or None.
        strict: whether names that do not fit are an error.
        verifies: whether checksums are compared.
        fills_model: False where the model's tensors have been loaded before.
    """

    model: nn.Module | None = None
    optimizer: torch.optim.Optimizer | None = None
    scheduler: Any = None
    strict: bool = True
    verifies: bool = True
    fills_model: bool = True


def open_checkpoint(directory: Path, *, verifies: bool = True) -> StoredParts:
    """Opens the checkpoint that stands in `directory`: reads and checks what it says of itself.

    Raises:
        LoadError: it is damaged or incomplete.
    """
    manifest = read_manifest(directory)
    index = read_index(directory, manifest)
    return StoredParts(directory, manifest, index, verifies)


def load_into(path: Any, tag: str | None, session: Session, *, put: Put) -> Loaded:
    """Loads the checkpoint `tag` of `path`; see `shardwise.load_checkpoint`.

    Args:
        put: makes a tensor the model's parameter or buffer of that name, where it is still on the meta device.
    """
    model, optimizer, scheduler = session.model, session.optimizer, session.scheduler
    registry = registry_of(model) if model is not None else None
    group = registry.mesh.group() if registry is not None else None
    if registry is not None:
        _check_alike(session, registry.mesh)
    stored, held, faults = _open_alike(path, tag, model, registry, verifies=session.verifies)
    with stored:
        with raise_on_all_ranks(group, "checking the checkpoint"):
            if optimizer is not None and (model is None or registry is None):
                raise ConfigError("an optimizer without its model", why="its state is stored by the model's names")
            planned: dict[str, tuple[Copy, ...]] = {}
            states = None
            if model is not None and registry is not None:
                _check_names(stored, faults, registry.mesh, strict=session.strict)
                _check_base(stored, faults, registry.mesh, strict=session.strict)
                saved = _saved_names(stored) if session.fills_model else set()
                found = {name: each.layout.pieces(registry.mesh.coords) for name, each in held.items() if name in saved}
                planned = {name: stored.plan(model_key(name), pieces) for name, pieces in found.items()}
                if optimizer is not None:
                    states = OptimizerLoad(stored, optimizer, held, registry, strict=session.strict)
            extra = decode_tree(stored.index.values.get("extra"), _tensors_of(stored, "extra"))
            schedule = _read_schedule(stored, scheduler) if scheduler is not None else None
            groups = optimizer.param_groups if optimizer is getattr(scheduler, "optimizer", 0) and optimizer else None
            if groups is not None:
                state_for_groups(schedule, groups)  # raises here, where nothing is changed yet
            random = _tensors_of(stored, "random/") if registry is not None else {}
            if registry is not None:
                check_random(registry.mesh, stored.index.values.get("random", {}), random)
        with raise_on_all_ranks(group, "filling the model"), _as_partial(stored), torch.no_grad():
            if registry is not None:
                _fill_model(stored, held, registry, planned, put)
            if states is not None:
                states.apply()
            if schedule is not None:
                scheduler.load_state_dict(schedule if groups is None else state_for_groups(schedule, groups))
            if model is not None and registry is not None:
                for each in (model, registry.model() or model):
                    each.zero_grad()  # gradients so far are of the weights before
                restore_random(registry.mesh, stored.index.values.get("random", {}), random)
        return Loaded(stored.manifest, extra, stored.index.values.get("loss_scale"))


def _check_alike(session: Session, mesh: Mesh) -> None:
    """Raises unless every rank loads into the same things."""
    described = {
        "the optimizer": _class_of(session.optimizer),
        "the scheduler": _class_of(session.scheduler),
        "strict": str(session.strict),
        "verify": str(session.verifies),
        "whether the model is filled": str(session.fills_model),
    }
    check_calls(mesh.group(), described, doing="load_checkpoint")


def _class_of(value: Any) -> str:
    return "none" if value is None else f"a {type(value).__name__}"


@contextmanager
def _as_partial(stored: StoredParts) -> Iterator[None]:
    """Says of an error that comes when all has been checked, such as too little memory, that some is loaded."""
    try:
        yield
    except Exception as error:
        raise LoadError(
            f"the checkpoint {stored.manifest.tag} is loaded in part",
            at=str(stored.directory),
            why=f"{type(error).__name__}: {error}"[:300],
            fix="load again, or build model, optimizer and scheduler again: each may hold some of its values",
        ) from error


def _open_alike(
    path: Any, tag: str | None, model: nn.Module | None, registry: Registry | None, *, verifies: bool
) -> tuple[StoredParts, dict[str, HeldTensor], list[_Faults]]:
    """The checkpoint that rank 0 finds, opened on every rank: the same one on all. With it what the model has on this
    rank, and what does not fit on every rank.
    """
    group = registry.mesh.group() if registry is not None else None
    opened: list[tuple[StoredParts, dict[str, HeldTensor]]] = []

    def find() -> str | None:
        root = root_of(path)
        return str(find_tag(root, tag).relative_to(root)) if group is None or group.rank() == 0 else None

    found: list[str | None] = gather_from_all(group, "looking for the checkpoint", find)
    directory = root_of(path) / next(each for each in found if each is not None)

    def look() -> tuple[bytes, _Faults | None]:
        stored = _open_whole(directory, group, verifies=verifies)
        digest = hashlib.sha256(repr(stored.manifest).encode()).digest()
        if model is None or registry is None:
            opened.append((stored, {}))
            return digest, None
        reshard(model)
        opened.append((stored, held_tensors(model, registry)))
        return digest, _compare(*opened[0], registry)

    everyone = gather_from_all(group, "opening the checkpoint", look)
    if registry is not None and len({digest for digest, _ in everyone}) > 1:
        agree(
            group,
            {"the checkpoint": repr(opened[0][0].manifest)},
            what="ranks see different checkpoints",
            fix="load from a directory that all machines share",
            doing="opening the checkpoint",
        )
    return *opened[0], [faults for _, faults in everyone if faults is not None]


def _open_whole(directory: Path, group: Group | None, *, verifies: bool) -> StoredParts:
    """The checkpoint, of which rank 0 has looked for every file."""
    try:
        stored = open_checkpoint(directory, verifies=verifies)
        if group is None or group.rank() == 0:
            _check_all_files(stored)
    except LoadError as error:
        error.summary = f"{error.summary} (rank {group.rank()})" if group is not None else error.summary
        raise
    return stored


def _check_all_files(stored: StoredParts) -> None:
    """Raises unless all files are there, and those that hold no tensors, whose bytes are few, as they were written."""
    manifest = stored.manifest
    check_files(stored.directory, manifest, list(manifest.files))
    for name in manifest.files.keys() - {INDEX, *stored.index.files} if stored.verifies else ():
        check_companion(stored.directory, manifest, name)


@dataclass(frozen=True)
class _Faults:
    """Names that do not fit, as one rank sees it, and its share of what tells the base from others."""

    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    shapes: tuple[str, ...]
    base: Sums


def _compare(stored: StoredParts, held: Mapping[str, HeldTensor], registry: Registry) -> _Faults:
    """What the model has on this rank beside what the checkpoint has."""
    tensors = stored.index.tensors
    saved = _saved_names(stored)
    is_partial = stored.manifest.content == "trained"
    return _Faults(
        missing=tuple(
            name
            for name, each in held.items()
            if name not in saved and not (is_partial and not each.value.requires_grad)
        ),
        unexpected=tuple(sorted(saved - {*held, *registry.entries})),
        shapes=tuple(
            f"{name}: {list(tensors[model_key(name)].shape)} in the checkpoint, {list(each.layout.shape)} in the model"
            for name, each in held.items()
            if name in saved and tensors[model_key(name)].shape != each.layout.shape
        ),
        base=base_sums(held, registry) if "base" in stored.index.values else {},
    )


def _saved_names(stored: StoredParts) -> set[str]:
    return {key.removeprefix("model/") for key in stored.index.tensors if key.startswith("model/")}


def _check_names(stored: StoredParts, faults: Sequence[_Faults], mesh: Mesh, *, strict: bool) -> None:
    """Lists missing and unexpected names, as transformers does; raises over them where that was asked for."""
    missing = list(dict.fromkeys(name for each in faults for name in each.missing))
    shapes = list(dict.fromkeys(text for each in faults for text in each.shapes))
    # What one rank does not know may be another's: of another stage.
    unexpected = [name for name in faults[0].unexpected if all(name in each.unexpected for each in faults)]
    lines = [
        *([f"missing: {_shown(missing)}"] if missing else []),
        *([f"unexpected: {_shown(unexpected)}"] if unexpected else []),
        *([f"of other shapes: {_shown(shapes)}"] if shapes else []),
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


def _check_base(stored: StoredParts, faults: Sequence[_Faults], mesh: Mesh, *, strict: bool) -> None:
    """Raises, or says, that what was saved was trained on other frozen parameters than the model has."""
    found = base_differences(stored.index.values.get("base"), fingerprint(each.base for each in faults))
    if not found:
        return
    if not strict:
        if mesh.rank == 0:
            logger.warning("%s was trained on another base: %s", stored.directory, _shown(found))
        return
    raise LoadError(
        f"the checkpoint {stored.manifest.tag} was trained on another base than this model's",
        at=str(stored.directory),
        why=f"the frozen parameters have other values than those that were saved with: {_shown(found)}",
        fix="load the base that it was trained on, in the same dtype (model.dtype of a run),\n"
        "or pass strict=False to load_checkpoint to go on with this one",
    )


def _shown(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return ", ".join(names[:_MOST_NAMES]) + more


def _fill_model(
    stored: StoredParts,
    held: Mapping[str, HeldTensor],
    registry: Registry,
    planned: Mapping[str, tuple[Copy, ...]],
    put: Put,
) -> None:
    forget_sums(registry)
    for name, plan in planned.items():
        value = held[name].value
        if value.is_meta:
            shape = held[name].layout.local_shape(registry.mesh.coords)
            new = torch.empty(shape, dtype=value.dtype, device=registry.device_of(name))
            stored.fill(new, model_key(name), plan)
            put(name, new)
        else:
            stored.fill(local_part(value).detach(), model_key(name), plan)


def _tensors_of(stored: StoredParts, prefix: str) -> dict[str, Tensor]:
    return {key: stored.read(key) for key in stored.index.tensors if key.startswith(prefix)}


def _read_schedule(stored: StoredParts, scheduler: Any) -> Any:
    values = stored.index.values
    name, saved = type(scheduler).__name__, values.get("scheduler_class")
    if saved != name:
        what = f"that of a {saved}" if saved else "none"
        raise LoadError(f"the checkpoint has no state of a {name}: {what}", at=str(stored.directory))
    state = decode_tree(values.get("scheduler"), _tensors_of(stored, "scheduler"))
    own = scheduler.state_dict()
    if not isinstance(state, Mapping) or state.keys() != own.keys():
        lost = ", ".join(sorted(state.keys() ^ own.keys())) if isinstance(state, Mapping) else f"{state!r:.100}"
        raise LoadError(f"the saved state of {name} has other entries: {lost}", at=str(stored.directory))
    if strays := [f"{each} is {state[each]!r:.100}" for each in own if not fits(own[each], state[each])]:
        raise LoadError(f"the saved state of {name} is of another kind: {strays[0]}", at=str(stored.directory))
    return state
