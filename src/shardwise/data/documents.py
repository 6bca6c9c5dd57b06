"""Documents that keep to themselves, as one file: their tokens, which of these are targets, and where each one ends.

# [Note: the file of documents]
Little-endian throughout: the tokens of all documents (uint32, whose highest bit marks a target), one entry a document
(where it ends, uint64; its first target, uint32), and a trailer: mark, version, numbers of both, CRC-32 of what stands
before. It depends neither on the length of rows nor on how they are made, so that one file serves all of them. A flat
file of tokens (`corpus.py`) is another kind, and both are recognised for what they are.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardwise.data.corpus import MARK as MARK_OF_TOKENS
from shardwise.data.corpus import TOKEN_TYPE, digest, disk_errors
from shardwise.errors import LoadError
from shardwise.weights.staging import atomic_file

__all__ = ["Document", "Documents", "documents_path", "read_documents", "write_documents"]

VERSION = 1
MARK = b"SHDOCUME"
TRAILER = struct.Struct("<8sIQQI")
TARGET = np.uint32(1 << 31)
"""The bit that marks a target; vocabularies have fewer tokens by far."""
ENTRY = np.dtype([("end", "<u8"), ("first_target", "<u4")])


@dataclass(frozen=True)
class Document:
    """One document.

    Attributes:
        tokens: [num_tokens] ids.
        is_target: [num_tokens] bool: whether a token is learned. The first one has nothing to be predicted from, and is
            none.
    """

    tokens: NDArray[np.uint32]
    is_target: NDArray[np.bool_]


@dataclass(frozen=True)
class Documents:
    """What a file of documents holds.

    Attributes:
        tokens: [num_tokens] uint32, a read-only memory map; `TARGET` marks targets.
        ends: [num_documents] where each document ends.
        first_targets: [num_documents] the place of its first target in each document.
        checksum: of all of it.
    """

    tokens: NDArray[np.uint32]
    ends: NDArray[np.uint64]
    first_targets: NDArray[np.uint32]
    checksum: int

    def read(self, start: int, length: int) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Ids of `length` tokens from `start`, and which of them are targets."""
        marked = np.asarray(self.tokens[start : start + length])
        return (marked & ~TARGET).astype(np.int64), (marked & TARGET).astype(np.bool_)


def documents_path(directory: Path, *parts: object) -> Path:
    """Where the documents are kept of which `parts` decide everything."""
    return directory / f"{digest('documents', VERSION, *parts)}.documents"


def write_documents(path: Path, documents: Iterable[Document]) -> None:
    """Writes `documents` to `path`, which appears only when it is complete; those without a target are an error.

    Raises:
        LoadError: there are none, or `path` cannot be written; and what reading them raises.
    """
    num_tokens = checksum = 0
    entries: list[tuple[int, int]] = []
    fix = "make room, or name another place with data.cache_dir"
    failing = disk_errors(f"cannot write the documents to {path}", fix=fix)
    with failing, atomic_file(path) as partial, partial.open("wb") as out:
        for document in documents:
            is_target = document.is_target.copy()
            is_target[:1] = False
            if not is_target.any():
                raise LoadError("a document holds nothing to learn", at=f"document {len(entries)}")
            marked = document.tokens.astype(TOKEN_TYPE) | np.where(is_target, TARGET, np.uint32(0))
            out.write(marked.data)
            checksum = zlib.crc32(marked.data, checksum)
            num_tokens += len(marked)
            entries.append((num_tokens, int(is_target.argmax())))
        if not entries:
            raise LoadError("the data holds no text", at="data", why="every file or line is empty")
        index = np.array(entries, dtype=ENTRY)
        out.write(index.data)
        out.write(TRAILER.pack(MARK, VERSION, num_tokens, len(entries), zlib.crc32(index.tobytes(), checksum)))


def read_documents(path: Path, *, verify: bool = False) -> Documents:
    """The documents in `path`; their tokens stay in the file.

    Args:
        path: what `write_documents` wrote.
        verify: also read all of it, and compare the checksum.

    Raises:
        LoadError: the file is none of documents, of another version, or has been cut or changed.
    """
    fix = "remove it: it is made again"
    with disk_errors(f"cannot read the documents in {path}"), path.open("rb") as file:
        size = path.stat().st_size
        file.seek(max(0, size - TRAILER.size))
        trailer = file.read()
        mark, version, num_tokens, number, checksum = TRAILER.unpack(trailer.rjust(TRAILER.size))
        expected = num_tokens * TOKEN_TYPE.itemsize + number * ENTRY.itemsize + TRAILER.size
        if mark != MARK or version != VERSION or size != expected:
            why = _what_it_is(trailer, mark, version, f"it has {size:,} bytes of {expected:,}")
            raise LoadError(f"{path} is no complete file of documents", why=why, fix=fix)
        file.seek(num_tokens * TOKEN_TYPE.itemsize)
        index: NDArray[Any] = np.frombuffer(file.read(number * ENTRY.itemsize), dtype=ENTRY)
    tokens = np.memmap(path, dtype=TOKEN_TYPE, mode="r", shape=(num_tokens,))
    if verify and zlib.crc32(index.tobytes(), zlib.crc32(tokens.data)) != checksum:
        raise LoadError(f"{path} is damaged", why="its checksum is another", fix=fix)
    return Documents(tokens, index["end"], index["first_target"], checksum)


def _what_it_is(trailer: bytes, mark: bytes, version: int, cut: str) -> str:
    if mark == MARK:
        return cut if version == VERSION else f"it has version {version}, and this is version {VERSION}"
    return "it is a flat file of tokens" if MARK_OF_TOKENS in trailer else "its end is missing"
