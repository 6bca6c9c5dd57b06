"""Weights in the formats of torch.distributed.checkpoint (DCP): its own, and safetensors with shard positions.

# [Note: a pickle that cannot run anything]
DCP stores its metadata as a pickle. A restricted unpickler allows only the dataclasses of that metadata, so the result
is data. torch reads the tensors' files with `weights_only=True`.
"""

import functools
import io
import json
import pickle
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.checkpoint import filesystem, metadata

from shardwise.errors import LoadError, UnsupportedError
from shardwise.sharding.boxes import Box
from shardwise.weights.chunks import Chunk, ChunkedIndex, ChunkedTensor

_KNOWN: dict[tuple[str, str], Any] = {
    **{
        (metadata.__name__, name): getattr(metadata, name)
        for name in (
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "Metadata",
            "MetadataIndex",
            "StorageMeta",
            "TensorProperties",
            "TensorStorageMetadata",
            "_MEM_FORMAT_ENCODING",
        )
    },
    (filesystem.__name__, "_StorageInfo"): filesystem._StorageInfo,
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): torch.serialization._get_layout,
    ("collections", "OrderedDict"): dict,
    **{("pathlib", name): lambda *parts: "/".join(map(str, parts)) for name in ("PosixPath", "Path", "WindowsPath")},
    **{("torch", name): value for name, value in vars(torch).items() if isinstance(value, torch.dtype)},
}
_SHARDING = "DCP_SHARDING_INFO"
_SUFFIX = ".safetensors"


class _Unpickler(pickle.Unpickler):
    """See [Note: a pickle that cannot run anything]."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _KNOWN:
            raise pickle.UnpicklingError(f"it names {module}.{name}, and only DCP's own classes are admitted")
        return _KNOWN[module, name]


def open_dcp(directory: Path) -> ChunkedIndex:
    """Opens the model's tensors in a DCP directory: those under "model" (or "state_dict") if it holds more than a
    model.

    Raises:
        LoadError: the metadata is damaged, names a class that DCP does not have, or points outside of the directory.
        UnsupportedError: its files are compressed.
    """
    path = directory / ".metadata"
    try:
        found = _Unpickler(io.BytesIO(path.read_bytes())).load()
        tensors, places = dict(found.state_dict_metadata), dict(found.storage_data)
        names = _model_names(tensors, found.planner_data)
        chunked = {name: _chunked(key, tensors[key], places, directory) for key, name in names.items()}
    except UnsupportedError:
        raise
    except Exception as error:  # a damaged pickle fails in any way
        raise LoadError(f"{path.name} cannot be read", at=str(path), why=str(error)[:300]) from error
    return ChunkedIndex(chunked, str(directory))


def _model_names(tensors: Mapping[str, Any], planner_data: Any) -> dict[str, str]:
    """The model's tensors: key to name, by the nesting of the saved dictionary."""
    held = [key for key, each in tensors.items() if isinstance(each, metadata.TensorStorageMetadata)]
    paths = {key: tuple((planner_data or {}).get(key, (key,))) for key in held}
    for place in (("model",), ("state_dict",), ("app", "model"), ("state", "model")):
        inner = {key: path[len(place) :] for key, path in paths.items() if path[: len(place)] == place}
        if inner and all(inner.values()):
            return {key: ".".join(map(str, path)) for key, path in inner.items()}
    return {key: key for key in held}


def _chunked(key: str, tensor: Any, places: Mapping[Any, Any], directory: Path) -> ChunkedTensor:
    chunks = []
    for chunk in tensor.chunks:
        place = places[metadata.MetadataIndex(key, chunk.offsets)]
        path = directory / place.relative_path
        if Path(place.relative_path).name != place.relative_path:
            raise LoadError(f"it leads out of its directory: {place.relative_path}")
        if getattr(place, "transform_descriptors", None):
            raise UnsupportedError(f"{path.name} is written with {place.transform_descriptors}", at=str(path))
        read = functools.partial(_read_slice, key, path, int(place.offset), int(place.length))
        chunks.append(Chunk(_box(chunk.offsets, chunk.sizes), path, read))
    return ChunkedTensor(tensor.properties.dtype, tuple(tensor.size), chunks)


def _read_slice(key: str, path: Path, offset: int, length: int) -> Tensor:
    try:
        with path.open("rb") as file:
            file.seek(offset)
            content = file.read(length)
        found: Tensor = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except Exception as error:  # torch's reader fails in many ways
        raise LoadError(f"{key} cannot be read from {path.name}", at=str(path), why=str(error)[:300]) from error
    return found


def open_sharded_safetensors(directory: Path) -> ChunkedIndex:
    """Opens safetensors files whose headers give the box of each tensor, as DCP writes them for transformers.

    Raises:
        LoadError: a file is damaged, or the boxes do not fit.
    """
    dtypes: dict[str, torch.dtype] = {}
    chunks: dict[str, list[Chunk]] = {}
    for path in sorted(directory.glob(f"*{_SUFFIX}")):
        try:
            file: Any = safe_open(path, framework="pt")
            places = json.loads((file.metadata() or {}).get(_SHARDING, "{}"))
            for key in file.keys():  # noqa: SIM118 - it is no mapping
                tensor = file.get_tensor(key)
                start = places.get(key, {}).get("saved_offsets", [0] * tensor.ndim)
                dtypes[key] = tensor.dtype
                chunks.setdefault(key, []).append(Chunk.of(tensor, _box(start, tensor.shape), path))
        except (SafetensorError, OSError, ValueError) as error:
            raise LoadError(f"{path.name} is not a usable safetensors file", at=str(path), why=str(error)) from error
    tensors = {}
    for key, found in chunks.items():
        stops = zip(*([stop for _, stop in chunk.box] for chunk in found), strict=True)
        tensors[key] = ChunkedTensor(dtypes[key], tuple(map(max, stops)), found)
    return ChunkedIndex(tensors, str(directory))


def _box(offsets: Iterable[int], sizes: Iterable[int]) -> Box:
    return tuple((int(start), int(start) + int(size)) for start, size in zip(offsets, sizes, strict=True))
