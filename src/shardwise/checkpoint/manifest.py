"""`manifest.json` and `tensors.json` of a checkpoint: what it says of itself. The format is in
docs/checkpoint-format.md.
"""

from __future__ import annotations

import json
import os
import stat
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from shardwise.checkpoint.schema import FileFacts, Manifest, Part, check_index, check_manifest
from shardwise.errors import LayoutError, LoadError
from shardwise.sharding.boxes import Box, full_box, volume
from shardwise.sharding.json_form import from_json, to_json
from shardwise.sharding.layout import Layout

__all__ = [
    "INDEX",
    "MANIFEST",
    "VERSION",
    "Index",
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
    data = {"format": FORMAT, "version": VERSION, **vars(manifest)}
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
    manifest = check_manifest(data, path)
    strays = [name for name in manifest.files if Path(name).name != name or name.startswith(".")]
    if strays:
        raise LoadError(f"the manifest lists files outside of its directory: {', '.join(strays[:3])}", at=str(path))
    return manifest


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
            "parts": each.parts,
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
    described = check_index(data, path)
    try:
        layouts = [from_json(Layout, each) for each in data["layouts"]]
        tensors = {
            key: StoredTensor(getattr(torch, each.dtype), each.shape, each.parts, layouts[each.layout])
            for key, each in described.items()
        }
        index = Index(tuple(data["files"]), tensors, data["tied"], data["optimizer"], data["values"])
    except (IndexError, LayoutError) as error:
        raise LoadError(f"{INDEX} says what cannot be", at=str(path), why=repr(error)) from error
    unlisted = [name for name in index.files if name not in manifest.files]
    if unlisted:
        raise LoadError(f"the manifest does not list {', '.join(unlisted[:3])}", at=str(path))
    for key, each in index.tensors.items():
        _check_tensor(key, each, len(index.files), path)
    return index


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
    except (OSError, MemoryError) as error:
        raise LoadError(f"cannot read {path.name}", at=str(path), why=str(error) or "memory is too small") from error
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
