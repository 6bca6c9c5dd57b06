"""A file of documents: their tokens, which tokens are targets, and where each document ends.

# [Note: the file of documents]
Little-endian. The tokens of all documents (uint32; the highest bit marks a target), one entry per document (its end,
uint64; its first target, uint32), and a trailer: magic number, version, both counts, CRC-32 of everything before. The
file depends neither on the row length nor on the kind of rows, so one file serves all of them. It is a cache: its name
is a digest of everything that determines its content.
"""

import struct
import zlib
from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardwise.data.corpus import DataSource, Encoder, digest, text_batches
from shardwise.errors import LoadError
from shardwise.weights.staging import atomic_file, disk_errors

VERSION = 1
TOKEN_TYPE = np.dtype("<u4")
MARK = b"SHDOCUME"
TRAILER = struct.Struct("<8sIQQI")
TARGET = np.uint32(1 << 31)  # the bit that marks a target; vocabularies have fewer tokens by far
ENTRY = np.dtype([("end", "<u8"), ("first_target", "<u4")])


@dataclass(frozen=True)
class Document:
    """One document, or a piece of a long one.

    Attributes:
        tokens: [num_tokens] ids.
        is_target: [num_tokens] bool: whether the model learns to predict the token. False for the first token, which
            has no context.
        ends: whether the document ends with this piece.
    """

    tokens: NDArray[np.uint32]
    is_target: NDArray[np.bool_]
    ends: bool = True


@dataclass(frozen=True)
class Documents:
    """Content of a file of documents.

    Attributes:
        tokens: [num_tokens] uint32, a read-only memory map; `TARGET` marks targets.
        ends: [num_documents] end of each document.
        first_targets: [num_documents] index of the first target inside each document.
    """

    tokens: NDArray[np.uint32]
    ends: NDArray[np.uint64]
    first_targets: NDArray[np.uint32]
    checksum: int

    def read(self, start: int, length: int) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Reads the ids of `length` tokens from token `start` of the file; the mask is True where an id is a target."""
        marked = np.asarray(self.tokens[start : start + length])
        return (marked & ~TARGET).astype(np.int64), (marked & TARGET).astype(np.bool_)


def documents_path(directory: Path, *parts: object) -> Path:
    """Returns the path of the cached documents, which are determined by `parts`."""
    return directory / f"{digest('documents', VERSION, *parts)}.documents"


def text_documents(
    source: DataSource[str | None], encoder: Encoder, on_progress: Callable[[int], None] = lambda done: None
) -> Iterator[Document]:
    """Converts texts to documents, in pieces: the start tokens, all tokens and the separator.

    Every token except the first is a target.
    """
    is_empty = True
    for texts in text_batches(source.read(on_progress)):
        written = [text for text in texts if text is not None]
        encoded = iter(encoder.encode(written) if written else ())  # tokenizers fail on no texts
        for text in texts:
            tokens = np.asarray([encoder.separator] if text is None else next(encoded), dtype=TOKEN_TYPE)
            if is_empty and text is not None and len(tokens):
                tokens = np.concatenate([np.asarray(encoder.start, dtype=TOKEN_TYPE), tokens])
            if len(tokens) and not (is_empty and text is None):
                yield Document(tokens, np.ones(len(tokens), dtype=np.bool_), ends=text is None)
            is_empty = text is None or (is_empty and not len(tokens))


def write_documents(path: Path, documents: Iterable[Document]) -> int:
    """Writes `documents` to `path` atomically; returns the number of targets. A document without one is an error."""
    start = num_tokens = num_targets = checksum = 0
    first_target: int | None = None
    ends, first_targets = array("Q"), array("I")
    fix = "make room, or name another place with data.cache_dir"
    failing = disk_errors(f"cannot write the tokens to {path}", fix=fix)
    with failing, atomic_file(path) as partial, partial.open("wb") as out:
        for piece in documents:
            marked = piece.tokens.astype(TOKEN_TYPE) | np.where(piece.is_target, TARGET, np.uint32(0))
            if num_tokens == start:
                marked[:1] &= ~TARGET
            is_target = marked >= TARGET
            num_targets += int(is_target.sum())
            if first_target is None and is_target.any():
                first_target = num_tokens - start + int(is_target.argmax())
            out.write(marked.data)
            checksum = zlib.crc32(marked.data, checksum)
            num_tokens += len(marked)
            if piece.ends:
                if first_target is None:
                    raise LoadError("a document holds nothing to learn", at=f"document {len(ends)}")
                ends.append(num_tokens)
                first_targets.append(first_target)
                start, first_target = num_tokens, None
        if not ends:
            raise LoadError("the data holds no text", at="data", why="every file or line is empty")
        index = np.empty(len(ends), dtype=ENTRY)
        index["end"], index["first_target"] = ends, first_targets
        out.write(index.data)
        out.write(TRAILER.pack(MARK, VERSION, num_tokens, len(ends), zlib.crc32(index.data, checksum)))
    return num_targets


def read_documents(path: Path, *, verify: bool = False) -> Documents:
    """Opens the documents in `path`; their tokens stay in the file."""
    fix = "remove it: it is made again"
    with disk_errors(f"cannot read the tokens in {path}"), path.open("rb") as file:
        size = path.stat().st_size
        file.seek(max(0, size - TRAILER.size))
        mark, version, num_tokens, number, checksum = TRAILER.unpack(file.read().rjust(TRAILER.size))
        expected = num_tokens * TOKEN_TYPE.itemsize + number * ENTRY.itemsize + TRAILER.size
        if mark != MARK or version != VERSION or size != expected:
            why = f"it has {size:,} bytes of {expected:,}" if mark == MARK else "its end is missing"
            if mark == MARK and version != VERSION:
                why = f"it has version {version}, and this is version {VERSION}"
            raise LoadError(f"{path} is no complete file of documents", why=why, fix=fix)
        file.seek(num_tokens * TOKEN_TYPE.itemsize)
        index: NDArray[Any] = np.frombuffer(file.read(number * ENTRY.itemsize), dtype=ENTRY)
    tokens = np.memmap(path, dtype=TOKEN_TYPE, mode="r", shape=(num_tokens,))
    if verify and zlib.crc32(index.data, zlib.crc32(tokens.data)) != checksum:
        raise LoadError(f"{path} is damaged", why="its checksum is another", fix=fix)
    return Documents(tokens, index["end"], index["first_target"], checksum)
