"""`ChunkedIndex`: a checkpoint of another system whose tensors are stored in chunks, boxes of the full tensor.

It has the interface of `CheckpointIndex`, and reads only the chunks that a box overlaps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from shardwise.errors import LoadError
from shardwise.sharding.boxes import Box, find_overlap, full_box, intersect, move, shape_of, slices, volume
from shardwise.weights.index import CheckpointIndex, TensorEntry
from shardwise.weights.nodes import StoredTensor


@dataclass(frozen=True)
class Chunk:
    """Elements `box` of a tensor, which `read` returns from `path`."""

    box: Box
    path: Path
    read: Callable[[], Tensor]

    @classmethod
    def of(cls, value: Tensor, box: Box, path: Path) -> Chunk:
        """A chunk whose elements are memory-mapped or in memory."""
        return cls(box, path, lambda: value)


@dataclass(frozen=True)
class ChunkedTensor:
    """A tensor in chunks that together hold each element once."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: Sequence[Chunk]


class ChunkedIndex(CheckpointIndex):
    """The tensors of a checkpoint by key.

    Raises:
        LoadError: chunks of a tensor leave a gap, overlap, or reach out of it.
    """

    def __init__(self, tensors: Mapping[str, ChunkedTensor], location: str) -> None:
        super().__init__({}, location, {})
        self._tensors = {key: _checked(key, each, location) for key, each in tensors.items()}
        self._entries = {
            key: TensorEntry(each.chunks[0].path if each.chunks else Path(location), each.dtype, each.shape)
            for key, each in self._tensors.items()
        }

    def node(self, key: str) -> StoredTensor:
        """Lazy tensor of `key`, read box by box."""
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
        """The tensor of `key`, in memory."""
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
    """`tensor` without duplicate chunks: several ranks may have written the same one."""
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
