"""Fills a split meta model: each rank reads its parts of a checkpoint, or draws values that no layout changes.

transformers draws all weights from one random stream. Here each module has its own stream, seeded by the module's name.
A module's tensors are made unsplit, one module at a time, before each rank keeps its part (see [Note: recorded
construction]). So the values depend only on the seed.
"""

import hashlib
import itertools
import logging
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils.logging import tqdm

from shardwise.errors import LoadError, UnsupportedError, listed
from shardwise.parallel.build import Construction
from shardwise.parameters.assigned import take_assignments
from shardwise.parameters.canonical import local_tensor, state_tensors
from shardwise.parameters.registry import DataHandling, Registry, attach_entry
from shardwise.plan.spec import match, star_numbers
from shardwise.plan.structure import fqn_of, parent_of, upwards
from shardwise.runtime.adapter_facts import Place, names_in_base, places_in
from shardwise.sharding.layout import Layout
from shardwise.weights.conversion import Resolution, resolve_keys
from shardwise.weights.index import CheckpointIndex
from shardwise.weights.lazy import LazyTensor


def put_tensor(model: nn.Module, registry: Registry, fqn: str, value: Tensor) -> None:
    """Sets parameter or buffer `fqn` to `value` (this rank's part), under every name that this rank's stages use.
    Casts it to the dtype in which the model keeps it.
    """
    value = value.to(registry.frozen.get(fqn, value.dtype))
    owner, _, name = fqn.rpartition(".")
    module = model.get_submodule(owner)
    if name in module._buffers:
        module._buffers[name] = value
        return
    entry, new = registry.entry(fqn), None
    for owner, _, own in (each.rpartition(".") for each in registry.names_of(fqn)):
        module = model.get_submodule(owner)
        old = module._parameters.get(own)
        if old is None:
            continue
        if new is None:
            new = nn.Parameter(entry.wrap(value), requires_grad=old.requires_grad and value.is_floating_point())
            take_assignments(new)
        module._parameters[own] = new
        attach_entry(module, own, entry)


def record_missing(model: PreTrainedModel, construction: Construction, stored: Collection[str]) -> dict[str, Tensor]:
    """Makes an unsplit meta model initialize the tensors that are not in `stored`; returns them by name."""
    missing = {fqn: value for fqn, value in _named_tensors(model) if fqn not in stored}
    needed = set(map(id, missing.values()))
    for _, value in _named_tensors(model):
        value._is_hf_initialized = id(value) not in needed  # type: ignore[attr-defined]  # transformers leaves those
    if missing:
        with construction:
            model.initialize_weights()
    return {fqn: value.detach() for fqn, value in missing.items()}


def initialize_missing(
    model: nn.Module, registry: Registry, construction: Construction, unsplit: Mapping[str, Tensor], *, seed: int
) -> None:
    """Gives every tensor that is still meta its initial value, on the mesh's device. Communicates nothing."""
    missing: dict[str, list[str]] = {}
    bases = names_in_base(model)  # adapters change no other value
    filled = {registry.tied.get(fqn, fqn) for fqn, value in _named_tensors(model) if not value.is_meta}
    for fqn in unsplit:
        if fqn not in filled and fqn not in registry.tied:
            missing.setdefault(fqn.rpartition(".")[0], []).append(fqn)
    for fqns in missing.values():
        if not any(map(registry.holds, fqns)):
            continue
        stream = bases.get(fqns[0], fqns[0]).rpartition(".")[0]
        drawn = draw_values(construction, [unsplit[fqn] for fqn in fqns], f"{seed}/{stream}")
        for fqn, value in zip(fqns, drawn, strict=True):
            _check_initialized(fqn, value)
            if not registry.holds(fqn):
                continue
            entry = registry.entries.get(fqn)
            own = value if entry is None else local_tensor(value, entry.layout, registry.mesh.coords)
            put_tensor(model, registry, fqn, own.to(registry.device_of(fqn)))


def attributes_of(model: nn.Module) -> dict[str, Tensor]:
    """Returns meta tensors that modules hold as plain attributes (no parameters, no buffers), by FQN in the base."""
    return {fqn_of(place.base, own): value.detach() for place, own, value in _meta_attributes(model)}


def initialize_attributes(
    model: nn.Module, construction: Construction, unsplit: Mapping[str, Tensor], *, device: torch.device, seed: int
) -> None:
    """Like `initialize_missing`, for the plain tensor attributes that `attributes_of` finds (tables of positions)."""
    for place, own, value in list(_meta_attributes(model)):
        fqn = fqn_of(place.base, own)
        recorded = unsplit.get(fqn, value)  # one that nobody recorded has no value
        drawn = draw_values(construction, [recorded], f"{seed}/{place.base}")[0]
        _check_initialized(fqn, drawn)
        setattr(place.module, own, drawn.to(device))


def _meta_attributes(model: nn.Module) -> Iterator[tuple[Place, str, Tensor]]:
    for place in places_in(model):
        for own, value in vars(place.module).items():
            if not place.is_wrapper and isinstance(value, Tensor) and value.is_meta:
                yield place, own, value


def _named_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def draw_values(construction: Construction, tensors: list[Tensor], stream: str) -> list[Tensor]:
    """Returns initial values of recorded tensors, random ones from the stream called `stream` ("SEED/MODULE")."""
    digest = hashlib.sha256(stream.encode()).digest()
    with torch.random.fork_rng(devices=[]):
        torch.random.default_generator.manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        return construction.values(tensors)


def _check_initialized(fqn: str, value: Tensor) -> None:
    if value.is_floating_point() and bool(value.isnan().any()):
        raise UnsupportedError(
            f"{fqn} cannot be initialised",
            why="neither the model's constructor nor its _init_weights gives it a value, and it is in no checkpoint",
            fix="build the model on the CPU and pass it to shardwise.parallelize, or load a complete checkpoint",
        )


@dataclass(frozen=True, kw_only=True)
class Allowed:
    """Allowed differences between a checkpoint and the model."""

    missing: Sequence[str] = ()  # patterns of parameters that are initialized if the checkpoint lacks them
    unused: Sequence[str] = ()  # patterns of the checkpoint's tensors of layers that the model does not have
    mismatched: Sequence[str] = ()  # patterns of parameters that are initialized if their shape is another

    @classmethod
    def pop(cls, options: dict[str, Any]) -> "Allowed":
        """Takes these options out of the options of `load`: lists of patterns, or True for all names."""
        names = ("allow_missing", "allow_unused", "ignore_mismatched_sizes")
        given = (options.pop(name, None) or () for name in names)
        lists = (("**",) if each is True else (each,) if isinstance(each, str) else each for each in given)
        missing, unused, mismatched = lists
        return cls(missing=missing, unused=unused, mismatched=mismatched)


def _check_coverage(
    model: PreTrainedModel, resolution: Resolution, names: Set[str], location: str, allowed: Allowed, *, is_guess: bool
) -> None:
    """Raises one error that lists all tensors that do not fit the model. Logs what `allowed` permits.

    Buffers that the checkpoint lacks keep the model's values. Extra tensors of the checkpoint are only logged, as in
    transformers, unless they belong to a layer that the model does not have, or the class is a guess.
    """
    _check_scales(resolution, location)
    parameters = {name: value.dtype for name, value in model.named_parameters(remove_duplicate=False)}
    failed, modules = resolution.conversion_errors, dict(model.named_modules())
    missing = [name for name in resolution.missing if name in parameters and name not in failed]
    beyond = [
        name
        for name in resolution.unexpected
        if is_guess or _is_beyond(modules, name) or _is_beyond(modules, f"{model.base_model_prefix}.{name}")
    ]
    strange = {
        fqn: f"{fqn}: {lazy.dtype} in the checkpoint, {parameters[fqn]} in the model"
        for fqn, lazy in resolution.tensors.items()
        if fqn in parameters and lazy.dtype.is_floating_point != parameters[fqn].is_floating_point
    }
    other_shapes = [
        f"{fqn}: {list(stored)} in the checkpoint, {list(wanted)} in the model"
        for fqn, (stored, wanted) in resolution.mismatched.items()
        if not _fits(fqn, allowed.mismatched)
    ]
    faults = [
        *_listed("not in the checkpoint", [name for name in missing if not _fits(name, allowed.missing)]),
        *_listed(
            f"{'in modules' if is_guess else 'of layers'} that the model does not have",
            [name for name in beyond if not _fits(name, allowed.unused)],
        ),
        *_listed("of another kind", strange.values()),
        *_listed("of another shape", other_shapes),
        *_listed("not to be converted", [f"{fqn}: {text.strip().splitlines()[-1]}" for fqn, text in failed.items()]),
    ]
    if faults:
        num_fitting = len((names & resolution.tensors.keys()) - strange.keys())
        raise LoadError(
            f"{num_fitting} of {len(names)} tensors fit {type(model).__name__}",
            at=location,
            why="\n".join([*faults, *_listed("others of the checkpoint", resolution.unexpected - set(beyond))]),
            fix="load with the config and the class that the checkpoint was made with (auto_class=, or architectures\n"
            "in its config.json); allow_missing, allow_unused (model.allow_missing in the file of a run) and\n"
            "ignore_mismatched_sizes say what may differ",
        )
    for what, unfit in (
        ("in the checkpoint but not in the model, and not used", resolution.unexpected),
        ("not in the checkpoint and newly initialised", resolution.missing),
        ("of another shape in the checkpoint and newly initialised", resolution.mismatched),
    ):
        for line in _listed(what, unfit):
            logger.warning("%s from %s: %s", type(model).__name__, location, line)


def _check_scales(resolution: Resolution, location: str) -> None:
    """Raises `UnsupportedError` if float8 weights have scales beside them, without which their values are wrong."""
    scales = [name for name in resolution.unexpected if "scale" in name.rpartition(".")[2]]
    narrow = [fqn for fqn, lazy in resolution.tensors.items() if str(lazy.dtype).startswith("torch.float8")]
    if scales and narrow:
        raise UnsupportedError(
            f"a quantized checkpoint ({len(narrow)} float8 tensors, with scales)",
            at=location,
            why=f"{narrow[0]} has to be multiplied by a scale such as {scales[0]}, and the config does not say how",
            fix="load the checkpoint it was quantized from",
        )


def _listed(what: str, names: Iterable[str]) -> Iterator[str]:
    """Yields one line about `names`; names that differ only in a number are merged. Yields nothing for no names."""
    groups: dict[str, list[str]] = {}
    for name in sorted(names):
        groups.setdefault(star_numbers(name), []).append(name)
    shown = [f"{starred} ({len(alike)})" if len(alike) > 1 else alike[0] for starred, alike in groups.items()]
    if shown:
        yield f"{sum(map(len, groups.values()))} {what}: {listed(shown, 8)}"


def _is_beyond(modules: Mapping[str, nn.Module], name: str) -> bool:
    """Returns whether `name` has an index beyond the end of a module list of the model."""
    for owner, item in ((modules.get(parent_of(each)), each.rpartition(".")[2]) for each in upwards(name)):
        if isinstance(owner, nn.ModuleList) and item.isdigit() and int(item) >= len(owner):
            return True
    return False


def _fits(name: str, patterns: Sequence[str]) -> bool:
    """Returns whether a pattern matches `name` or a module that contains it."""
    return any(match(f"{pattern}.**", name) for pattern in patterns)


logger = logging.getLogger("shardwise.load")


def find_weights(
    model: PreTrainedModel,
    index: CheckpointIndex,
    *,
    allowed: Allowed,
    is_guess: bool = False,
    key_mapping: Mapping[str, str] | None = None,
) -> Resolution:
    """Matches the checkpoint's tensors to each parameter and persistent buffer of `model`, which is not split yet.

    Args:
        is_guess: whether neither the user nor the checkpoint names the model's class.
        key_mapping: see `from_pretrained`: patterns of checkpoint keys to their replacements.
    """
    state = state_tensors(model)
    resolution = _resolve(model, index, {fqn: tuple(value.shape) for fqn, value in state.items()}, key_mapping)
    names = set({id(value): fqn for fqn, value in state.items()}.values())  # one of each tied tensor
    _check_coverage(model, resolution, names, index.location, allowed, is_guess=is_guess)
    return resolution


def load_weights(
    model: PreTrainedModel, registry: Registry, resolution: Resolution, *, dtype: torch.dtype | None
) -> None:
    """Fills the parameters and persistent buffers that the checkpoint has; others stay meta. Communicates nothing.

    Args:
        resolution: result of `find_weights` before the model was split.
        dtype: dtype of floating-point parameters; None keeps the checkpoint's.
    """
    kept = model._get_dtype_plan(dtype) if dtype is not None else {}
    wanted = [fqn for fqn in resolution.tensors if fqn not in registry.tied and registry.holds(fqn)]
    silent = registry.mesh.rank != 0 or len(wanted) < 1000
    for fqn in tqdm(wanted, desc="Loading weights", disable=silent):
        lazy = resolution.tensors[fqn]
        own = registry.frozen.get(fqn) or _dtype_of(fqn, lazy.dtype, dtype, kept)
        put_tensor(model, registry, fqn, read_part(fqn, lazy, registry, own))
    _check_ties(resolution, registry)


def _resolve(
    model: PreTrainedModel,
    index: CheckpointIndex,
    shapes: Mapping[str, tuple[int, ...]],
    key_mapping: Mapping[str, str] | None,
) -> Resolution:
    """Matches the checkpoint's tensors to the model, without a common prefix of all keys if that matches more.

    DistributedDataParallel, torch.compile and Lightning save names with such a prefix.
    """
    found = resolve_keys(model, index, shapes, key_mapping=key_mapping)
    # Names sort by their beginnings, so what the first and the last have in common is common to all.
    ends = zip(*(end.split(".")[:-1] for end in (min(index, default=""), max(index, default=""))), strict=False)
    prefix = "".join(f"{first}." for first, _ in itertools.takewhile(lambda pair: pair[0] == pair[1], ends))
    if not found.missing or not prefix:
        return found
    used = model._weight_conversions  # the model remembers those of the last resolution
    stripped = resolve_keys(model, index, shapes, key_mapping=key_mapping, prefix=prefix)
    if len(stripped.tensors) <= len(found.tensors):
        model._weight_conversions = used
        return found
    logger.warning("%s: all names begin with %r, which is left out", index.location, prefix)
    return stripped


def read_part(fqn: str, lazy: LazyTensor, registry: Registry, dtype: torch.dtype) -> Tensor:
    """Reads this rank's part of a stored tensor to the device of `fqn`."""
    entry, device, coords = registry.entries.get(fqn), registry.device_of(fqn), registry.mesh.coords
    layout = Layout(tuple(lazy.shape)) if entry is None else entry.layout
    pieces, shape = layout.pieces(coords), layout.local_shape(coords)
    if entry is not None and entry.data is not DataHandling.FSDP and device.type == "cpu" and dtype == lazy.dtype:
        mapped = lazy.map_local(pieces, shape)
        if mapped is not None:
            return mapped
    return lazy.read_local(pieces, shape, dtype=dtype, device=device)


def _dtype_of(
    fqn: str, stored: torch.dtype, wanted: torch.dtype | None, kept: Mapping[str, torch.dtype]
) -> torch.dtype:
    """Dtype in which a tensor is loaded: the requested one, unless the model keeps this tensor in float32."""
    if wanted is None or not stored.is_floating_point:
        return stored
    return next((dtype for pattern, dtype in kept.items() if re.search(pattern.replace("*", ".*"), fqn)), wanted)


def _check_ties(resolution: Resolution, registry: Registry) -> None:
    """Raises if tied names differ in a checkpoint that has both. Each rank compares its part."""
    for alias, other in resolution.duplicates.items():
        canonical = registry.tied.get(alias, registry.tied.get(other))
        entry = registry.entries.get(canonical or "")
        if entry is None or not entry.is_held:
            continue
        coords = registry.mesh.coords
        parts = [
            resolution.tensors[name].read_local(entry.layout.pieces(coords), entry.layout.local_shape(coords))
            for name in (alias, other)
        ]
        if not torch.equal(*parts):
            raise LoadError(
                f"{alias} and {other} differ in the checkpoint, but the model ties them",
                why="loading either would change what the model computes",
                fix="load with tie_word_embeddings=False",
            )
