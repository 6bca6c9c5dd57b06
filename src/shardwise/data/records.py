"""Records of fine-tuning data: objects from .jsonl files or a data set."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwise.data.corpus import DataSource, digest, json_lines, read_files
from shardwise.errors import LoadError


@dataclass(frozen=True)
class Record:
    """One record.

    Attributes:
        place: file and line, or the row of a data set, for messages.
    """

    place: str
    values: Mapping[str, Any]


def file_records(files: Sequence[Path]) -> DataSource[Record]:
    """The lines of .jsonl files, one object each. Ignores empty lines and a byte order mark.

    Raises:
        LoadError: there are no .jsonl files; while reading: a file cannot be read or is not UTF-8, or a line holds no
            object.
    """
    for file in files:
        if file.suffix != ".jsonl":
            raise LoadError(
                f"{file} is no .jsonl file",
                why="prompts and messages are read from lines of JSON",
                fix="write one object a line, or leave the file out with data.include",
            )

    def records(file: Path) -> Iterator[Record]:
        return (_record(value, f"{file}:{number}") for number, value in json_lines(file))

    size, times, read = read_files(files, records)
    return DataSource(fingerprint=digest("records", times), size=size, read=read)


def dataset_records(rows: Any) -> DataSource[Record]:
    """The rows of one split of a `datasets` data set."""

    def read(on_progress: Callable[[int], None]) -> Iterator[Record]:
        for number, row in enumerate(rows):
            yield _record(row, f"row {number}")
            on_progress(number + 1)

    return DataSource(fingerprint=digest("dataset records", str(rows._fingerprint)), size=len(rows), read=read)


def _record(value: Any, place: str) -> Record:
    if not isinstance(value, Mapping):
        raise LoadError(
            f"expected an object with keys, found {type(value).__name__}",
            at=place,
            fix='a line looks like {"prompt": "...", "response": "..."} or {"messages": [...]}',
        )
    return Record(place, value)
