"""The tensors among the arguments and outputs of a module's forward, changed in place of the caller's."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

__all__ = ["Change", "argument_names", "map_first", "map_inputs"]

Change = Callable[[Tensor], Tensor]


def map_inputs(
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    on_hidden: Change,
    on_other: Callable[[str, Tensor], Tensor] = lambda name, x: x,
    names: Sequence[str] = (),
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Changes a module's hidden states, and the other floating-point tensors among its inputs.

    The hidden states are the first of them: transformers passes them first, or by the name `hidden_states`.

    Args:
        on_other: is told the name of the input, too.
        names: of the positional arguments.
    """
    first = [name for name in ("hidden_states",) if name in kwargs]
    seen = bool(first)

    def changed(name: str, value: Any) -> Any:
        nonlocal seen
        if not isinstance(value, Tensor) or not value.is_floating_point():
            return value
        if not seen:
            seen = True
            return on_hidden(value)
        return on_other(name, value)

    new_kwargs = {name: on_hidden(kwargs[name]) for name in first}
    names = (*names[: len(args)], *map(str, range(len(names), len(args))))
    new_args = tuple(changed(name, value) for name, value in zip(names, args, strict=True))
    rest = {name: value if name in first else changed(name, value) for name, value in kwargs.items()}
    return new_args, rest | new_kwargs


def map_first(output: Any, change: Change) -> Any:
    """Applies `change` to a module's output, or to the first element of it where it is a tuple."""
    if isinstance(output, Tensor):
        return change(output)
    return type(output)((change(output[0]), *output[1:])) if isinstance(output, list | tuple) else output


def argument_names(module: nn.Module) -> list[str]:
    return list(inspect.signature(module.forward).parameters)
