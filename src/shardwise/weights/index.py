"""`CheckpointIndex`: keys, shapes and dtypes of a checkpoint, and any box of any tensor.

Opening reads only headers. The safetensors library maps the files privately. A box is copied from the page cache
directly into its destination tensor, whatever the strides, so no other memory is used.
"""

import hashlib
import math
import os
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from shardwise.errors import LoadError, as_error
from shardwise.sharding.boxes import Box, shape_of
from shardwise.weights.locate import CheckpointFiles, locate_files
from shardwise.weights.nodes import StoredTensor
from shardwise.weights.staging import disk_errors
from shardwise.weights.write import bytes_of

# Smaller tensors are copied: a map of their own saves them nothing.
_MAPPED_BYTES = 2**16
_SAMPLES = 1024
_SAMPLE_BYTES = 64
_LFS_POINTER = b"version https://git-lfs"


@dataclass(frozen=True)
class TensorEntry:
    """File, dtype and shape of one tensor in a checkpoint."""

    path: Path
    dtype: torch.dtype
    shape: tuple[int, ...]


class CheckpointIndex(Mapping[str, TensorEntry]):
    """The tensors of a safetensors checkpoint by key; a context manager that closes its files.

    `bytes_read` counts the copied bytes, in the stored dtype.
    """

    def __init__(self, files: Mapping[Path, Any], location: str, named: Mapping[str, str]) -> None:
        self.location = location
        self.bytes_read = 0
        self._mapped: dict[str, torch.Tensor] = {}
        self._entries: dict[str, TensorEntry] = {}
        for path, file in files.items():
            for key in file.keys():  # noqa: SIM118 - it is no mapping
                tensor = file.get_tensor(key)
                entry = TensorEntry(path, tensor.dtype, tuple(tensor.shape))
                if key not in self._entries or named.get(key) == path.name:
                    self._mapped[key], self._entries[key] = tensor, entry

    @classmethod
    def open(cls, path_or_hub_id: str | os.PathLike[str], **options: Any) -> "CheckpointIndex":
        """Opens a local directory or a hub id; `options` are `HUB_OPTIONS`."""
        files = locate_files(path_or_hub_id, **options)
        opened = {path: _open(path) for path in files.paths}
        index = cls(opened, os.fspath(path_or_hub_id), files.weight_map or {})
        _check_weight_map(files, index)
        return index

    def __getitem__(self, key: str) -> TensorEntry:
        return self._entries[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __enter__(self) -> "CheckpointIndex":
        return self

    def __exit__(self, *error: object) -> None:
        # Tensors already read own their memory; a map is unmapped with the last reference to it.
        self._mapped.clear()

    def node(self, key: str) -> StoredTensor:
        """Returns a lazy tensor of `key`, read box by box."""
        entry = self[key]
        return _Mapped(self, key, entry.shape, entry.dtype)

    def describe(self) -> dict[str, str]:
        """Returns a fingerprint per key, which differs for different weights with near certainty: dtype, shape,
        checksum of some bytes.

        Reads one memory page at each of up to a thousand places of the checkpoint.
        """
        chosen = self._to_sample()
        most = min(4, max(1, _SAMPLES // max(1, len(chosen))))  # places of a tensor
        return {
            key: f"{entry.dtype} {list(entry.shape)}"
            + (f", checksum {_sampled(self._mapped_part(key), most):08x}" if key in chosen else "")
            for key, entry in self._entries.items()
        }

    def digest(self) -> str:
        """Returns a digest of `describe`."""
        return hashlib.sha256(repr(self.describe()).encode()).hexdigest()[:32]

    def _to_sample(self) -> set[str]:
        return set(list(self)[:: -(-len(self) // _SAMPLES)]) if self else set()

    def _mapped_part(self, key: str) -> torch.Tensor:
        """Returns the tensor, or a part of it that is cheap to read."""
        return self.map_tensor(key)

    def map_tensor(self, key: str) -> torch.Tensor:
        """Returns `key` as a tensor over the mapped file: nothing is read until elements are copied from it.

        Never write to it, and release it soon: it keeps the file mapped.
        """
        return self._mapped[key]

    def count(self, nbytes: int) -> None:
        """Adds bytes that were copied out of a mapped tensor to `bytes_read`."""
        self.bytes_read += nbytes


@dataclass(eq=False)
class _Mapped(StoredTensor):
    def map_rows(self, box: Box) -> torch.Tensor | None:
        """Returns the elements `box` as a tensor over its own private mapping; None if they are not contiguous.

        Pages are read when touched, and copied when written, so the file never changes. The storage holds only these
        elements. Replacing or deleting the file does no harm; truncating it in place would.
        """
        shape = shape_of(box)
        if shape[1:] != self.shape[1:] or math.prod(shape) * self.dtype.itemsize < _MAPPED_BYTES:
            return None
        mapped = self.store.map_tensor(self.key)
        if mapped.data_ptr() % self.dtype.itemsize:
            return None
        row_bytes = mapped.nbytes // self.shape[0]
        start, stop = box[0]
        own = mapped.untyped_storage()[start * row_bytes : stop * row_bytes]
        self.store.count(own.nbytes())
        return torch.empty(0, dtype=self.dtype).set_(own).view(shape)


def _sampled(tensor: torch.Tensor, most: int) -> int:
    content, crc = bytes_of(tensor), 0
    for number in range(most):
        start = len(content) * (2 * number + 1) // (2 * most)
        crc = zlib.crc32(content[start : start + _SAMPLE_BYTES], crc)
    return crc


def _open(path: Path) -> Any:
    with disk_errors(f"cannot read {path.name}"), path.open("rb") as file:
        is_pointer = file.read(len(_LFS_POINTER)) == _LFS_POINTER
    if is_pointer:
        raise LoadError(
            f"{path.name} is a pointer of Git LFS",
            at=str(path),
            why="it names the file that belongs here",
            fix="fetch it with `git lfs pull`, or download it again",
        )
    what, fix = f"{path.name} is not a usable safetensors file", "copy or download the file again"
    with as_error(LoadError, what, SafetensorError, at=str(path), fix=fix):
        return safe_open(path, framework="pt")


def _check_weight_map(files: CheckpointFiles, entries: Mapping[str, TensorEntry]) -> None:
    if files.weight_map is None:
        return
    lost = [
        f"{key} (in {name})"
        for key, name in files.weight_map.items()
        if key not in entries or entries[key].path.name != name
    ]
    if lost:
        raise LoadError(
            f"{len(lost)} of {len(files.weight_map)} tensors are not in the shard that the index names",
            at=str(files.index_path),
            why="\n".join(lost[:5]),
            fix="the index and the shards come from different saves; copy or download all of them again",
        )
