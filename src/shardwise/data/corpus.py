"""Texts and records for training: finds files, and reads them and data sets piece by piece."""

import hashlib
import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

from shardwise.data.tables import TABLES, is_table, read_table
from shardwise.errors import ConfigError, LoadError, as_error, did_you_mean
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


@dataclass(frozen=True)
class Record:
    """One record of a table or a data set: its place and its fields by name.

    Attributes:
        place: file and line, or the row of a data set, for messages.
        columns: names of its fields by the names that we give them, where they differ.
        directory: against which relative paths in its fields are resolved.
    """

    place: str
    values: Mapping[str, Any]
    columns: Mapping[str, str] = field(default_factory=dict)
    directory: Path = Path()

    def name(self, column: str) -> str:
        """Returns the name of a field."""
        return self.columns.get(column, column)

    def get(self, column: str) -> Any:
        """Returns what the record holds in a column; None if it holds nothing there."""
        return self.values.get(self.name(column))

    def value(self, column: str) -> Any:
        """Returns what the record holds in a column. Raises `LoadError` if it holds nothing there."""
        if (value := self.get(column)) is not None:
            return value
        name, names = self.name(column), [str(name) for name in self.values]
        is_null = name in self.values
        raise LoadError(
            f"{name!r} holds nothing" if is_null else f"there is no key {name!r}{did_you_mean(name, names)}",
            at=self.place,
            why=f"the keys are {', '.join(names)}",
            fix=f"name the key that holds it: data.columns={{{column}: ...}}; "
            "all records of a data set have one data.format",
        )

    def text(self, column: str) -> str:
        """Returns the text in a column. Raises `LoadError` if it holds something else."""
        value = self.value(column)
        if isinstance(value, str):
            return value
        fix = "lists of messages are read with data.format: chat" if isinstance(value, list) else None
        raise LoadError(f"{self.name(column)!r} holds {type(value).__name__}, not text", at=self.place, fix=fix)


def file_source(files: Sequence[Path], *, text_key: str = "text") -> DataSource[str | None]:
    """Builds the source of the text in `files`: a text file is one document, a record of a table is one document."""

    def documents(file: Path) -> Iterator[str | None]:
        if not is_table(file):
            return _blocks(file)
        return itertools.chain.from_iterable(_text_of(_record(*each), text_key) for each in read_table(file))

    return _read_files(files, documents, "files", text_key)


def file_records(files: Sequence[Path]) -> DataSource[Record]:
    """Builds the source of the records of tables."""
    for file in files:
        if not is_table(file):
            raise LoadError(
                f"{file} is no table",
                why=f"prompts and messages are read from {', '.join(TABLES)}",
                fix="write one JSON object a line to a .jsonl file, or leave the file out with data.include",
            )
    return _read_files(files, lambda file: itertools.starmap(_record, read_table(file)), "records")


def _read_files(files: Sequence[Path], read_file: Callable[[Path], Iterator[Item]], *about: str) -> DataSource[Item]:
    """Builds the source of the items of UTF-8 files, one file after the other; its size is in bytes.

    The fingerprint is made of names, sizes and times, because reading every byte would take minutes for large text. A
    file's ctime changes even if its modification time is set back.
    """
    stats = [(str(file.resolve()), file.stat()) for file in files]

    def read(on_progress: Callable[[int], None]) -> Iterator[Item]:
        done = 0
        for file, (_, stat) in zip(files, stats, strict=True):
            fix = "convert it (iconv -f ... -t UTF-8), or leave it out with data.include"
            with (
                disk_errors(f"cannot read {file}"),
                as_error(LoadError, f"{file} is not UTF-8 text", UnicodeDecodeError, fix=fix),
            ):
                yield from read_file(file)
            done += stat.st_size
            on_progress(done)

    times = [(name, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns) for name, stat in stats]
    return DataSource(fingerprint=digest(*about, times), size=sum(stat.st_size for _, stat in stats), read=read)


def _blocks(file: Path) -> Iterator[str | None]:
    with file.open(encoding="utf-8", newline="") as lines:
        block = "".join(lines.readlines(PIECE_CHARS))
        ends = [None] if block else []
        while block:
            yield block
            block = "".join(lines.readlines(PIECE_CHARS))
        yield from ends


def dataset_records(rows: Iterable[Any], *, size: int, fingerprint: str) -> DataSource[Record]:
    """Builds the source of the rows of one split of a `datasets` data set."""

    def read(on_progress: Callable[[int], None]) -> Iterator[Record]:
        for number, row in enumerate(rows):
            yield _record(f"row {number}", row)
            on_progress(number + 1)

    return DataSource(fingerprint=digest("dataset", fingerprint), size=size, read=read)


def dataset_source(*, text_key: str, **dataset: Any) -> DataSource[str | None]:
    """Builds the source of the texts of a data set, one document each; see `dataset_records`."""
    records = dataset_records(**dataset)

    def read(on_progress: Callable[[int], None]) -> Iterator[str | None]:
        for record in records.read(on_progress):
            yield from _text_of(record, text_key)

    return DataSource(fingerprint=digest(text_key, records.fingerprint), size=records.size, read=read)


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


def _record(place: str, value: Any) -> Record:
    if not isinstance(value, Mapping):
        raise LoadError(
            f"expected an object with keys, found {type(value).__name__}",
            at=place,
            fix='a line looks like {"text": "..."}, {"prompt": "...", "response": "..."} or {"messages": [...]}',
        )
    return Record(place, value)


def _text_of(record: Record, key: str) -> tuple[str | None, ...]:
    """Returns the document as pieces of text."""
    if key not in record.values:
        texts = [name for name, value in record.values.items() if isinstance(value, str)]
        fix = "prompts with responses and lists of messages are read with data.format: prompt, or chat"
        raise ConfigError(
            f"data.text_key is {key!r}, which is not there{did_you_mean(key, map(str, record.values))}",
            at=record.place,
            why=f"the keys are {', '.join(map(str, record.values))}",
            fix=f"name the key that holds the text, such as data.text_key={texts[0]}" if len(texts) == 1 else fix,
        )
    text = record.text(key)
    return (text, None) if text else ()


def digest(*parts: object) -> str:
    """Returns 24 hexadecimal digits of the SHA-256 of `parts`: JSON values, bytes, and others as text."""

    def shorten(value: object) -> str:
        return hashlib.sha256(value).hexdigest() if isinstance(value, bytes) else str(value)

    return hashlib.sha256(json.dumps(parts, default=shorten).encode()).hexdigest()[:24]
