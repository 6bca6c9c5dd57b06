"""Files `manifest.json` and `tensors.json` of a checkpoint (docs/checkpoint-format.md), read without torch.

A file is valid if the manifest confirms its size and checksum.
"""

from __future__ import annotations

import importlib
import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy

from shardwise.errors import LoadError, as_error
from shardwise.sharding.boxes import Box
from shardwise.sharding.json_form import from_json, to_json
from shardwise.sharding.layout import Layout, Piece

if TYPE_CHECKING:
    import torch

FORMAT = "shardwise-checkpoint"
VERSION = 1
MANIFEST = "manifest.json"
INDEX = "tensors.json"
_TENSORS = b',"tensors":{\n'  # begin of the tensors in the index, one on each line
_PARTS = b',"parts":'
_ANOTHER = "load an older tag, or copy the file again"


class FileFacts(NamedTuple):
    """Size and CRC-32 of a file; for a tensor file, the CRC-32 of only its header."""

    num_bytes: int
    crc: int


class Part(NamedTuple):
    """Elements `box` of a tensor, with the number of their file and the CRC-32 of their bytes."""

    file: int
    crc: int
    box: Box


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The file that makes a directory a checkpoint.

    Attributes:
        number: counts the checkpoints of a directory; the newest has the largest.
        content: "all", or "trained" if the frozen parameters are left out.
        layout: layout of the writing ranks, as text.
        time: time of writing, in seconds since 1970.
    """

    number: int
    tag: str
    step: int | None
    content: str
    layout: str
    model: str
    time: float
    versions: dict[str, str]
    files: dict[str, FileFacts]


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of a checkpoint, in parts that hold each of its elements once.

    Attributes:
        dtype_name: such as "float32".
        parts_json: list of file, checksum and box of every part, as JSON.
    """

    dtype_name: str
    shape: tuple[int, ...]
    layout: Layout
    parts_json: bytes

    @property
    def dtype(self) -> torch.dtype:
        """The dtype, which `inspect` prints without importing torch."""
        return getattr(importlib.import_module("torch"), self.dtype_name)

    @property
    def parts(self) -> list[Part]:
        """All parts."""
        return [_part(each) for each in json.loads(self.parts_json)]

    def parts_within(self, wanted: Sequence[Piece]) -> list[Part]:
        """Returns the parts that hold some elements of `wanted`."""
        parts = json.loads(self.parts_json)
        if not self.shape or not parts:
            return [_part(each) for each in parts]
        boxes = numpy.array([box for _, _, box in parts])
        hits = numpy.zeros(len(parts), dtype=bool)
        for piece in wanted:
            box = numpy.array(piece.full)
            hits |= ((boxes[:, :, 0] < box[:, 1]) & (boxes[:, :, 1] > box[:, 0])).all(1)
        return [_part(parts[number]) for number in hits.nonzero()[0].tolist()]


def _part(parsed: Sequence[Any]) -> Part:
    file, crc, box = parsed
    return Part(file, crc, tuple((start, stop) for start, stop in box))


@dataclass(frozen=True)
class Index:
    """Content of a checkpoint.

    Attributes:
        files: names of the tensor files, by their numbers.
        tensors: by key: `model/NAME`, `optimizer/NAME/STATE`, `optimizers/OPTIMIZER/NAME/STATE`, `extra…`,
            `scheduler…`, `random/…`.
        tied: alias to canonical name.
        optimizers: by name, "" for a single one: its class, the options of its groups, and by parameter its group and
            states.
        values: scheduler, loss scale, random states, extra and source, as `encode_tree` wrote them, if saved.
    """

    files: tuple[str, ...]
    tensors: Mapping[str, StoredTensor]
    tied: Mapping[str, str]
    optimizers: Mapping[str, Mapping[str, Any]]
    values: Mapping[str, Any]


def part_name(key: str, box: Box) -> str:
    """Returns the name in a tensor file of the elements `box` of a tensor."""
    return f"{key}[{','.join(f'{start}:{stop}' for start, stop in box)}]"


def write_manifest(directory: Path, manifest: Manifest) -> None:
    """Writes `manifest.json`, which holds a checksum of itself."""
    data = {"format": FORMAT, "version": VERSION, **vars(manifest)}
    data["crc"] = _own_crc(data)
    (directory / MANIFEST).write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


def read_manifest(directory: Path) -> Manifest:
    """Reads and checks `manifest.json`."""
    path = directory / MANIFEST
    content = read_file(path)
    with as_error(LoadError, f"{MANIFEST} is damaged: it is no JSON", ValueError, at=str(path)):
        data = json.loads(content)
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise LoadError(f"{MANIFEST} is not the manifest of a checkpoint", at=str(path))
    if data.get("version") != VERSION:
        raise LoadError(
            f"the checkpoint has version {data.get('version')} of the format, and this Shardwise reads version "
            f"{VERSION}",
            at=str(path),
            fix="install the Shardwise that wrote it, or a newer one",
        )
    if data.get("crc") != _own_crc(data):
        raise _damaged(path)
    files = {name: FileFacts(*facts) for name, facts in data["files"].items()}
    return Manifest(**{**{name: data[name] for name in Manifest.__dataclass_fields__}, "files": files})


def _own_crc(data: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps({**data, "crc": 0}, sort_keys=True).encode())


def write_index(
    directory: Path,
    head: Mapping[str, Any],
    tensors: Mapping[str, tuple[torch.dtype, Layout]],
    parts: Mapping[str, Sequence[str]],
) -> FileFacts:
    """Writes `tensors.json`; returns its size and checksum.

    Args:
        head: `files`, `tied`, `optimizer`, `optimizers` (if there are several) and `values`.
        tensors: dtype and layout of every tensor by key.
        parts: JSON items of `StoredTensor.parts_json` by key; tensors without elements have none.
    """
    numbers: dict[Layout, int] = {}
    for _, layout in tensors.values():
        numbers.setdefault(layout, len(numbers))
    data = _compact({**head, "layouts": [to_json(each) for each in numbers]}).encode()[:-1] + _TENSORS
    num_bytes = crc = 0
    with (directory / INDEX).open("wb") as file:
        for key, (dtype, layout) in tensors.items():
            facts = {"dtype": str(dtype).removeprefix("torch."), "shape": layout.shape, "layout": numbers[layout]}
            data += f"{json.dumps(key)}:{_compact(facts)[:-1]}".encode() + _PARTS
            data += f"[{','.join(parts.get(key, ()))}]}}".encode()
            file.write(data)
            num_bytes, crc, data = num_bytes + len(data), zlib.crc32(data, crc), b",\n"
        data = (b"" if tensors else data) + b"\n}}"
        file.write(data)
    return FileFacts(num_bytes + len(data), zlib.crc32(data, crc))


def _compact(data: Any) -> str:
    return json.dumps(data, separators=(",", ":"))


def read_index(directory: Path, manifest: Manifest) -> Index:
    """Reads `tensors.json`."""
    content = read_file(directory / INDEX, manifest.files[INDEX])
    head, separator, body = content.partition(_TENSORS)
    facts: dict[str, Any] = {}
    parts: dict[str, bytes] = {}
    if separator:
        data = json.loads(head + b"}")
        for line in body.removesuffix(b"\n}}").split(b",\n") if body != b"\n}}" else ():
            start, _, end = line.partition(_PARTS)
            ((key, each),) = json.loads(b"{" + start + b"}}").items()
            facts[key], parts[key] = each, end[:-1]
    else:  # without lines, as versions before 0.1 wrote it
        data = json.loads(content)
        facts = data["tensors"]
        parts = {key: json.dumps(each["parts"]).encode() for key, each in facts.items()}
    layouts = [from_json(Layout, each) for each in data["layouts"]]
    tensors = {
        key: StoredTensor(each["dtype"], tuple(each["shape"]), layouts[each["layout"]], parts[key])
        for key, each in facts.items()
    }
    optimizers = data.get("optimizers", {}) | ({} if data["optimizer"] is None else {"": data["optimizer"]})
    return Index(tuple(data["files"]), tensors, data["tied"], optimizers, data["values"])


def read_file(path: Path, facts: FileFacts | None = None) -> bytes:
    """Returns the content of a file, checked against the size and checksum in `facts`."""
    with as_error(LoadError, f"cannot read {path.name}", OSError, at=str(path)):
        content = path.read_bytes()
    if facts is not None and len(content) != facts.num_bytes:
        raise LoadError(f"{path.name} has {len(content):,} bytes of {facts.num_bytes:,}", at=str(path), fix=_ANOTHER)
    if facts is not None and zlib.crc32(content) != facts.crc:
        raise _damaged(path)
    return content


def _damaged(path: Path) -> LoadError:
    return LoadError(f"{path.name} is damaged", at=str(path), why="its checksum is another", fix=_ANOTHER)
