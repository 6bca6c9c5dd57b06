"""Writes a safetensors file tensor by tensor, with checksums.

The safetensors library writes only tensors that are all in host memory at once. A rank that saves has them on a device,
or as views. The format (https://github.com/huggingface/safetensors#format): 8 bytes with the header's length, the
header as JSON, the tensors' bytes. The library reads the files.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

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
        path: path of the file, which must not exist.
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

    def __enter__(self) -> TensorFileWriter:
        return self

    def __exit__(self, kind: object, *error: object) -> None:
        self.finish() if kind is None else self.close()


def bytes_of(tensor: Tensor) -> memoryview:
    """The bytes of a tensor in host memory, in row-major order; copied only if it is not contiguous."""
    return memoryview(as_bytes(tensor.detach()).numpy().data) if tensor.numel() else memoryview(b"")


def as_bytes(tensor: Tensor) -> Tensor:
    """The elements in row-major order as `uint8`: a view of a contiguous tensor, else of a copy."""
    flat = tensor.contiguous().reshape(-1)
    return flat.as_strided(flat.shape, (1,)).view(torch.uint8)  # one element counts as contiguous whatever its stride


def crc_of(tensor: Tensor) -> int:
    """CRC-32 of a tensor's bytes, as `TensorFileWriter.write` returns it."""
    return zlib.crc32(bytes_of(tensor))
