"""Warns once about arguments that are accepted and have no effect."""

import functools
import warnings


class CompatWarning(UserWarning):
    """Warning about an argument that is accepted because scripts pass it, and has no effect."""


def warn_idle(function: str, why: str, **given: object) -> None:
    """Warns once about the given (truthy) arguments, which have no effect."""
    names = sorted(name for name, value in given.items() if value)
    if names:
        _warn(f"{function}: {', '.join(names)} change nothing: {why}")


@functools.cache
def _warn(message: str) -> None:
    warnings.warn(message, CompatWarning, stacklevel=4)
