"""Weights in whatever format a directory holds them, found by its files."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from shardwise.weights import dcp, kinds, neuron_files
from shardwise.weights.index import CheckpointIndex

__all__ = ["config_place", "open_weights"]


def config_place(source: str | os.PathLike[str]) -> str | os.PathLike[str]:
    """Where the model's config is: `source`, or beside or inside of a checkpoint of others, where they keep it."""
    path = Path(source)
    if not path.is_dir() or kinds.kind_of(path) not in kinds.CONVERTIBLE:
        return source
    places = (path, path / ".hf_metadata", path / "model", path / "model" / ".hf_metadata", path.parent)
    return next((each for each in places if (each / "config.json").is_file()), source)


def open_weights(
    path_or_hub_id: str | os.PathLike[str], *, layouts: neuron_files.Layouts | None = None, **options: Any
) -> CheckpointIndex:
    """Opens the weights of a directory or a hub id: safetensors of Hugging Face, or a checkpoint of
    torch.distributed.checkpoint, transformers' distributed one, Optimum Neuron or NxD. `options` are `HUB_OPTIONS`.

    Args:
        layouts: of the model's parameters, asked for where files do not say how ranks have divided them.

    Raises:
        LoadError: nothing there, or it is damaged, or its parts leave a gap.
        UnsupportedError: the files do not say what would have to be known.
    """
    directory = Path(path_or_hub_id) / (options.get("subfolder") or "")
    is_plain = any(directory.glob("model*.safetensors*")) if directory.is_dir() else True
    kind = None if is_plain else kinds.kind_of(directory)
    match kind:
        case kinds.NXD:
            return neuron_files.open_nxd(directory, layouts)
        case kinds.OPTIMUM_NEURON:
            return neuron_files.open_optimum_neuron(directory)
        case kinds.SHARDED_SAFETENSORS:
            return dcp.open_sharded_safetensors(directory)
        case kinds.DCP:
            return dcp.open_dcp(directory if (directory / ".metadata").exists() else directory / "model")
    return CheckpointIndex.open(path_or_hub_id, **options)
