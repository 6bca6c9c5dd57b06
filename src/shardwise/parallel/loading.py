"""Loads weights: each rank reads exactly its parts of a Hugging Face checkpoint into a split meta model."""

import itertools
import logging
import math
import re
from collections.abc import Mapping

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils.logging import tqdm

from shardwise.errors import LoadError
from shardwise.parallel.coverage import Allowed, check_coverage
from shardwise.parallel.materialize import put_tensor
from shardwise.parameters.canonical import state_tensors
from shardwise.parameters.registry import DataHandling, Registry
from shardwise.sharding.layout import Layout
from shardwise.weights.conversion import Resolution, resolve_keys
from shardwise.weights.index import CheckpointIndex
from shardwise.weights.lazy import LazyTensor

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

    Raises:
        LoadError: the checkpoint does not cover the model, or a conversion fails.
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

    Raises:
        LoadError: this rank's part of the checkpoint contains NaN, or tied tensors differ there.

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
