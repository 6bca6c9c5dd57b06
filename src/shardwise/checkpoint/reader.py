"""Reads the tensors of a checkpoint: files and parts are checked, and elements copied to where a rank needs them."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from shardwise.checkpoint.manifest import (
    INDEX,
    Index,
    Manifest,
    Part,
    StoredTensor,
    part_name,
    read_index,
    read_manifest,
)
from shardwise.errors import LayoutError, LoadError
from shardwise.sharding.boxes import full_box, shape_of, slices
from shardwise.sharding.layout import Piece
from shardwise.sharding.reshard import Copy, Source, copies
from shardwise.weights.tensor_file import crc_of

__all__ = ["StoredParts", "check_companion", "check_files", "open_checkpoint"]


def open_checkpoint(directory: Path, *, verifies: bool = True) -> StoredParts:
    """Opens the checkpoint in `directory`: reads its manifest and index, and checks them.

    Raises:
        LoadError: it is damaged or incomplete.
    """
    manifest = read_manifest(directory)
    return StoredParts(directory, manifest, read_index(directory, manifest), verifies)


def check_files(directory: Path, manifest: Manifest, names: Sequence[str]) -> None:
    """Raises unless the files are there, and as large as the manifest says.

    Raises:
        LoadError: names the first that is not.
    """
    for name in names:
        path, facts = directory / name, manifest.files[name]
        try:
            size = path.stat().st_size
        except OSError as error:
            raise LoadError(f"the checkpoint lacks {name}", at=str(path), why=str(error)) from error
        if size != facts.num_bytes:
            raise LoadError(
                f"{name} has {size:,} bytes of {facts.num_bytes:,}",
                at=str(path),
                why="it was cut short, or is another file",
                fix="load an older tag, or copy the file again",
            )


def check_companion(directory: Path, manifest: Manifest, name: str) -> None:
    """Raises unless a file that holds no tensors is as it was written.

    Raises:
        LoadError: it is missing or damaged.
    """
    check_files(directory, manifest, [name])
    try:
        content = (directory / name).read_bytes()
    except OSError as error:
        raise LoadError(f"cannot read {name}", at=str(directory / name), why=str(error)) from error
    if zlib.crc32(content) != manifest.files[name].crc:
        raise LoadError(f"{name} is damaged", at=str(directory / name), why="its checksum is another")


@dataclass
class StoredParts:
    """The tensor files of one checkpoint; a context manager that releases them.

    Attributes:
        directory: of the checkpoint.
        manifest: what it says of its files.
        index: what it holds.
        verifies: whether parts are held against their checksums when they are first used.
    """

    directory: Path
    manifest: Manifest
    index: Index
    verifies: bool = True
    _files: dict[int, Any] = field(default_factory=dict)
    _parts: dict[tuple[int, str], Tensor] = field(default_factory=dict)

    def plan(self, key: str, wanted: Sequence[Piece]) -> tuple[Copy, ...]:
        """Which elements of `key` go where, to fill `wanted`; the parts they are in are checked.

        Raises:
            LoadError: the checkpoint has no such tensor, or a part of it is damaged; names file and tensor.
        """
        found = self.find_copies(key, wanted)
        for part in dict.fromkeys(each.source.key for each in found):
            self._map(key, self.index.tensors[key], part)  # type: ignore[arg-type]
        return found

    def find_copies(self, key: str, wanted: Sequence[Piece]) -> tuple[Copy, ...]:
        """Which elements of `key` go where, to fill `wanted`. Reads no file.

        Raises:
            LoadError: the checkpoint has no such tensor, or not all of its elements.
        """
        stored = self.index.tensors.get(key)
        if stored is None:
            raise LoadError(f"the checkpoint has no {key}", at=str(self.directory))
        parts = stored.parts_within(wanted)
        try:
            found = copies([Source(part, part.box, full_box(shape_of(part.box))) for part in parts], wanted)
        except LayoutError as error:
            raise LoadError(f"{key} is not complete", at=str(self.directory), why=str(error)) from error
        return found

    def fill(self, out: Tensor, key: str, planned: Sequence[Copy]) -> None:
        """Copies what was planned into `out`, to its dtype and device."""
        stored = self.index.tensors[key]
        for each in planned:
            part = self._map(key, stored, each.source.key)  # type: ignore[arg-type]
            out[slices(each.target_box)] = part[slices(each.source_box)].to(out.device)

    def read(self, key: str, *, dtype: torch.dtype | None = None) -> Tensor:
        """The full tensor, in memory of its own; of its own dtype, or of another."""
        stored = self.index.tensors[key]
        out = torch.empty(stored.shape, dtype=dtype or stored.dtype)
        full = full_box(stored.shape)
        self.fill(out, key, self.plan(key, [Piece(full, full)]))
        return out

    def read_all(self, prefix: str) -> dict[str, Tensor]:
        """The full tensors whose keys begin with `prefix`, by key."""
        return {key: self.read(key) for key in self.index.tensors if key.startswith(prefix)}

    def check_all_files(self) -> None:
        """Raises unless all files are there, and those that hold no tensors, whose bytes are few, are undamaged."""
        check_files(self.directory, self.manifest, list(self.manifest.files))
        for name in self.manifest.files.keys() - {INDEX, *self.index.files} if self.verifies else ():
            check_companion(self.directory, self.manifest, name)

    def drop(self) -> None:
        """Lets go of what has been mapped so far."""
        self._parts.clear()
        self._files.clear()

    def __enter__(self) -> StoredParts:
        return self

    def __exit__(self, *error: object) -> None:
        self.drop()

    def _map(self, key: str, stored: StoredTensor, part: Part) -> Tensor:
        """A part as a tensor over the mapped file, checked when it is mapped."""
        name = part_name(key, part.box)
        if (part.file, name) in self._parts:
            return self._parts[part.file, name]
        file = self.index.files[part.file]
        at = f"{self.directory}/{file}"
        try:
            tensor: Tensor = self._open(part.file).get_tensor(name)
        except SafetensorError as error:
            raise LoadError(f"{file} does not hold {name}", at=at, why=str(error)) from error
        if tensor.dtype != stored.dtype or tuple(tensor.shape) != shape_of(part.box):
            raise LoadError(
                f"{name} is {tensor.dtype} of shape {list(tensor.shape)}",
                at=at,
                why=f"the checkpoint says {stored.dtype} of shape {list(shape_of(part.box))}",
            )
        if self.verifies and crc_of(tensor) != part.crc:
            raise LoadError(
                f"{name} is damaged",
                at=at,
                why="its bytes have another checksum than those that were written",
                fix="load an older tag, or copy the file again",
            )
        self._parts[part.file, name] = tensor
        return tensor

    def _open(self, number: int) -> Any:
        if number not in self._files:
            name = self.index.files[number]
            check_files(self.directory, self.manifest, [name])
            self._files[number] = _open_file(self.directory / name, self.manifest.files[name].crc)
        return self._files[number]


def _open_file(path: Path, header_crc: int) -> Any:
    try:
        with path.open("rb") as file:
            start = file.read(8)
            length = int.from_bytes(start, "little")
            header = start + file.read(length if length < path.stat().st_size else 0)
        if zlib.crc32(header) != header_crc:
            raise LoadError(
                f"the header of {path.name} is damaged",
                at=str(path),
                why="it has another checksum than the one that was written",
                fix="load an older tag, or copy the file again",
            )
        return safe_open(path, framework="pt")
    except SafetensorError as error:
        raise LoadError(f"{path.name} is not a usable safetensors file", at=str(path), why=str(error)) from error
    except LoadError:
        raise
    except OSError as error:
        raise LoadError(f"cannot read {path.name}", at=str(path), why=str(error)) from error
