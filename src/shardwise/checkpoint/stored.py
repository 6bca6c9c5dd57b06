"""Values and tensors of a checkpoint: as JSON, and read part by part (docs/checkpoint-format.md)."""

import collections
import json
import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from shardwise.checkpoint.manifest import INDEX, Index, Manifest, Part, part_name, read_file, read_index, read_manifest
from shardwise.errors import ConfigError, LayoutError, LoadError
from shardwise.sharding.boxes import full_box, shape_of, slices
from shardwise.sharding.layout import Copy, Piece, Source, copies
from shardwise.weights.staging import disk_errors
from shardwise.weights.write import DTYPES, crc_of

_TAG = "$"


def encode_tree(value: Any, at: str, tensors: dict[str, Tensor]) -> Any:
    """Converts `value` to JSON values. Tensors are detached and stored in `tensors` by their path.

    Args:
        value: JSON values, tuples, sets, dicts of any keys of these, Counters, nonfinite floats, tensors, numbers.
        at: path of `value`, for keys and messages, such as `extra`.
    """
    if value is None or isinstance(value, bool | str):
        return value
    if type(value) is int:
        return value
    if type(value) is float:
        return value if math.isfinite(value) else {_TAG: "float", "is": repr(value)}
    if isinstance(value, Tensor):
        is_plain = value.layout == torch.strided and value.dtype in DTYPES and not value.is_meta
        if not is_plain or type(value) not in (Tensor, nn.Parameter, nn.Buffer):
            raise ConfigError(
                f"{at} is a {type(value).__name__} of {value.dtype} and layout {value.layout} on {value.device}",
                fix="save a plain tensor, such as .to_dense() or .full_tensor() makes",
            )
        at = at.encode(errors="backslashreplace").decode()  # safetensors' names are UTF-8
        while at in tensors:  # a dot in a key: {"a.b": …, "a": {"b": …}}
            at += "'"
        tensors[at] = value.detach().resolve_conj().resolve_neg()
        return {_TAG: "tensor", "is": at}
    if isinstance(value, Mapping):
        kind = "counter" if isinstance(value, collections.Counter) else "dict"
        if kind == "dict" and all(isinstance(key, str) for key in value) and _TAG not in value:
            return {key: encode_tree(each, f"{at}.{key}", tensors) for key, each in value.items()}
        pairs = [
            [encode_tree(key, f"{at} key", tensors), encode_tree(each, f"{at}.{key}", tensors)]
            for key, each in value.items()
        ]
        return {_TAG: kind, "is": pairs}
    if isinstance(value, list | tuple | set | frozenset):
        items = [encode_tree(each, f"{at}.{number}", tensors) for number, each in enumerate(value)]
        if isinstance(value, set | frozenset):  # each process has an order of its own
            return {_TAG: "set", "is": sorted(items, key=json.dumps)}
        return items if isinstance(value, list) else {_TAG: "tuple", "is": items}
    if hasattr(value, "item") and getattr(value, "ndim", None) == 0:  # a number of numpy's
        return encode_tree(value.item(), at, tensors)
    raise ConfigError(
        f"{at} is a {type(value).__name__}",
        why="a checkpoint holds JSON values and tensors; anything else would have to be pickled, and run to be read",
        fix="save numbers, text, lists, dictionaries and tensors (of an object, its state_dict())",
    )


def decode_tree(data: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Converts the result of `encode_tree` back."""
    if isinstance(data, list):
        return [decode_tree(each, tensors) for each in data]
    if not isinstance(data, dict):
        return data
    if _TAG not in data:
        return {key: decode_tree(each, tensors) for key, each in data.items()}
    kind, inner = data[_TAG], data["is"]
    if kind == "float":
        return float(inner)
    if kind == "tensor":
        return tensors[inner]
    made: dict[Any, Any] = {"tuple": tuple, "set": set, "dict": dict, "counter": lambda x: collections.Counter(dict(x))}
    if kind not in made:
        raise LoadError("the checkpoint holds a value of no known kind", at=str(data)[:100])
    return made[kind](decode_tree(each, tensors) for each in inner)


def open_checkpoint(directory: Path, *, verifies: bool = True) -> "StoredParts":
    """Opens the checkpoint in `directory`: reads and checks its manifest and index."""
    manifest = read_manifest(directory)
    return StoredParts(directory, manifest, read_index(directory, manifest), verifies)


@dataclass
class StoredParts:
    """An open checkpoint; a context manager that closes its tensor files.

    Attributes:
        verifies: whether the checksum of a part is verified at its first use.
    """

    directory: Path
    manifest: Manifest
    index: Index
    verifies: bool = True
    _files: dict[int, Any] = field(default_factory=dict)
    _parts: dict[tuple[int, str], Tensor] = field(default_factory=dict)

    def plan(self, key: str, wanted: Sequence[Piece]) -> tuple[Copy, ...]:
        """Returns the copies that fill `wanted` with elements of `key`. Verifies the parts they read."""
        found = self.find_copies(key, wanted)
        for part in dict.fromkeys(each.source.key for each in found):
            self._map(key, part)  # type: ignore[arg-type]
        return found

    def find_copies(self, key: str, wanted: Sequence[Piece]) -> tuple[Copy, ...]:
        """Returns the copies that fill `wanted` with elements of `key`. Reads no file."""
        stored = self.index.tensors.get(key)
        if stored is None:
            raise LoadError(f"the checkpoint has no {key}", at=str(self.directory))
        parts = stored.parts_within(wanted)
        try:
            return copies([Source(part, part.box, full_box(shape_of(part.box))) for part in parts], wanted)
        except LayoutError as error:
            raise LoadError(f"{key} is not complete", at=str(self.directory), why=str(error)) from error

    def fill(self, out: Tensor, key: str, planned: Sequence[Copy]) -> None:
        """Executes planned copies into `out`, converting to its dtype and device."""
        for each in planned:
            part = self._map(key, each.source.key)  # type: ignore[arg-type]
            out[slices(each.target_box)] = part[slices(each.source_box)].to(out.device)

    def read(self, key: str, *, dtype: torch.dtype | None = None) -> Tensor:
        """Returns the full tensor in new memory; default dtype: as stored."""
        stored = self.index.tensors[key]
        out = torch.empty(stored.shape, dtype=dtype or stored.dtype)
        full = full_box(stored.shape)
        self.fill(out, key, self.plan(key, [Piece(full, full)]))
        return out

    def read_all(self, prefix: str) -> dict[str, Tensor]:
        """Returns the full tensors whose keys begin with `prefix`, by key."""
        return {key: self.read(key) for key in self.index.tensors if key.startswith(prefix)}

    def check_file(self, name: str) -> None:
        """Checks existence and size of a file; if it holds no tensors, also its checksum."""
        path, facts = self.directory / name, self.manifest.files[name]
        if name not in self.index.files:
            read_file(path, facts)
            return
        with disk_errors(f"the checkpoint lacks {name}"):
            size = path.stat().st_size
        if size != facts.num_bytes:
            raise LoadError(
                f"{name} has {size:,} bytes of {facts.num_bytes:,}",
                at=str(path),
                why="it was cut short, or is another file",
                fix="load an older tag, or copy the file again",
            )

    def check_all_files(self) -> None:
        """Checks every file; see `check_file`."""
        for name in self.manifest.files.keys() - {INDEX}:
            self.check_file(name)

    def drop(self) -> None:
        """Closes all open files."""
        self._parts.clear()
        self._files.clear()

    def __enter__(self) -> "StoredParts":
        return self

    def __exit__(self, *error: object) -> None:
        self.drop()

    def _map(self, key: str, part: Part) -> Tensor:
        """Returns a part as a tensor over the mapped file, verified at its first use."""
        name = part_name(key, part.box)
        if (part.file, name) not in self._parts:
            if part.file not in self._files:
                self._files[part.file] = self._open(self.index.files[part.file])
            tensor = self._files[part.file].get_tensor(name)
            if self.verifies and crc_of(tensor) != part.crc:
                raise self._damaged(name, self.index.files[part.file])
            self._parts[part.file, name] = tensor
        return self._parts[part.file, name]

    def _open(self, name: str) -> Any:
        self.check_file(name)
        path = self.directory / name
        with disk_errors(f"cannot read {name}"):
            with path.open("rb") as file:
                start = file.read(8)
                header = start + file.read(min(int.from_bytes(start, "little"), self.manifest.files[name].num_bytes))
            if zlib.crc32(header) != self.manifest.files[name].crc:
                raise self._damaged(f"the header of {name}", name)
            return safe_open(path, framework="pt")

    def _damaged(self, what: str, file: str) -> LoadError:
        return LoadError(
            f"{what} is damaged",
            at=str(self.directory / file),
            why="its bytes have another checksum than those that were written",
            fix="load an older tag, or copy the file again",
        )
