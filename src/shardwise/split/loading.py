"""Loading: each rank reads exactly the boxes it owns from a Hugging Face checkpoint into a split meta model."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils.logging import tqdm

from shardwise.errors import LoadError
from shardwise.layers.registry import Registry
from shardwise.layout.boxes import full_box
from shardwise.layout.tensor import Piece
from shardwise.split.materialize import put_tensor
from shardwise.weights.conversion import Resolution, resolve_keys
from shardwise.weights.index import CheckpointIndex
from shardwise.weights.lazy import LazyTensor
from shardwise.weights.read import adopt_local, read_local

__all__ = ["canonical_shapes", "load_weights"]

logger = logging.getLogger("shardwise.load")


def load_weights(
    model: PreTrainedModel,
    registry: Registry,
    index: CheckpointIndex,
    *,
    dtype: torch.dtype | None,
    ignore_mismatched_sizes: bool = False,
    key_mapping: Mapping[str, str] | None = None,
) -> Resolution:
    """Fills the parameters and persistent buffers that the checkpoint has; the others stay on the meta device.

    Args:
        dtype: of floating-point parameters; each keeps the checkpoint's where None.

    Raises:
        LoadError: a tensor has another shape than the model, or its conversion fails.

    Communicates: nothing.
    """
    resolution = resolve_keys(model, index, canonical_shapes(model, registry), key_mapping=key_mapping)
    _check_report(model, resolution, index, ignore_mismatched_sizes=ignore_mismatched_sizes)
    dtypes = _DtypePlan(model, dtype)
    wanted = [fqn for fqn in resolution.tensors if fqn not in registry.tied]
    silent = registry.mesh.rank != 0 or len(wanted) < 1000
    for fqn in tqdm(wanted, desc="Loading weights", disable=silent):
        lazy = resolution.tensors[fqn]
        put_tensor(model, registry, fqn, _read(fqn, lazy, registry, dtypes.of(fqn, lazy.dtype)))
    _check_ties(resolution, registry)
    return resolution


def canonical_shapes(model: nn.Module, registry: Registry) -> dict[str, tuple[int, ...]]:
    """FQN of every tensor of the model's state dict to its whole shape, tied names included."""
    shapes: dict[str, tuple[int, ...]] = {}
    for module_name, module in model.named_modules():
        for own, value in (*module._parameters.items(), *module._buffers.items()):
            if value is None or own in module._non_persistent_buffers_set:
                continue
            fqn = f"{module_name}.{own}" if module_name else own
            canonical = registry.tied.get(fqn, fqn)
            entry = registry.entries.get(canonical)
            shapes[fqn] = tuple(value.shape) if entry is None else entry.layout.shape
    return shapes


def _read(fqn: str, lazy: LazyTensor, registry: Registry, dtype: torch.dtype) -> Tensor:
    device = registry.home(fqn)
    entry = registry.entries.get(fqn)
    if entry is not None and entry.data != "managed" and device.type == "cpu" and dtype == lazy.dtype:
        coords = registry.mesh.coords
        adopted = adopt_local(lazy, entry.layout.pieces(coords), entry.layout.local_shape(coords))
        if adopted is not None:
            registry.mapped.add(fqn)
            return adopted
    if entry is None:
        box = full_box(tuple(lazy.shape))
        return read_local(lazy, (Piece(box, box),), tuple(lazy.shape), dtype=dtype, device=device)
    coords = registry.mesh.coords
    return read_local(lazy, entry.layout.pieces(coords), entry.layout.local_shape(coords), dtype=dtype, device=device)


class _DtypePlan:
    """The dtype each tensor is loaded in: the one asked for, except where the model keeps float32."""

    def __init__(self, model: PreTrainedModel, dtype: torch.dtype | None) -> None:
        self._dtype = dtype
        kept = model._get_dtype_plan(dtype) if dtype is not None else {}
        self._kept = [(re.compile(pattern.replace("*", ".*")), kept_dtype) for pattern, kept_dtype in kept.items()]

    def of(self, fqn: str, stored: torch.dtype) -> torch.dtype:
        if self._dtype is None or not stored.is_floating_point:
            return stored
        return next((dtype for pattern, dtype in self._kept if pattern.search(fqn)), self._dtype)


def _check_report(
    model: PreTrainedModel, resolution: Resolution, index: CheckpointIndex, *, ignore_mismatched_sizes: bool
) -> None:
    """Raises what makes the result wrong, and logs, once, what transformers reports too."""
    if resolution.conversion_errors:
        raise LoadError(
            f"{len(resolution.conversion_errors)} tensors cannot be converted to {type(model).__name__}'s format",
            at=index.location,
            why="\n".join(
                f"{fqn}: {text.strip().splitlines()[-1]}" for fqn, text in resolution.conversion_errors.items()
            ),
        )
    if resolution.mismatched and not ignore_mismatched_sizes:
        raise LoadError(
            f"{len(resolution.mismatched)} tensors have other shapes in the checkpoint than in {type(model).__name__}",
            at=index.location,
            why="\n".join(
                f"{fqn}: {list(stored)} in the checkpoint, {list(wanted)} in the model"
                for fqn, (stored, wanted) in sorted(resolution.mismatched.items())
            ),
            fix="load with the config the checkpoint was made with, or pass ignore_mismatched_sizes=True",
        )
    for what, names in (
        ("are in the checkpoint but not in the model, and are not used", resolution.unexpected),
        ("are not in the checkpoint and are newly initialised", resolution.missing),
        ("have another shape in the checkpoint and are newly initialised", frozenset(resolution.mismatched)),
    ):
        if names:
            logger.warning(
                "%s from %s: %d tensors %s: %s", type(model).__name__, index.location, len(names), what, _few(names)
            )


def _few(names: frozenset[str], most: int = 10) -> str:
    shown = ", ".join(sorted(names)[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"


def _check_ties(resolution: Resolution, registry: Registry) -> None:
    """Names that the model ties must hold the same values where a checkpoint has both; each rank compares its part."""
    for alias, other in resolution.duplicates.items():
        canonical = registry.tied.get(alias, registry.tied.get(other))
        entry = registry.entries.get(canonical or "")
        if entry is None:
            continue
        coords = registry.mesh.coords
        parts = [
            read_local(resolution.tensors[name], entry.layout.pieces(coords), entry.layout.local_shape(coords))
            for name in (alias, other)
        ]
        if not torch.equal(*parts):
            raise LoadError(
                f"{alias} and {other} differ in the checkpoint, but the model ties them",
                why="loading either would change what the model computes",
                fix="load with tie_word_embeddings=False",
            )
