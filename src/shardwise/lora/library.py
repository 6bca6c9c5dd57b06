"""Imports the optional `peft` library on demand."""

import importlib
from typing import Any

from shardwise.errors import ConfigError


def peft() -> Any:
    """The library.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        return importlib.import_module("peft")
    except ImportError as error:
        raise ConfigError(
            "adapters need peft, which cannot be imported", why=str(error), fix="pip install 'peft>=0.21'"
        ) from error
