"""`manifest.json` and `tensors.json` of a checkpoint: what it says of itself. The format is in
docs/checkpoint-format.md.
"""

from __future__ import annotations

import json
import os
import stat
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch

from shardwise.checkpoint.schema import check_index, check_manifest
from shardwise.errors import LayoutError, LoadError
from shardwise.sharding.boxes import Box, full_box, volume
from shardwise.sharding.json_form import from_json, to_json
from shardwise.sharding.layout import Layout

__all__ = [
    "INDEX",
    "MANIFEST",
    "VERSION",
    "FileFacts",
    "Index",
    "Manifest",
    "Part",
    "StoredTensor",
    "part_name",
    "read_index",
    "read_manifest",
    "write_index",
    "write_manifest",
]

FORMAT = "shardwise-checkpoint"
VERSION = 1
MANIFEST = "manifest.json"
INDEX = "tensors.json"


@dataclass(frozen=True)
class FileFacts:
    """A file of the checkpoint: its size, and the CRC-32 of all of it, of a tensor file only of its header."""

    num_bytes: int
    crc: int


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What makes a directory a checkpoint.

    Attributes:
        number: counts the checkpoints of a directory: the newest has the largest.
        tag: the directory's name.
        step: as `extra` says it, None where it does not.
        content: "all", or "trained" where the frozen parameters are left out.
        layout: of the ranks that wrote it, as text.
        model: the class's name.
        time: when it was begun, in seconds of the clock.
        versions: of the libraries that wrote it.
        files: every other file of the directory.
    """

    number: int
    tag: str
    step: int | None
    content: str
    layout: str
    model: str
    time: float
    versions: Mapping[str, str]
    files: Mapping[str, FileFacts]


@dataclass(frozen=True)
class Part:
    """Elements `box` of a tensor, and where they are: the file's number, and the CRC-32 of their bytes."""

    file: int
    crc: int
    box: Box


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of a checkpoint, in parts that hold each of its elements once.

    Attributes:
        dtype: of the stored elements.
        shape: of the canonical tensor.
        parts: where its elements are.
        layout: how the ranks that wrote it held it.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    parts: tuple[Part, ...]
    layout: Layout


@dataclass(frozen=True)
class Index:
    """Everything a checkpoint holds.

    Attributes:
        files: names of the tensor files, which parts number.
        tensors: by their keys: `model/NAME`, `optimizer/NAME/STATE`, `extra…`, `random/…`.
        tied: alias to canonical name.
        optimizer: None, or its class, the options of its groups, and by parameter its group and states.
        values: scheduler, loss scale, random states and extra, as `encode_tree` wrote them; what there is of them.
    """

    files: tuple[str, ...]
    tensors: Mapping[str, StoredTensor]
    tied: Mapping[str, str]
    optimizer: Mapping[str, Any] | None
    values: Mapping[str, Any]


def part_name(key: str, box: Box) -> str:
    """What a tensor file calls the elements `box` of a tensor."""
    return f"{key}[{','.join(f'{start}:{stop}' for start, stop in box)}]"


def write_manifest(directory: Path, manifest: Manifest) -> None:
    """Writes `manifest.json`, which holds a checksum of itself."""
    files = {name: [facts.num_bytes, facts.crc] for name, facts in manifest.files.items()}
    data = {"format": FORMAT, "version": VERSION, **vars(manifest), "versions": dict(manifest.versions), "files": files}
    data["crc"] = _own_crc(data)
    (directory / MANIFEST).write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


def read_manifest(directory: Path) -> Manifest:
    """Reads and checks `manifest.json`.

    Raises:
        LoadError: there is none, it is damaged, of another format, or written by a newer Shardwise.
    """
    path = directory / MANIFEST
    data = _read_json(path)
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise LoadError(f"{path.name} is not the manifest of a checkpoint", at=str(path))
    version = data.get("version")
    if version != VERSION or type(version) is not int:
        raise LoadError(
            f"the checkpoint has version {version} of the format, and this Shardwise reads version {VERSION}",
            at=str(path),
            fix="install the Shardwise that wrote it, or a newer one",
        )
    if data.get("crc") != _own_crc(data):
        raise LoadError(
            "the manifest is damaged", at=str(path), why="its checksum is another", fix="load an older tag, or a copy"
        )
    check_manifest(data, path)
    known = {each.name: data[each.name] for each in fields(Manifest)}
    known["files"] = {name: FileFacts(*facts) for name, facts in data["files"].items()}
    strays = [name for name in known["files"] if Path(name).name != name or name.startswith(".")]
    if strays:
        raise LoadError(f"the manifest lists files outside of its directory: {', '.join(strays[:3])}", at=str(path))
    return Manifest(**known)


def _own_crc(data: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps({**data, "crc": 0}, sort_keys=True).encode())


def write_index(directory: Path, index: Index) -> FileFacts:
    """Writes `tensors.json`; returns its size and checksum."""
    layouts: dict[Layout, int] = {}
    tensors = {
        key: {
            "dtype": str(each.dtype).removeprefix("torch."),
            "shape": list(each.shape),
            "layout": layouts.setdefault(each.layout, len(layouts)),
            "parts": [[part.file, part.crc, [list(interval) for interval in part.box]] for part in each.parts],
        }
        for key, each in index.tensors.items()
    }
    data = {**vars(index), "layouts": [to_json(each) for each in layouts], "tensors": tensors}
    content = json.dumps(data, separators=(",", ":")).encode()
    (directory / INDEX).write_bytes(content)
    return FileFacts(len(content), zlib.crc32(content))


def read_index(directory: Path, manifest: Manifest) -> Index:
    """Reads and checks `tensors.json`.

    Raises:
        LoadError: it is damaged or says what cannot be.
    """
    path = directory / INDEX
    if INDEX not in manifest.files:
        raise LoadError(f"the manifest does not list {INDEX}", at=str(directory / MANIFEST))
    data = _read_json(path, manifest.files[INDEX])
    check_index(data, path)
    try:
        layouts = [from_json(Layout, each) for each in data["layouts"]]
        tensors = {key: _read_tensor(each, layouts) for key, each in data["tensors"].items()}
        index = Index(tuple(data["files"]), tensors, data["tied"], data["optimizer"], data["values"])
    except (IndexError, LayoutError) as error:
        raise LoadError(f"{INDEX} says what cannot be", at=str(path), why=repr(error)) from error
    unlisted = [name for name in index.files if name not in manifest.files]
    if unlisted:
        raise LoadError(f"the manifest does not list {', '.join(unlisted[:3])}", at=str(path))
    for key, each in index.tensors.items():
        _check_tensor(key, each, len(index.files), path)
    return index


def _read_tensor(data: Mapping[str, Any], layouts: list[Layout]) -> StoredTensor:
    dtype: torch.dtype = getattr(torch, data["dtype"])
    parts = tuple(Part(file, crc, tuple((start, stop) for start, stop in box)) for file, crc, box in data["parts"])
    return StoredTensor(dtype, tuple(data["shape"]), parts, layouts[data["layout"]])


def _check_tensor(key: str, tensor: StoredTensor, num_files: int, path: Path) -> None:
    """Raises unless the parts can be those of the tensor; that they leave no gap shows when they are read."""
    for part in tensor.parts:
        fits = len(part.box) == len(tensor.shape) and 0 <= part.file < num_files
        within = all(0 <= start <= stop <= size for (start, stop), size in zip(part.box, tensor.shape, strict=False))
        if not (fits and within):
            raise LoadError(f"{key} of shape {list(tensor.shape)} has a part {part}", at=str(path))
    held = sum(volume(part.box) for part in tensor.parts)
    if held != volume(full_box(tensor.shape)):
        raise LoadError(f"the parts of {key} hold {held} elements; its shape is {list(tensor.shape)}", at=str(path))


def _read_json(path: Path, facts: FileFacts | None = None) -> Any:
    try:
        mode = os.lstat(path).st_mode
        content = path.read_bytes() if stat.S_ISREG(mode) else b""
    except FileNotFoundError as error:
        raise LoadError(f"the checkpoint has no {path.name}", at=str(path)) from error
    except OSError as error:
        raise LoadError(f"cannot read {path.name}", at=str(path), why=str(error)) from error
    if not stat.S_ISREG(mode):
        what = "a link" if stat.S_ISLNK(mode) else "no file"
        raise LoadError(f"{path.name} is {what}", at=str(path), why="a checkpoint holds its files itself")
    if facts is not None and (len(content) != facts.num_bytes or zlib.crc32(content) != facts.crc):
        cut = f" (it has {len(content):,} bytes of {facts.num_bytes:,})" if len(content) != facts.num_bytes else ""
        raise LoadError(
            f"{path.name} is damaged{cut}",
            at=str(path),
            why="its checksum is another",
            fix="load an older tag or a copy",
        )
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        raise LoadError(f"{path.name} is damaged", at=str(path), why=f"it is no JSON: {error}") from error
