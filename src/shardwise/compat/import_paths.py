"""Objects by their dotted import paths."""

from __future__ import annotations

import pkgutil
from collections.abc import Iterable, Sequence
from typing import Any

from shardwise.errors import ConfigError, did_you_mean

__all__ = ["import_classes", "import_from_path"]


def import_from_path(path: str) -> Any:
    """Returns the object at a dotted path such as `package.module.Name`.

    Raises:
        ConfigError: `path` is no such path, or nothing stands there.
    """
    try:
        if "." not in path:
            raise ValueError("it names a module and an object in it")
        return pkgutil.resolve_name(path)
    except (TypeError, ValueError, ImportError, AttributeError) as error:
        hint = did_you_mean(error.name, dir(error.obj)) if isinstance(error, AttributeError) and error.name else ""
        raise ConfigError(f"cannot import {path!r}{hint}", why=str(error), fix="use package.module.Name") from error


def import_classes(class_paths: Sequence[str]) -> list[type]:
    """Returns the classes at dotted paths.

    Raises:
        ConfigError: the argument is no list, or some paths lead to no class; the error lists every one.
    """
    if not isinstance(class_paths, Iterable) or isinstance(class_paths, str):
        raise ConfigError(f"class paths are {class_paths!r}", fix="pass a list of package.module.ClassName")
    classes: list[type] = []
    problems: list[str] = []
    for path in class_paths:
        try:
            value = import_from_path(path)
        except ConfigError as error:
            problems.append(f"{error.summary} ({error.why})")
            continue
        if isinstance(value, type):
            classes.append(value)
        else:
            problems.append(f"{path} is a {type(value).__name__}, not a class")
    if problems:
        raise ConfigError("cannot import every class", why="\n".join(problems), fix="use package.module.ClassName")
    return classes
