"""Reads files of records: .jsonl, .json, .csv, .tsv and .parquet."""

import csv
import importlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from shardwise.errors import ConfigError, LoadError, as_error


def import_package(name: str, what: str, *, fix: str) -> Any:
    """Returns an optional package's module that `what` needs. Raises `ConfigError` if it is not installed."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        package = name.partition(".")[0]
        raise ConfigError(f"{what} needs the package {package}, which is not installed", fix=fix) from error


def json_lines(file: Path) -> Iterator[tuple[str, Any]]:
    """Yields place and value of every non-empty line of a .jsonl file. Ignores a byte order mark."""
    with file.open(encoding="utf-8-sig") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            with as_error(LoadError, "a line is not JSON", json.JSONDecodeError, at=f"{file}:{number}"):
                value = json.loads(line)
            yield f"{file}:{number}", value


def _json_array(file: Path) -> Iterator[tuple[str, Any]]:
    """Yields the items of an array, which is read whole; a file that holds none is read as lines."""
    text = file.read_text(encoding="utf-8-sig").lstrip()
    if not text.startswith("["):
        yield from json_lines(file)
        return
    with as_error(LoadError, "the array is not JSON", json.JSONDecodeError, at=str(file)):
        items = json.loads(text)
    yield from ((f"{file}, item {number}", item) for number, item in enumerate(items, start=1))


def _separated(file: Path) -> Iterator[tuple[str, Any]]:
    with file.open(encoding="utf-8-sig", newline="") as lines:
        rows = csv.DictReader(lines, dialect="excel-tab" if file.suffix == ".tsv" else "excel", strict=True)
        try:
            names = [name for name in rows.fieldnames or () if name]
            if (twice := max(names, key=names.count, default="")) and names.count(twice) > 1:
                raise LoadError(f"two columns are called {twice!r}", at=f"{file}:1", fix="rename one of them")
            for row in rows:
                if None in row or None in row.values():
                    what = f"a row has another number of fields than the {len(rows.fieldnames or ())} of the first line"
                    raise LoadError(what, at=f"{file}:{rows.line_num}", fix="put fields with separators into quotes")
                yield f"{file}:{rows.line_num}", row
        except csv.Error as error:
            raise LoadError("a row is not CSV", at=f"{file}:{rows.line_num}", why=str(error)) from error


def _parquet(file: Path) -> Iterator[tuple[str, Any]]:
    parquet = import_package("pyarrow.parquet", str(file), fix="pip install pyarrow, or convert the file to .jsonl")
    with as_error(LoadError, f"{file} is not Parquet", importlib.import_module("pyarrow").ArrowException):
        batches = parquet.ParquetFile(file).iter_batches()
        for number, row in enumerate((row for batch in batches for row in batch.to_pylist()), start=1):
            yield f"{file}, row {number}", row


_READERS: dict[str, Callable[[Path], Iterator[tuple[str, Any]]]] = {
    ".jsonl": json_lines,
    ".json": _json_array,
    ".csv": _separated,
    ".tsv": _separated,
    ".parquet": _parquet,
}
TABLES = tuple(_READERS)
"""The suffixes of files that hold records."""


def is_table(file: Path) -> bool:
    """Returns whether a file holds records, by its suffix."""
    return file.suffix.lower() in _READERS


def read_table(file: Path) -> Iterator[tuple[str, Any]]:
    """Yields every record of a table (`is_table`), with its place in words. CSV's are dictionaries of texts."""
    return _READERS[file.suffix.lower()](file)
