"""`on_split_models`: overrides of a mixin that leave other models to the class beside it."""

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

_Method = TypeVar("_Method", bound=Callable[..., Any])


def on_split_models(method: _Method) -> _Method:
    """Marks a method as an override, for split models. With other models the overridden method runs."""
    return cast(_Method, _Override(method))


class _Override:
    def __init__(self, method: Callable[..., Any]) -> None:
        self.method = method

    def __set_name__(self, owner: type[Any], name: str) -> None:
        @functools.wraps(method := self.method)
        def run(trainer: Any, *args: Any, **options: Any) -> Any:
            if trainer._is_split:
                return method(trainer, *args, **options)
            return getattr(super(owner, trainer), name)(*args, **options)

        run.__override__ = True  # type: ignore[attr-defined] # as typing's `override` does
        setattr(owner, name, run)
