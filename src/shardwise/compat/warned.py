"""What is accepted and changes nothing here: said once."""

from __future__ import annotations

import functools
import warnings

__all__ = ["CompatWarning", "warn_once"]


class CompatWarning(UserWarning):
    """An argument that is accepted because scripts pass it, and that changes nothing."""


@functools.cache
def warn_once(message: str) -> None:
    """Warns, the first time in this process that `message` is given."""
    warnings.warn(message, CompatWarning, stacklevel=3)
