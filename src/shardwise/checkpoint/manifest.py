"""The files `manifest.json` and `tensors.json` of a checkpoint; docs/checkpoint-format.md describes the format.

A file is trusted whose size and checksum the manifest confirms.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import torch

from shardwise.errors import LayoutError, LoadError
from shardwise.sharding.boxes import Box
from shardwise.sharding.json_form import from_json, to_json
from shardwise.sharding.layout import Layout, Piece
from shardwise.weights.tensor_file import DTYPES

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
_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES}
_TENSORS = b',"tensors":{\n'
"""Where the tensors begin in the index: one on each line, so that a reader parses those it needs."""


class FileFacts(NamedTuple):
    """A file of the checkpoint: its size, and the CRC-32 of all of it, of a tensor file only of its header."""

    num_bytes: int
    crc: int


class Part(NamedTuple):
    """Elements `box` of a tensor, and where they are: the file's number, and the CRC-32 of their bytes."""

    file: int
    crc: int
    box: Box


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What makes a directory a checkpoint.

    Attributes:
        number: counts the checkpoints of a directory: the newest has the largest.
        tag: the directory's name.
        step: of the training, None where it is not known.
        content: "all", or "trained" where the frozen parameters are left out.
        layout: of the ranks that wrote it, as text.
        model: the class's name.
        time: when it was written, in seconds since 1970.
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
    versions: dict[str, str]
    files: dict[str, FileFacts]


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of a checkpoint, in parts that hold each of its elements once.

    Attributes:
        dtype: of the stored elements.
        shape: of the canonical tensor.
        layout: over the ranks that wrote it.
        parts_json: where its elements are: a list of file, checksum and box, as JSON or parsed.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    layout: Layout
    parts_json: bytes | list[Any]

    @property
    def parts(self) -> list[Part]:
        """All parts."""
        return [_part(each) for each in self._parse()]

    def parts_within(self, wanted: Sequence[Piece]) -> list[Part]:
        """The parts that hold some elements of `wanted`."""
        parts = self._parse()
        if not self.shape or not parts:
            return [_part(each) for each in parts]
        boxes = numpy.array([box for _, _, box in parts])
        hits = numpy.zeros(len(parts), dtype=bool)
        for piece in wanted:
            box = numpy.array(piece.full)
            hits |= ((boxes[:, :, 0] < box[:, 1]) & (boxes[:, :, 1] > box[:, 0])).all(1)
        return [_part(parts[number]) for number in hits.nonzero()[0].tolist()]

    def _parse(self) -> list[Any]:
        parsed: list[Any] = self.parts_json if isinstance(self.parts_json, list) else json.loads(self.parts_json)
        return parsed


def _part(parsed: Sequence[Any]) -> Part:
    file, crc, box = parsed
    return Part(file, crc, tuple((start, stop) for start, stop in box))


class _Tensors(Mapping[str, StoredTensor]):
    """The tensors of an index by key, parsed when they are asked for."""

    def __init__(self, entries: Mapping[str, bytes | dict[str, Any]], layouts: Sequence[Layout]) -> None:
        self._entries, self._layouts = entries, layouts

    def __getitem__(self, key: str) -> StoredTensor:
        entry = self._entries[key]
        if isinstance(entry, bytes):
            head, _, parts = entry.partition(b',"parts":')
            facts, parts_json = json.loads(head + b"}"), parts[:-1]
        else:
            facts, parts_json = entry, entry["parts"]
        return StoredTensor(_DTYPES[facts["dtype"]], tuple(facts["shape"]), self._layouts[facts["layout"]], parts_json)

    def __contains__(self, key: object) -> bool:
        return key in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)


@dataclass(frozen=True)
class Index:
    """Everything that a checkpoint holds.

    Attributes:
        files: names of the tensor files, which parts number.
        tensors: by key: `model/NAME`, `optimizer/NAME/STATE`, `extra…`, `scheduler…`, `random/…`.
        tied: alias to canonical name.
        optimizer: None, or its class, the options of its groups, and by parameter its group and states.
        values: scheduler, loss scale, random states, extra and source, as `encode_tree` wrote them; those there are.
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
    try:
        values = {name: data[name] for name in Manifest.__dataclass_fields__}
        files = {name: FileFacts(*facts) for name, facts in data["files"].items()}
        manifest = Manifest(**{**values, "files": files})
    except (AttributeError, KeyError, TypeError) as error:
        raise LoadError("the manifest is incomplete", at=str(path), why=repr(error)) from error
    strays = [name for name in manifest.files if Path(name).name != name or name.startswith(".")]
    if strays:
        raise LoadError(f"the manifest lists files outside of its directory: {', '.join(strays[:3])}", at=str(path))
    return manifest


def _own_crc(data: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps({**data, "crc": 0}, sort_keys=True).encode())


def write_index(
    directory: Path,
    values: Mapping[str, Any],
    tensors: Mapping[str, tuple[torch.dtype, Layout]],
    parts: Mapping[str, Sequence[str]],
) -> FileFacts:
    """Writes `tensors.json`; returns its size and checksum.

    Args:
        values: `files`, `tied`, `optimizer` and `values`.
        tensors: dtype and layout of every tensor by key.
        parts: what `StoredTensor.parts_json` lists, as JSON, by the key as JSON; tensors without elements have none.
    """
    layouts: dict[Layout, int] = {}
    for _, layout in tensors.values():
        layouts.setdefault(layout, len(layouts))
    head = json.dumps({**values, "layouts": [to_json(each) for each in layouts]}, separators=(",", ":"))
    num_bytes, crc = 0, 0
    with (directory / INDEX).open("wb") as file:
        begin, ends = head.encode()[:-1] + _TENSORS, ",\n"
        for number, text in enumerate(_lines(tensors, parts, layouts)):
            data = (begin if number == 0 else ends.encode()) + text.encode()
            file.write(data)
            num_bytes, crc = num_bytes + len(data), zlib.crc32(data, crc)
        data = (b"" if tensors else begin) + b"\n}}"
        file.write(data)
    return FileFacts(num_bytes + len(data), zlib.crc32(data, crc))


def _lines(
    tensors: Mapping[str, tuple[torch.dtype, Layout]], parts: Mapping[str, Sequence[str]], layouts: Mapping[Layout, int]
) -> Iterator[str]:
    for key, (dtype, layout) in tensors.items():
        quoted = json.dumps(key)
        facts = {"dtype": str(dtype).removeprefix("torch."), "shape": layout.shape, "layout": layouts[layout]}
        text = json.dumps(facts, separators=(",", ":"))[:-1]
        yield f'{quoted}:{text},"parts":[{",".join(parts.get(quoted, ()))}]}}'


def read_index(directory: Path, manifest: Manifest) -> Index:
    """Reads `tensors.json`, and compares its checksum.

    Raises:
        LoadError: it is damaged, or lacks something.
    """
    path = directory / INDEX
    if INDEX not in manifest.files:
        raise LoadError(f"the manifest does not list {INDEX}", at=str(directory / MANIFEST))
    content = _read(path, manifest.files[INDEX])
    try:
        head, separator, body = content.partition(_TENSORS)
        entries: dict[str, bytes | dict[str, Any]]
        if separator:
            data = json.loads(head + b"}")
            lines = body.removesuffix(b"\n}}").split(b",\n") if body != b"\n}}" else []
            split = ((line, line.index(b'":{"dtype"')) for line in lines)
            entries = {json.loads(line[: end + 1]): line[end + 2 :] for line, end in split}
        else:  # without lines, as versions before 0.1 wrote it
            data = json.loads(content)
            entries = data["tensors"]
        layouts = [from_json(Layout, each) for each in data["layouts"]]
        tensors = _Tensors(entries, layouts)
        index = Index(tuple(data["files"]), tensors, data["tied"], data["optimizer"], data["values"])
    except (LayoutError, LookupError, TypeError, ValueError) as error:
        raise LoadError(f"{INDEX} says what cannot be", at=str(path), why=repr(error)) from error
    unlisted = [name for name in index.files if name not in manifest.files]
    if unlisted:
        raise LoadError(f"the manifest does not list {', '.join(unlisted[:3])}", at=str(path))
    return index


def _read_json(path: Path) -> Any:
    content = _read(path)
    try:
        return json.loads(content)
    except ValueError as error:
        raise LoadError(f"{path.name} is damaged", at=str(path), why=f"it is no JSON: {error}") from error


def _read(path: Path, facts: FileFacts | None = None) -> bytes:
    """The content of a file, whose size and checksum are compared with `facts`."""
    try:
        content = path.read_bytes()
    except FileNotFoundError as error:
        raise LoadError(f"the checkpoint has no {path.name}", at=str(path)) from error
    except (OSError, MemoryError) as error:
        raise LoadError(f"cannot read {path.name}", at=str(path), why=str(error) or "memory is too small") from error
    if facts is not None and (len(content) != facts.num_bytes or zlib.crc32(content) != facts.crc):
        cut = f" (it has {len(content):,} bytes of {facts.num_bytes:,})" if len(content) != facts.num_bytes else ""
        raise LoadError(
            f"{path.name} is damaged{cut}",
            at=str(path),
            why="its checksum is another",
            fix="load an older tag or a copy",
        )
    return content
