"""Text for training: finds files and data sets, and reads them piece by piece."""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from shardwise.data.tables import is_table, read_table
from shardwise.errors import ConfigError, LoadError, did_you_mean
from shardwise.weights.staging import disk_errors

PIECE_CHARS = 1 << 20  # larger text files are encoded in pieces of about this size, cut at line ends
ENCODE_CHARS = 4 << 20  # text given to the tokenizer at once; fast tokenizers work on its pieces in parallel

Item = TypeVar("Item")


@dataclass(frozen=True, kw_only=True)
class DataSource(Generic[Item]):
    """Items in a fixed order. For text: the pieces of every non-empty document, each document followed by None.

    Attributes:
        fingerprint: digest that changes when the items change.
        size: amount to read, in the source's own unit; progress is a share of it.
        read: yields every item, and calls its argument with the amount read so far.
    """

    fingerprint: str
    size: int
    read: Callable[[Callable[[int], None]], Iterator[Item]]


@dataclass(frozen=True, kw_only=True)
class Encoder:
    """The parts of a tokenizer that packing uses.

    Attributes:
        encode: texts -> token ids of each, without special tokens.
        separator: id of the token that ends a document.
        start: ids of the tokens that begin a document.
        fingerprint: digest of the vocabulary and its rules.
    """

    encode: Callable[[list[str]], Sequence[Sequence[int]]]
    separator: int
    fingerprint: str
    start: tuple[int, ...] = ()


def find_files(path: Path, include: Sequence[str]) -> tuple[Path, ...]:
    """Returns the file `path`, or the files below the directory `path` that match a glob pattern of `include`, sorted.

    Hidden files, and files in hidden directories, are left out.
    """
    with disk_errors(f"cannot read {path}"):  # a name too long, a directory that one may not look into
        if path.is_file():
            return (path,)
        is_dir = path.is_dir()
    if not is_dir:
        siblings = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
        raise LoadError(
            f"there is no file or directory {path}{did_you_mean(path.name, siblings)}",
            fix="give an existing path, or data.dataset for the datasets library",
        )
    found = {file for pattern in include for file in path.glob(pattern) if file.is_file()}
    files = sorted(file for file in found if not any(part.startswith(".") for part in file.relative_to(path).parts))
    if not files:
        suffixes = sorted({entry.suffix or entry.name for entry in path.rglob("*") if entry.is_file()})
        raise LoadError(
            f"no file below {path} matches {', '.join(include)}",
            why=f"it holds {', '.join(suffixes[:12])}" if suffixes else "it holds no files",
            fix="say which files to read, such as data.include=['**/*.log']",
        )
    return tuple(files)


def file_source(files: Sequence[Path], *, text_key: str = "text") -> DataSource[str | None]:
    """Builds the source of the text in `files`: a text file is one document, a record of a table is one document.

    The fingerprint is made of names, sizes and times, because reading every byte would take minutes for large text. A
    file's ctime changes even if its modification time is set back.
    """

    def documents(file: Path) -> Iterator[str | None]:
        return _column(file, text_key) if is_table(file) else _blocks(file)

    size, times, read = read_files(files, documents)
    return DataSource(fingerprint=digest("files", text_key, times), size=size, read=read)


def read_files(
    files: Sequence[Path], read_file: Callable[[Path], Iterator[Item]]
) -> tuple[int, list[tuple[str, int, int, int]], Callable[[Callable[[int], None]], Iterator[Item]]]:
    """Prepares to read files one after the other.

    Args:
        files: UTF-8 files, in this order.

    Returns:
        Their total size in bytes; name, size and times of each file; and a function that yields all items, calls its
            argument with the bytes read so far, and raises `LoadError` if a file cannot be read.
    """
    stats = [(str(file.resolve()), file.stat()) for file in files]

    def read(on_progress: Callable[[int], None]) -> Iterator[Item]:
        done = 0
        for file, (_, stat) in zip(files, stats, strict=True):
            try:
                with disk_errors(f"cannot read {file}"):
                    yield from read_file(file)
            except UnicodeDecodeError as error:
                fix = "convert it (iconv -f ... -t UTF-8), or leave it out with data.include"
                raise LoadError(f"{file} is not UTF-8 text", why=str(error), fix=fix) from error
            done += stat.st_size
            on_progress(done)

    times = [(name, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns) for name, stat in stats]
    return sum(stat.st_size for _, stat in stats), times, read


def _blocks(file: Path) -> Iterator[str | None]:
    with file.open(encoding="utf-8", newline="") as lines:
        block = "".join(lines.readlines(PIECE_CHARS))
        ends = [None] if block else []
        while block:
            yield block
            block = "".join(lines.readlines(PIECE_CHARS))
        yield from ends


def _column(file: Path, text_key: str) -> Iterator[str | None]:
    for place, document in read_table(file):
        yield from _text_of(document, text_key, place)


def dataset_source(rows: Any, *, text_key: str, size: int, fingerprint: str) -> DataSource[str | None]:
    """Returns the rows of one split of a `datasets` data set, one document each; see `DataSource`."""

    def read(on_progress: Callable[[int], None]) -> Iterator[str | None]:
        for number, row in enumerate(rows):
            yield from _text_of(row, text_key, f"row {number}")
            on_progress(number + 1)

    return DataSource(fingerprint=digest("dataset", text_key, fingerprint), size=size, read=read)


def text_batches(texts: Iterator[str | None]) -> Iterator[list[str | None]]:
    """Groups texts into batches for the tokenizer."""
    batch: list[str | None] = []
    num_chars = 0
    for text in texts:
        batch.append(text)
        num_chars += len(text or "")
        if num_chars >= ENCODE_CHARS:
            yield batch
            batch, num_chars = [], 0
    yield batch


def _text_of(document: object, key: str, place: str) -> tuple[str | None, ...]:
    """Returns the document as pieces of text."""
    if not isinstance(document, Mapping):
        raise LoadError(
            f"expected an object with the key {key!r}, found {type(document).__name__}",
            at=place,
            fix='a line looks like {"text": "..."}',
        )
    if key not in document:
        texts = [name for name, value in document.items() if isinstance(value, str)]
        fix = "prompts with responses and lists of messages are read with data.format: prompt, or chat"
        raise ConfigError(
            f"data.text_key is {key!r}, which is not there{did_you_mean(key, map(str, document))}",
            at=place,
            why=f"the keys are {', '.join(map(str, document))}",
            fix=f"name the key that holds the text, such as data.text_key={texts[0]}" if len(texts) == 1 else fix,
        )
    text = document[key]
    if not isinstance(text, str):
        raise LoadError(f"{key!r} holds {type(text).__name__}, not text", at=place)
    return (text, None) if text else ()


def digest(*parts: object) -> str:
    """Returns 24 hexadecimal digits of the SHA-256 of `parts`: JSON values, bytes, and others as text."""

    def shorten(value: object) -> str:
        return hashlib.sha256(value).hexdigest() if isinstance(value, bytes) else str(value)

    return hashlib.sha256(json.dumps(parts, default=shorten).encode()).hexdigest()[:24]
