"""What is accepted and changes nothing here: said once."""

from __future__ import annotations

import functools
import warnings

__all__ = ["CompatWarning", "warn_idle"]


class CompatWarning(UserWarning):
    """An argument that is accepted because scripts pass it, and that changes nothing."""


def warn_idle(function: str, why: str, **given: object) -> None:
    """Warns once about the arguments that are given (truthy) and change nothing."""
    names = sorted(name for name, value in given.items() if value)
    if names:
        _warn(f"{function}: {', '.join(names)} change nothing: {why}")


@functools.cache
def _warn(message: str) -> None:
    warnings.warn(message, CompatWarning, stacklevel=4)
