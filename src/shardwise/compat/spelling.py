"""Parameters that a document and its package spell differently."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

__all__ = ["also_spelled"]

_Function = TypeVar("_Function", bound=Callable[..., Any])


def also_spelled(*optional: str, **others: str) -> Callable[[_Function], _Function]:
    """Lets callers spell parameters otherwise, `also_spelled(output_sizes="output_size")`, or leave out some that the
    document does not let them: these are None then.

    Raises:
        TypeError: when called with both.
    """

    def decorate(function: _Function) -> _Function:
        signature = inspect.signature(function)

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            for other, name in others.items():
                if other in kwargs:
                    if name in kwargs:
                        raise TypeError(f"{function.__qualname__} got both {name!r} and {other!r}")
                    kwargs[name] = kwargs.pop(other)
            if optional:
                kwargs |= dict.fromkeys(set(optional).difference(signature.bind_partial(*args, **kwargs).arguments))
            return function(*args, **kwargs)

        return call  # type: ignore[return-value]

    return decorate
