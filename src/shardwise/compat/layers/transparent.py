"""A module around another one that nobody sees: names, parameters and state are those of the one inside."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

__all__ = ["Transparent", "seen_through"]


def _delegated(name: str) -> Callable[..., Any]:
    """The method of that name of the module inside: of what this rank holds, by the module's names."""

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.__dict__["module"], name)(*args, **kwargs)

    call.__name__, call.__doc__ = name, getattr(nn.Module, name).__doc__
    return call


class Transparent(nn.Module):
    """Wraps `module`; its modules and parameters keep their names, and what is not found here is looked for there."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.__dict__["module"] = module  # no child: names have no prefix

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own."""
        return self.__dict__["module"](*args, **kwargs)

    named_parameters = _delegated("named_parameters")
    named_buffers = _delegated("named_buffers")
    named_modules = _delegated("named_modules")
    named_children = _delegated("named_children")
    state_dict = _delegated("state_dict")
    load_state_dict = _delegated("load_state_dict")
    zero_grad = _delegated("zero_grad")

    @property
    def config(self) -> Any:
        """Of a transformers model."""
        return self.__dict__["module"].config

    @property
    def dtype(self) -> torch.dtype:
        """Of the first floating-point parameter."""
        return next((each.dtype for each in self.parameters() if each.is_floating_point()), torch.get_default_dtype())

    def apply(self, fn: Callable[[nn.Module], None]) -> Transparent:
        """Calls `fn` with every module inside."""
        self.__dict__["module"].apply(fn)
        return self

    def _apply(self, fn: Any, recurse: bool = True) -> Transparent:
        """Moves or casts the module inside, as `to` and `half` ask for."""
        self.__dict__["module"]._apply(fn, recurse)
        return self

    def train(self, mode: bool = True) -> Transparent:
        """Sets the mode of the module, and of this wrapper."""
        self.training = mode
        self.__dict__["module"].train(mode)
        return self

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["module"], name)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.__dict__['module']!r})"


def seen_through(module: nn.Module) -> nn.Module:
    """The module inside of every `Transparent` around it."""
    while isinstance(module, Transparent):
        module = module.__dict__["module"]
    return module
