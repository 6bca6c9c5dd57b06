"""Objects by their dotted import paths."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Sequence
from typing import Any

from shardwise.errors import ConfigError, did_you_mean

__all__ = ["import_classes", "import_from_path"]


def import_from_path(path: str) -> Any:
    """The object of a dotted path such as `package.module.Name`.

    Raises:
        ConfigError: it is no such path, or there is no such module or name.
    """
    if not isinstance(path, str) or "." not in path:
        raise ConfigError(
            f"{path!r} is no import path", why="it names a module and something in it", fix="use package.module.Name"
        )
    home, _, name = path.rpartition(".")
    try:
        module = importlib.import_module(home)
    except ModuleNotFoundError as error:
        raise ConfigError(f"cannot import {path!r}", why=str(error), fix="use package.module.Name") from error
    if not hasattr(module, name):
        raise ConfigError(f"{home} has no {name!r}{did_you_mean(name, dir(module))}")
    return getattr(module, name)


def import_classes(class_paths: Sequence[str]) -> list[type]:
    """The classes of dotted import paths.

    Raises:
        ConfigError: a path leads to nothing, or to no class; lists every one. Or it is one path, or None.
    """
    if not isinstance(class_paths, Iterable) or isinstance(class_paths, str):
        raise ConfigError(f"class paths are {class_paths!r}", fix="pass a list of package.module.ClassName")
    found: list[type] = []
    problems: list[str] = []
    for path in class_paths:
        try:
            value = import_from_path(path)
        except ConfigError as error:
            problems.append(error.summary + (f" ({error.why})" if error.why else ""))
            continue
        if isinstance(value, type):
            found.append(value)
        else:
            problems.append(f"{path} is a {type(value).__name__}, not a class")
    if problems:
        raise ConfigError("cannot import every class", why="\n".join(problems), fix="use package.module.ClassName")
    return found
