"""Plain Hugging Face safetensors, streamed: one file, or numbered shards with an index.

# [Note: file by file]
All files are written to a hidden directory inside the target, on the same disk, and flushed. `finish` moves them into
the target one by one. It removes nothing except older weights. The file that `from_pretrained` looks for first comes
last: `model.safetensors`, or the index. Old ones of both are removed first. So a crash in between leaves no model to
load, and never parts of two models.

The safetensors library writes only tensors that are all in host memory at once. A rank that saves has them on a device,
or as views. The format (https://github.com/huggingface/safetensors#format): 8 bytes with the header's length, the
header as JSON, the tensors' bytes. The library reads the files.
"""

import json
import os
import re
import shutil
import uuid
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from shardwise.errors import LoadError, as_error
from shardwise.weights.locate import ADAPTER_CONFIG
from shardwise.weights.staging import disk_errors, flush_path, is_url

DTYPES: dict[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""What the format calls the dtypes it has."""

_PIECE_BYTES = 2**22  # written and checksummed together, while it is in the processor's cache


class TensorFileWriter:
    """Writes one file; a context manager that flushes it at the end of the block.

    Args:
        tensors: name, dtype and shape of each tensor, in the order of the `write` calls: wide dtypes first, so that
            each tensor is aligned to its element size.

    Attributes:
        header_crc: CRC-32 of everything before the tensors' bytes.
        num_bytes: bytes written so far.
    """

    def __init__(self, path: Path, tensors: Sequence[tuple[str, torch.dtype, Sequence[int]]]) -> None:
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        end = 0
        for name, dtype, shape in tensors:
            start, end = end, end + torch.Size(shape).numel() * dtype.itemsize
            header[name] = {"dtype": DTYPES[dtype], "shape": list(shape), "data_offsets": [start, end]}
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        text = len(text).to_bytes(8, "little") + text
        self.header_crc, self.num_bytes = zlib.crc32(text), 0
        self._file = path.open("xb", buffering=0)
        self._write(memoryview(text))

    def write(self, tensor: Tensor) -> int:
        """Appends the next tensor, which must be in host memory; returns the CRC-32 of its bytes."""
        content = bytes_of(tensor)
        crc = 0
        for at in range(0, len(content), _PIECE_BYTES):
            piece = content[at : at + _PIECE_BYTES]
            crc = zlib.crc32(piece, crc)
            self._write(piece)
        return crc

    def _write(self, data: memoryview) -> None:
        self.num_bytes += len(data)
        while data:
            data = data[self._file.write(data) or 0 :]

    def finish(self) -> None:
        """Flushes the file to disk, and closes it."""
        try:
            os.fsync(self._file.fileno())
        finally:
            self.close()

    def close(self) -> None:
        """Closes the file."""
        self._file.close()

    def __enter__(self) -> "TensorFileWriter":
        return self

    def __exit__(self, kind: object, *error: object) -> None:
        self.finish() if kind is None else self.close()


def bytes_of(tensor: Tensor) -> memoryview:
    """Returns the bytes of a tensor in host memory, in row-major order; copied only if it is not contiguous."""
    return memoryview(as_bytes(tensor.detach()).numpy().data) if tensor.numel() else memoryview(b"")


def as_bytes(tensor: Tensor) -> Tensor:
    """Returns the elements in row-major order as `uint8`: a view of a contiguous tensor, else of a copy."""
    flat = tensor.contiguous().reshape(-1)
    return flat.as_strided(flat.shape, (1,)).view(torch.uint8)  # one element counts as contiguous whatever its stride


def crc_of(tensor: Tensor) -> int:
    """Returns the CRC-32 of a tensor's bytes, as `TensorFileWriter.write` returns it."""
    return zlib.crc32(bytes_of(tensor))


Planned = tuple[str, torch.dtype, Sequence[int]]  # name, dtype and shape of a tensor

_WEIGHTS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors|model\.safetensors\.index\.json")
_ENTRIES = (SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME)
_STAGING = ".shardwise-export-"


class PlannedShards:
    """The shards of a running export. Several processes may each write some shards, each shard's tensors in order.

    Args:
        max_shard_bytes: bytes of tensors per file; a larger tensor gets its own file.

    Attributes:
        names: names of the tensors of every shard.
        shard_of: number of the shard that holds a tensor, by the tensor's name.
        total_bytes: bytes of all tensors.
    """

    def __init__(self, staging: Path, planned: Sequence[Planned], *, max_shard_bytes: int) -> None:
        self._staging = staging
        self._planned: list[list[Planned]] = []
        self.total_bytes = held = 0
        for each in planned:
            nbytes = torch.Size(each[2]).numel() * each[1].itemsize
            if not self._planned or held + nbytes > max_shard_bytes:
                self._planned.append([])
                held = 0
            self._planned[-1].append(each)
            held += nbytes
            self.total_bytes += nbytes
        self.names = [[each[0] for each in shard] for shard in self._planned]
        self.shard_of = {name: number for number, names in enumerate(self.names) for name in names}
        self._files: dict[int, tuple[TensorFileWriter, list[Planned]]] = {}

    def path(self, number: int) -> Path:
        """Returns the temporary path of a shard."""
        return self._staging / f".shard-{number}"

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """Writes the next tensor of its shard; after the last one, flushes the shard to disk."""
        number = self.shard_of[name]
        if number not in self._files:
            shard = self._planned[number]
            self._files[number] = TensorFileWriter(self.path(number), shard), list(shard)
        file, left = self._files[number]
        planned, dtype, shape = left.pop(0)
        assert (planned, dtype, tuple(shape)) == (name, tensor.dtype, tuple(tensor.shape)), f"{planned} comes first"
        file.write(tensor.cpu())
        if not left:
            file.finish()

    def close(self) -> None:
        """Closes the files."""
        for file, _ in self._files.values():
            file.close()

    def check_complete(self) -> None:
        """Raises `LoadError` if a tensor of this process's shards was not written."""
        for _, left in self._files.values():
            if left:
                raise LoadError(f"{left[0][0]!r} was planned and not written", at=str(self._staging))


def check_target(directory: str | os.PathLike[str]) -> None:
    """Raises `LoadError` if new weights in `directory` would mix with files that are there."""
    for name, what, why in (
        (ADAPTER_CONFIG, "an adapter", "from_pretrained would add it to what is written"),
        ("manifest.json", "a checkpoint", "some of its files would be replaced"),
    ):
        if os.path.isfile(Path(directory) / name):  # noqa: PTH113 - pathlib raises: a name too long
            raise LoadError(f"{str(directory)!r} holds {what}", why=why, fix="remove it, or name another directory")


class PretrainedWriter:
    """Writes weights and companion files into a directory, one tensor at a time. See [Note: file by file].

    A context manager that removes unfinished files.

    Args:
        directory: the target. Files of the same names and older weights are replaced; all others stay.
        max_shard_bytes: bytes of tensors per file; a larger tensor gets its own file.

    Attributes:
        staging: hidden directory in the target that holds all files until `finish`.
    """

    def __init__(self, directory: str | os.PathLike[str], *, max_shard_bytes: int, planned: Sequence[Planned]) -> None:
        check_target(directory)
        self._target = Path(directory)
        what = f"cannot write to {str(directory)[:100]!r}"
        if is_url(directory):
            raise LoadError(what, why="it is a URL", fix="pass a directory of a file system")
        with disk_errors(what, fix="pass a directory that can be made and written"):
            self._target.mkdir(parents=True, exist_ok=True)
            for left in self._target.glob(f"{_STAGING}*"):
                shutil.rmtree(left, ignore_errors=True)
            self.staging = self._target / f"{_STAGING}{uuid.uuid4().hex}"
            self.staging.mkdir()
        self.shards = PlannedShards(self.staging, planned, max_shard_bytes=max_shard_bytes)

    def __enter__(self) -> "PretrainedWriter":
        return self

    def __exit__(self, *error: object) -> None:
        self.abort()

    def abort(self) -> None:
        """Removes the unfinished files."""
        self.shards.close()
        shutil.rmtree(self.staging, ignore_errors=True)

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Writes the next full tensor."""
        with self.companions():
            self.shards.write(name, tensor)

    @contextmanager
    def companions(self) -> Iterator[Path]:
        """Context manager: gives `staging` to a block in which other libraries write files beside the weights."""
        # Of the tokenizers library, a full disk is no OSError.
        with as_error(LoadError, f"cannot write {self._target.name}", at=str(self._target), limit=300):
            yield self.staging

    def finish(self, metadata: Mapping[str, int | str] | None = None) -> None:
        """Writes the index, and moves all files into the target.

        Args:
            metadata: for the index file, besides `total_size`; transformers writes `total_parameters`.
        """
        self.shards.check_complete()
        with self.companions():
            self._name_shards(metadata or {})
            self._move_files()

    def _name_shards(self, metadata: Mapping[str, int | str]) -> None:
        shards = self.shards.names
        if len(shards) == 1:
            self.shards.path(0).rename(self.staging / SAFE_WEIGHTS_NAME)
            return
        weight_map: dict[str, str] = {}
        for number, names in enumerate(shards):
            file_name = f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors"
            self.shards.path(number).rename(self.staging / file_name)
            weight_map.update(dict.fromkeys(names, file_name))
        index = {"metadata": {**metadata, "total_size": self.shards.total_bytes}, "weight_map": weight_map}
        text = json.dumps(index, indent=2, sort_keys=True) + "\n"
        (self.staging / SAFE_WEIGHTS_INDEX_NAME).write_text(text, encoding="utf-8")

    def _move_files(self) -> None:
        """See [Note: file by file]."""
        moved = [path.relative_to(self.staging) for path in self.staging.rglob("*") if not path.is_dir()]
        for path in moved:
            flush_path(self.staging / path)
        old = [path for path in self._target.iterdir() if _WEIGHTS.fullmatch(path.name)]
        for path in old:
            if path.name in _ENTRIES:
                path.unlink()
        for path in sorted(moved, key=lambda path: path.name in _ENTRIES):
            (self._target / path.parent).mkdir(parents=True, exist_ok=True)
            (self.staging / path).replace(self._target / path)
        for path in old:
            if Path(path.name) not in moved:
                path.unlink(missing_ok=True)
        flush_path(self._target)
        self.abort()
