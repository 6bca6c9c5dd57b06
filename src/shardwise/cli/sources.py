"""Opens what `data:` names: files, or a data set of the `datasets` library."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from shardwise.data.config import DataConfig, patterns_of
from shardwise.data.corpus import DataSource, dataset_source, file_source, find_files
from shardwise.data.records import Record, dataset_records, file_records
from shardwise.errors import ConfigError, LoadError

__all__ = ["import_datasets", "open_records", "open_source"]


def open_source(config: DataConfig) -> DataSource[str | None]:
    """The documents that `config` names.

    Raises:
        LoadError: there is nothing there, or it cannot be read.
        ConfigError: `datasets` is not installed.
    """
    if config.path is not None:
        return file_source(find_files(Path(config.path), patterns_of(config)), text_key=config.text_key)
    return dataset_source(_open_dataset(config), text_key=config.text_key)


def open_records(config: DataConfig) -> DataSource[Record]:
    """The records that `config` names: prompts with responses, or lists of messages. Raises the errors of
    `open_source`.
    """
    if config.path is not None:
        return file_records(find_files(Path(config.path), patterns_of(config)))
    return dataset_records(_open_dataset(config))


def import_datasets(config: DataConfig) -> Any:
    """The library that opens `config.dataset`. Raises `ConfigError` if it is not installed."""
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
            saved = datasets.load_from_disk(name)
            return saved[config.split] if isinstance(saved, dict) else saved
        return datasets.load_dataset(name, config.subset, split=config.split)
    except (KeyError, OSError, ValueError) as error:
        raise LoadError(
            f"datasets cannot open {config.split!r} of {name!r}", at="data.dataset", why=str(error)
        ) from error
