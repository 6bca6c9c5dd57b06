"""The header of one safetensors file.

The format on one line: 8 bytes little-endian header length, that many bytes of JSON `name -> {dtype, shape,
data_offsets}`, then the tensors' bytes without holes. Read here rather than through the `safetensors` library so that a
damaged file says what is wrong with it, and where the bytes lie is known.
Source: https://github.com/huggingface/safetensors#format
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from shardwise.errors import LoadError

__all__ = ["DTYPE_NAMES", "TensorEntry", "read_header"]

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
DTYPE_NAMES = {dtype: name for name, dtype in _DTYPES.items()}

_LENGTH_BYTES = 8
# The limit of the safetensors library: a longer header is a file of another kind, or an attack on our memory.
_MAX_HEADER_BYTES = 100_000_000


@dataclass(frozen=True)
class TensorEntry:
    """One tensor of a checkpoint: where its bytes are and what they mean."""

    path: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    nbytes: int


def read_header(path: Path) -> dict[str, TensorEntry]:
    """The tensors in the safetensors file at `path`; reads the header only.

    Raises:
        LoadError: the file cannot be opened, is empty, truncated or not safetensors, or its header contradicts itself.
    """
    try:
        file_bytes = path.stat().st_size
        with path.open("rb") as file:
            header, data_start = _read_json(file, path, file_bytes)
    except LoadError:
        raise
    except OSError as error:
        raise LoadError(f"cannot read {path.name}", at=str(path), why=str(error)) from error
    entries = {
        key: _parse_entry(path, key, value, data_start) for key, value in header.items() if key != "__metadata__"
    }
    _check_extents(path, entries, data_start, file_bytes)
    return entries


def _damaged(path: Path, why: str) -> LoadError:
    return LoadError(
        f"{path.name} is not a usable safetensors file", at=str(path), why=why, fix="copy or download the file again"
    )


def _read_json(file: Any, path: Path, file_bytes: int) -> tuple[dict[str, Any], int]:
    if file_bytes == 0:
        raise _damaged(path, "the file is empty (0 bytes)")
    if file_bytes < _LENGTH_BYTES:
        raise _damaged(path, f"{file_bytes} bytes are too few for the 8 bytes of header length")
    length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
    if length > _MAX_HEADER_BYTES:
        raise _damaged(path, f"its first 8 bytes announce a header of {length} bytes; {_MAX_HEADER_BYTES} is the limit")
    if _LENGTH_BYTES + length > file_bytes:
        raise _damaged(path, f"the header should end at byte {_LENGTH_BYTES + length}, the file at {file_bytes}")
    try:
        header = json.loads(file.read(length).decode("utf-8"), object_pairs_hook=_unique_keys)
    except ValueError as error:  # JSON, UTF-8 and duplicate keys alike
        raise _damaged(path, f"the header is not valid JSON: {error}") from error
    if not isinstance(header, dict):
        raise _damaged(path, f"the header is a JSON {type(header).__name__}, not an object")
    return header, _LENGTH_BYTES + length


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"duplicate key {next(key for key in keys if keys.count(key) > 1)!r}")
    return result


def _is_counts(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)


def _parse_entry(path: Path, key: str, value: Any, data_start: int) -> TensorEntry:
    if not isinstance(value, dict) or not {"dtype", "shape", "data_offsets"} <= value.keys():
        raise _damaged(path, f"the entry of {key!r} is not an object with dtype, shape and data_offsets")
    name, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not _is_counts(shape) or not _is_counts(offsets) or len(offsets) != 2:
        raise _damaged(path, f"{key!r} has shape {shape} and data_offsets {offsets}")
    if not isinstance(name, str) or name not in _DTYPES:
        raise LoadError(
            f"{key!r} has dtype {name}, which Shardwise does not read",
            at=str(path),
            why=f"known dtypes: {', '.join(_DTYPES)}",
        )
    nbytes = offsets[1] - offsets[0]
    expected = math.prod(shape) * _DTYPES[name].itemsize
    if nbytes != expected:
        raise _damaged(path, f"{key!r} is {name} of shape {shape}, {expected} bytes, but its offsets span {nbytes}")
    return TensorEntry(path, _DTYPES[name], tuple(shape), data_start + offsets[0], nbytes)


def _check_extents(path: Path, entries: dict[str, TensorEntry], data_start: int, file_bytes: int) -> None:
    end = data_start
    for key, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].nbytes)):
        if entry.start != end:
            what = "overlaps the tensor before it" if entry.start < end else "leaves a hole before it"
            raise _damaged(path, f"{key!r} starts at byte {entry.start} and {what}, which ends at {end}")
        end = entry.start + entry.nbytes
    if end > file_bytes:
        missing = sum(entry.start + entry.nbytes > file_bytes for entry in entries.values())
        raise _damaged(
            path,
            f"truncated: the tensors end at byte {end}, the file at {file_bytes}; {missing} tensors are incomplete",
        )
    if end < file_bytes:
        raise _damaged(path, f"the tensors end at byte {end}, but the file goes on to {file_bytes}")
