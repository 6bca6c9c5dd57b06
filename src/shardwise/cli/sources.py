"""Opening what `data:` names: files, or a data set of the `datasets` library."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from shardwise.data.config import DataConfig, patterns_of
from shardwise.data.corpus import DataSource, dataset_source, file_source, find_files
from shardwise.data.records import Record, dataset_records, file_records
from shardwise.errors import ConfigError, LoadError, did_you_mean

__all__ = ["import_datasets", "open_records", "open_source"]


def open_source(config: DataConfig) -> DataSource[str | None]:
    """The documents that `config` names.

    Raises:
        LoadError: there is nothing there, or nothing readable.
        ConfigError: `datasets` is not installed, or the split or column does not exist.
    """
    if config.path is not None:
        return file_source(find_files(Path(config.path), patterns_of(config)), text_key=config.text_key)
    return dataset_source(_open_split(config, "text"), text_key=config.text_key)


def open_records(config: DataConfig) -> DataSource[Record]:
    """The records that `config` names: prompts with responses, or lists of messages.

    Raises:
        LoadError: there is nothing there, or nothing readable.
        ConfigError: `datasets` is not installed, or the split or a column does not exist.
    """
    if config.path is not None:
        return file_records(find_files(Path(config.path), patterns_of(config)))
    needed = ("prompt", "response") if config.format == "prompt" else ("messages",)
    return dataset_records(_open_split(config, *needed))


def _open_split(config: DataConfig, *needed: str) -> Any:
    """The split of the data set; it has the columns that the settings `needed` name."""
    rows = _open_dataset(config)
    if isinstance(rows, dict):  # `save_to_disk` writes one split, or a dictionary of them
        if config.split not in rows:
            raise ConfigError(
                f"data.split is {config.split!r}, which {config.dataset} does not have"
                f"{did_you_mean(config.split, rows)}",
                why=f"its splits are {', '.join(rows)}",
            )
        rows = rows[config.split]
    columns = list(rows.column_names)
    for name in needed:
        if (key := getattr(config, f"{name}_key")) not in columns:
            raise ConfigError(
                f"data.{name}_key is {key!r}, which is no column of {config.dataset}{did_you_mean(key, columns)}",
                why=f"the columns are {', '.join(columns)}",
            )
    return rows


def import_datasets(config: DataConfig) -> Any:
    """The library that opens `config.dataset`. Raises `ConfigError` where it is not installed."""
    try:
        import datasets
    except ImportError as error:
        raise ConfigError(
            f"{config.dataset!r} needs the package datasets, which is not installed",
            fix="pip install datasets, or give files with data.path",
        ) from error
    return datasets


def _open_dataset(config: DataConfig) -> Any:
    datasets = import_datasets(config)
    name = str(config.dataset)
    try:
        if any((Path(name) / marker).exists() for marker in ("state.json", "dataset_dict.json")):
            return datasets.load_from_disk(name)
        return datasets.load_dataset(name, config.subset, split=config.split)
    except (OSError, ValueError) as error:
        raise LoadError(f"datasets cannot open {name!r}", at="data.dataset", why=str(error)) from error
