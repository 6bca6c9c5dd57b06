"""Loads weights: each rank reads exactly its parts of a Hugging Face checkpoint into a split meta model."""

from __future__ import annotations

import itertools
import logging
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils.logging import tqdm

from shardwise.errors import LoadError, UnsupportedError
from shardwise.parallel.materialize import put_tensor
from shardwise.parameters.canonical import state_tensors
from shardwise.parameters.registry import DataHandling, Registry
from shardwise.plan.match import match, star_numbers
from shardwise.plan.structure import parent_of, upwards
from shardwise.sharding.layout import Layout
from shardwise.weights.conversion import Resolution, resolve_keys
from shardwise.weights.index import CheckpointIndex
from shardwise.weights.lazy import LazyTensor

MOST_NAMES = 8


@dataclass(frozen=True, kw_only=True)
class Allowed:
    """Allowed differences between a checkpoint and the model.

    Attributes:
        missing: patterns of parameters that are initialized if the checkpoint lacks them.
        unused: patterns of the checkpoint's tensors that may belong to layers the model does not have.
        mismatched: whether parameters with another shape in the checkpoint are initialized.
    """

    missing: Sequence[str] = ()
    unused: Sequence[str] = ()
    mismatched: bool = False

    @classmethod
    def pop(cls, options: dict[str, Any]) -> Allowed:
        """Takes these options out of the options of `load`: lists of patterns, or True for all names."""
        missing, unused = (options.pop(name, None) or () for name in ("allow_missing", "allow_unused"))
        return cls(
            missing=("**",) if missing is True else missing,
            unused=("**",) if unused is True else unused,
            mismatched=bool(options.pop("ignore_mismatched_sizes", False)),
        )


def check_coverage(
    model: PreTrainedModel,
    resolution: Resolution,
    *,
    names: Iterable[str],
    location: str,
    allowed: Allowed,
    is_guess: bool = False,
) -> None:
    """Raises one error that lists all tensors of the model that the checkpoint lacks. Logs what `allowed` permits.

    Buffers that the checkpoint lacks keep the model's values. Extra tensors of the checkpoint are only logged, as in
    transformers, unless they belong to a layer that the model does not have, or the class is a guess.

    Args:
        names: every name in the model's state; each tied tensor once.
        is_guess: whether neither the user nor the checkpoint names the model's class.
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
    ]
    faults = [
        *_listed("not in the checkpoint", [name for name in missing if not _fits(name, allowed.missing)]),
        *_listed(
            f"{'in modules' if is_guess else 'of layers'} that the model does not have",
            [name for name in beyond if not _fits(name, allowed.unused)],
        ),
        *_listed("of another kind", strange.values()),
        *([] if allowed.mismatched else _listed("of another shape", other_shapes)),
        *_listed("not to be converted", [f"{fqn}: {text.strip().splitlines()[-1]}" for fqn, text in failed.items()]),
    ]
    if faults:
        wanted = set(names)
        num_fitting = len((wanted & resolution.tensors.keys()) - strange.keys())
        raise LoadError(
            f"{num_fitting} of {len(wanted)} tensors fit {type(model).__name__}",
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
        rest = f" and {len(shown) - MOST_NAMES} more" if len(shown) > MOST_NAMES else ""
        yield f"{sum(map(len, groups.values()))} {what}: {', '.join(shown[:MOST_NAMES])}{rest}"


def _is_beyond(modules: Mapping[str, nn.Module], name: str) -> bool:
    """Whether `name` has an index beyond the end of a module list of the model."""
    places = ((modules.get(parent_of(each)), each.rpartition(".")[2]) for each in upwards(name))
    return any(
        isinstance(owner, nn.ModuleList) and item.isdigit() and int(item) >= len(owner) for owner, item in places
    )


def _fits(name: str, patterns: Sequence[str]) -> bool:
    """Whether a pattern matches `name` or a module that contains it."""
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
        allowed: allowed differences between the checkpoint and the model.
        is_guess: whether neither the user nor the checkpoint names the model's class.
        key_mapping: see `from_pretrained`: patterns of checkpoint keys to their replacements.
    """
    state = state_tensors(model)
    resolution = _resolve(model, index, {fqn: tuple(value.shape) for fqn, value in state.items()}, key_mapping)
    names = {id(value): fqn for fqn, value in state.items()}.values()  # one of each tied tensor
    check_coverage(model, resolution, names=names, location=index.location, allowed=allowed, is_guess=is_guess)
    return resolution


def load_weights(
    model: PreTrainedModel,
    registry: Registry,
    index: CheckpointIndex,
    resolution: Resolution,
    *,
    dtype: torch.dtype | None,
) -> None:
    """Fills the parameters and persistent buffers that the checkpoint has; others stay on the meta device.

    Args:
        resolution: result of `find_weights` before the model was split.
        dtype: dtype of floating-point parameters; None keeps the checkpoint's.

    Communicates: nothing.
    """
    kept = model._get_dtype_plan(dtype) if dtype is not None else {}
    wanted = [fqn for fqn in resolution.tensors if fqn not in registry.tied and registry.holds(fqn)]
    silent = registry.mesh.rank != 0 or len(wanted) < 1000
    sums: dict[str, tuple[Tensor, Tensor]] = {}
    for fqn in tqdm(wanted, desc="Loading weights", disable=silent):
        lazy = resolution.tensors[fqn]
        own = registry.frozen.get(fqn) or _dtype_of(fqn, lazy.dtype, dtype, kept)
        value = _read(fqn, lazy, registry, own)
        if value.is_floating_point():
            sums[fqn] = value, (value if value.dtype.itemsize > 1 else value.float()).sum()
        put_tensor(model, registry, fqn, value)
    _check_numbers(sums, index)
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


def _check_numbers(sums: Mapping[str, tuple[Tensor, Tensor]], index: CheckpointIndex) -> None:
    """Raises if a tensor contains NaN. A sum is NaN if an element is, or if there are infinities of both signs."""
    broken = [fqn for fqn, (value, total) in sums.items() if math.isnan(float(total)) and bool(value.isnan().any())]
    if broken:
        raise LoadError(
            f"{len(broken)} of {len(sums)} tensors hold NaN",
            at=index.location,
            why=", ".join(broken[:5]),
            fix="take a checkpoint from before training diverged",
        )


def _read(fqn: str, lazy: LazyTensor, registry: Registry, dtype: torch.dtype) -> Tensor:
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
