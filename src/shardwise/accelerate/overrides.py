"""Checks that methods of a library which are overridden here are still the ones that were known."""

import inspect
import sys
from typing import Any

from shardwise.errors import UnsupportedError


def check_overridden(own: type[Any], overridden: type[Any]) -> None:
    """Raises if a method that `own` marks with `@override` is missing in `overridden`, or has other arguments there."""
    for name, method in vars(own).items():
        function = method.__func__ if isinstance(method, staticmethod) else method
        is_property = isinstance(method, property) and not name.startswith("_")
        if not is_property and not getattr(function, "__override__", False):
            continue
        theirs = getattr(overridden, name, None)
        names = set() if is_property else {*inspect.signature(function).parameters} - {"args", "options"}
        if theirs is None or (names and not names <= {*inspect.signature(theirs).parameters}):
            package = overridden.__module__.partition(".")[0]
            raise UnsupportedError(
                f"{overridden.__name__}.{name} of {package} {getattr(sys.modules[package], '__version__', '')}",
                why="Shardwise overrides it, and it is gone or takes other arguments",
                fix=f"use a version of {package} that docs/trainer.md lists",
            )
