"""Changes arguments and outputs of a module's forward."""

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MethodType
from typing import Any

from torch import Tensor, nn

Change = Callable[[Tensor], Tensor]
Arguments = dict[str, Any]


def argument_names(module: nn.Module) -> tuple[str, ...]:
    """Returns the names of the arguments of the module's forward, in order, without `*args` and `**kwargs`."""
    forward = module.forward
    if "forward" in vars(module) or not isinstance(forward, MethodType):
        return _names_of(forward)  # which may hold a model, and so is not kept
    return _names_of_method(forward.__func__)


@functools.lru_cache(4096)
def _names_of_method(function: Callable[..., Any]) -> tuple[str, ...]:
    return _names_of(MethodType(function, object()))


def _names_of(forward: Callable[..., Any]) -> tuple[str, ...]:
    parameters = inspect.signature(forward).parameters.values()
    return tuple(each.name for each in parameters if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD))


def edit_arguments(module: nn.Module, edit: Callable[[nn.Module, Arguments], None]) -> None:
    """Registers a forward pre-hook that lets `edit` change the module's arguments by name.

    Args:
        edit: called with the module and a dict of its arguments in the caller's order; changes the dict in place. The
            keys of `*args` are their positions as text.
    """
    names = argument_names(module)

    def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return edited(names, args, kwargs, lambda arguments: edit(module, arguments))

    module.register_forward_pre_hook(enter, with_kwargs=True)


def edited(
    names: Sequence[str], args: tuple[Any, ...], kwargs: Mapping[str, Any], edit: Callable[[Arguments], None]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns a call's arguments after `edit` has changed them. `names`: names of the positional arguments."""
    numbers = map(str, range(len(names), len(args)))
    arguments = {**dict(zip((*names, *numbers), args, strict=False)), **kwargs}
    edit(arguments)
    found = list(arguments.items())
    return tuple(value for _, value in found[: len(args)]), dict(found[len(args) :])


def change_arguments(module: nn.Module, names: Iterable[str], change: Change) -> None:
    """Applies `change` to the tensor arguments called `names` in every forward of `module`."""
    changes = dict.fromkeys(names, change)
    edit_arguments(module, lambda _, arguments: change_each(arguments, changes))


def change_each(arguments: Arguments, changes: Mapping[str, Change]) -> None:
    """Applies `changes[name]` to each tensor argument of that name, in place."""
    for name, change in changes.items():
        if isinstance(arguments.get(name), Tensor):
            arguments[name] = change(arguments[name])


def change_hidden(module: nn.Module, change: Change) -> None:
    """Applies `change` to the hidden states that every forward of `module` receives."""

    def edit(module: nn.Module, arguments: Arguments) -> None:
        name = hidden_name(arguments)
        if name is not None:
            arguments[name] = change(arguments[name])

    edit_arguments(module, edit)


def hidden_name(arguments: Arguments) -> str | None:
    """Returns the name of the hidden states' argument: `hidden_states`, else the first floating-point tensor."""
    if isinstance(arguments.get("hidden_states"), Tensor):
        return "hidden_states"
    tensors = {name: value for name, value in arguments.items() if isinstance(value, Tensor)}
    return next((name for name, value in tensors.items() if value.is_floating_point()), None)


def map_first(output: Any, change: Change) -> Any:
    """Returns a module's output with `change` applied: to the tensor, or to the first item of a tuple or list."""
    if isinstance(output, Tensor):
        return change(output)
    return type(output)((change(output[0]), *output[1:])) if isinstance(output, list | tuple) else output
