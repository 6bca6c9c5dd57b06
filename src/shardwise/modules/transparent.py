"""A module around another one that nobody sees: names, parameters and state are those of the one inside."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["Transparent", "seen_through"]


class Transparent(nn.Module):
    """Wraps `module`; its modules and parameters keep their names, and what is not found here is looked for there."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.__dict__["module"] = module  # no child: names have no prefix

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own."""
        return self.__dict__["module"](*args, **kwargs)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Those that this rank holds, by the module's names."""
        return self.__dict__["module"].named_parameters(*args, **kwargs)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Tensor]]:
        """Those that this rank holds, by the module's names."""
        return self.__dict__["module"].named_buffers(*args, **kwargs)

    def named_modules(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Module]]:
        """The module's, by its names."""
        return self.__dict__["module"].named_modules(*args, **kwargs)

    def named_children(self) -> Iterator[tuple[str, nn.Module]]:
        """The module's, by its names."""
        return self.__dict__["module"].named_children()

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The module's; see `shardwise.full_state_dict` for full tensors."""
        return self.__dict__["module"].state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The module's."""
        return self.__dict__["module"].load_state_dict(*args, **kwargs)

    @property
    def config(self) -> Any:
        """Of a transformers model."""
        return self.__dict__["module"].config

    @property
    def dtype(self) -> torch.dtype:
        """Of the first floating-point parameter."""
        return next((each.dtype for each in self.parameters() if each.is_floating_point()), torch.get_default_dtype())

    def train(self, mode: bool = True) -> Transparent:  # noqa: FBT001, FBT002 - torch's signature
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
