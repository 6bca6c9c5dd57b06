"""Opens weights in the format that a directory holds, recognized by its files."""

import os
from pathlib import Path
from typing import Any

from shardwise.errors import LoadError
from shardwise.weights import dcp, kinds
from shardwise.weights.index import CheckpointIndex


def config_place(source: str | os.PathLike[str]) -> str | os.PathLike[str]:
    """Place of the model's config: `source`, or beside or inside another system's checkpoint."""
    path = Path(source)
    if not path.is_dir() or kinds.kind_of(path) not in kinds.CONVERTIBLE:
        return source
    places = (path, path / ".hf_metadata", path / "model", path / "model" / ".hf_metadata", path.parent)
    return next((each for each in places if (each / "config.json").is_file()), source)


def open_weights(path_or_hub_id: str | os.PathLike[str], **options: Any) -> CheckpointIndex:
    """Opens the weights of a directory or hub id: Hugging Face safetensors, DCP, or transformers' distributed format.

    `options` are `HUB_OPTIONS`.

    Raises:
        LoadError: nothing is there, it is damaged, its parts leave a gap, or it must be converted first.
        UnsupportedError: a file is compressed.
    """
    directory = Path(path_or_hub_id) / (options.get("subfolder") or "")
    is_plain = any(directory.glob("model*.safetensors*")) if directory.is_dir() else True
    kind = None if is_plain else kinds.kind_of(directory)
    match kind:
        case kinds.NXD | kinds.OPTIMUM_NEURON:
            raise LoadError(f"{os.fspath(path_or_hub_id)!r} has to be converted", **kinds.describe_kind(directory))
        case kinds.SHARDED_SAFETENSORS:
            return dcp.open_sharded_safetensors(directory)
        case kinds.DCP:
            return dcp.open_dcp(directory if (directory / ".metadata").exists() else directory / "model")
    return CheckpointIndex.open(path_or_hub_id, **options)
