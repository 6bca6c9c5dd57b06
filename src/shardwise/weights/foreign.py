"""Weights in the formats of torch.distributed.checkpoint (DCP): its own, and safetensors with shard positions.

# [Note: a pickle that cannot run anything]
DCP stores its metadata as a pickle. A restricted unpickler allows only the dataclasses of that metadata, so the result
is data. torch reads the tensors' files with `weights_only=True`.
"""

import functools
import io
import json
import os
import pickle
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.checkpoint import filesystem, metadata

from shardwise.errors import LoadError, UnsupportedError, as_error
from shardwise.sharding.boxes import Box, find_overlap, full_box, intersect, move, shape_of, slices, volume
from shardwise.weights import locate
from shardwise.weights.index import CheckpointIndex, TensorEntry
from shardwise.weights.nodes import StoredTensor


@dataclass(frozen=True)
class Chunk:
    """A box of a tensor that another system stored at `path`; `read` returns its elements."""

    box: Box
    path: Path
    read: Callable[[], Tensor]

    @classmethod
    def of(cls, value: Tensor, box: Box, path: Path) -> "Chunk":
        """Returns a chunk whose elements are memory-mapped or in memory."""
        return cls(box, path, lambda: value)


@dataclass(frozen=True)
class ChunkedTensor:
    """A tensor in chunks that together hold each element once."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: Sequence[Chunk]


class ChunkedIndex(CheckpointIndex):
    """Tensors by key of another system's checkpoint, stored in chunks. Reads only the chunks that a box overlaps."""

    def __init__(self, tensors: Mapping[str, ChunkedTensor], location: str) -> None:
        super().__init__({}, location, {})
        self._tensors = {key: _checked(key, each, location) for key, each in tensors.items()}
        self._entries = {
            key: TensorEntry(each.chunks[0].path if each.chunks else Path(location), each.dtype, each.shape)
            for key, each in self._tensors.items()
        }

    def node(self, key: str) -> StoredTensor:
        """Returns a lazy tensor of `key`, read box by box."""
        entry = self[key]
        return _Chunked(self, key, entry.shape, entry.dtype, self._tensors[key].chunks)

    def _to_sample(self) -> set[str]:
        """Two keys: a chunk may have to be read whole."""
        sizes = {key: volume(each.chunks[0].box) for key, each in self._tensors.items() if each.chunks}
        held = sorted(sizes, key=sizes.__getitem__)
        return {held[0], held[len(held) // 2]} if held else set()

    def _mapped_part(self, key: str) -> Tensor:
        return _read(self._tensors[key].chunks[0], key)

    def map_tensor(self, key: str) -> Tensor:
        """Returns the tensor of `key`, in memory."""
        full = torch.empty(self[key].shape, dtype=self[key].dtype)
        self.node(key).fill(full_box(full.shape), full)
        return full


@dataclass(eq=False)
class _Chunked(StoredTensor):
    chunks: Sequence[Chunk]

    def fill(self, box: Box, out: Tensor) -> None:
        origin = full_box(shape_of(box))
        for chunk in self.chunks:
            both = intersect(box, chunk.box)
            if both is None:
                continue
            within = move(both, chunk.box, full_box(shape_of(chunk.box)))
            part = _read(chunk, self.key)[slices(within)]
            out[slices(move(both, box, origin))] = part.to(out.device)
            self.store.count(part.nbytes)


def _read(chunk: Chunk, key: str) -> Tensor:
    found = chunk.read()
    if tuple(found.shape) != shape_of(chunk.box):
        what = f"a part of {key} has shape {list(found.shape)}, not {list(shape_of(chunk.box))}"
        raise LoadError(what, at=str(chunk.path), fix="copy the files again")
    return found


def _checked(key: str, tensor: ChunkedTensor, location: str) -> ChunkedTensor:
    """Returns `tensor` without duplicate chunks: several ranks may have written the same one."""
    chunks = list({chunk.box: chunk for chunk in tensor.chunks}.values())
    full = full_box(tensor.shape)
    boxes = [chunk.box for chunk in chunks if volume(chunk.box)]
    is_inside = all(len(box) == len(full) and intersect(box, full) == box for box in boxes)
    overlap = find_overlap(boxes) if is_inside else None
    held = sum(map(volume, boxes))
    if not is_inside or overlap is not None or held != volume(full):
        raise LoadError(
            f"{key} is not complete: its {len(chunks)} parts hold {held:,} of {volume(full):,} elements",
            at=location,
            why="some parts are missing, or were not written" if overlap is None else f"parts overlap: {overlap}",
            fix="copy the files again; DCP's safetensors writer loses parts of tensors stored in several boxes",
        )
    return ChunkedTensor(tensor.dtype, tensor.shape, chunks)


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
    """Opens the model's tensors in a DCP directory: those under "model" (or "state_dict") if it holds more."""
    path = directory / ".metadata"
    with as_error(
        LoadError, f"{path.name} cannot be read", at=str(path), limit=300
    ):  # a damaged pickle fails in any way
        found = _Unpickler(io.BytesIO(path.read_bytes())).load()
        tensors, places = dict(found.state_dict_metadata), dict(found.storage_data)
        names = _model_names(tensors, found.planner_data)
        chunked = {name: _chunked(key, tensors[key], places, directory) for key, name in names.items()}
    return ChunkedIndex(chunked, str(directory))


def _model_names(tensors: Mapping[str, Any], planner_data: Any) -> dict[str, str]:
    """Returns the model's tensors: key to name, by the nesting of the saved dictionary."""
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
            raise LoadError(f".metadata leads out of its directory: {place.relative_path}", at=str(directory))
        if getattr(place, "transform_descriptors", None):
            raise UnsupportedError(f"{path.name} is written with {place.transform_descriptors}", at=str(path))
        read = functools.partial(_read_slice, key, path, int(place.offset), int(place.length))
        chunks.append(Chunk(_box(chunk.offsets, chunk.sizes), path, read))
    return ChunkedTensor(tensor.properties.dtype, tuple(tensor.size), chunks)


def _read_slice(key: str, path: Path, offset: int, length: int) -> Tensor:
    with as_error(LoadError, f"{key} cannot be read from {path.name}", at=str(path), limit=300):
        with path.open("rb") as file:
            file.seek(offset)
            content = file.read(length)
        found: Tensor = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    return found


def open_sharded_safetensors(directory: Path) -> ChunkedIndex:
    """Opens safetensors files whose headers give the box of each tensor, as DCP writes them for transformers."""
    dtypes: dict[str, torch.dtype] = {}
    chunks: dict[str, list[Chunk]] = {}
    for path in sorted(directory.glob(f"*{_SUFFIX}")):
        what = f"{path.name} is not a usable safetensors file"
        with as_error(LoadError, what, SafetensorError, OSError, ValueError, at=str(path)):
            file: Any = safe_open(path, framework="pt")
            places = json.loads((file.metadata() or {}).get(_SHARDING, "{}"))
            for key in file.keys():  # noqa: SIM118 - it is no mapping
                tensor = file.get_tensor(key)
                start = places.get(key, {}).get("saved_offsets", [0] * tensor.ndim)
                dtypes[key] = tensor.dtype
                chunks.setdefault(key, []).append(Chunk.of(tensor, _box(start, tensor.shape), path))
    tensors = {}
    for key, found in chunks.items():
        stops = zip(*([stop for _, stop in chunk.box] for chunk in found), strict=True)
        tensors[key] = ChunkedTensor(dtypes[key], tuple(map(max, stops)), found)
    return ChunkedIndex(tensors, str(directory))


def _box(offsets: Iterable[int], sizes: Iterable[int]) -> Box:
    return tuple((int(start), int(start) + int(size)) for start, size in zip(offsets, sizes, strict=True))


def config_place(source: str | os.PathLike[str]) -> str | os.PathLike[str]:
    """Returns the place of the model's config: `source`, or beside or inside another system's checkpoint."""
    path = Path(source)
    if not path.is_dir() or locate.kind_of(path) not in locate.CONVERTIBLE:
        return source
    places = (path, path / ".hf_metadata", path / "model", path / "model" / ".hf_metadata", path.parent)
    return next((each for each in places if (each / "config.json").is_file()), source)


def open_weights(path_or_hub_id: str | os.PathLike[str], **options: Any) -> CheckpointIndex:
    """Opens weights by directory or hub id: safetensors, DCP or transformers' distributed. `options`: `HUB_OPTIONS`."""
    directory = Path(path_or_hub_id) / (options.get("subfolder") or "")
    is_plain = any(directory.glob("model*.safetensors*")) if directory.is_dir() else True
    kind = None if is_plain else locate.kind_of(directory)
    match kind:
        case locate.NXD | locate.OPTIMUM_NEURON:
            raise LoadError(f"{os.fspath(path_or_hub_id)!r} has to be converted", **locate.describe_kind(directory))
        case locate.SHARDED_SAFETENSORS:
            return open_sharded_safetensors(directory)
        case locate.DCP:
            places = (directory, directory / "model", directory / "pytorch_model_fsdp_0")
            return open_dcp(next(each for each in places if (each / ".metadata").exists()))
    return CheckpointIndex.open(path_or_hub_id, **options)
