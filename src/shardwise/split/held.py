"""Counts the memory that lies between forward and backward: exact, on real tensors and on fake ones."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.hooks import RemovableHandle

from shardwise.estimate.memory import HeldBytes

__all__ = ["MemoryCount"]


class MemoryCount(TorchDispatchMode):
    """While active, watches what the operations of a forward make, and tells how much of it still lives.

    Args:
        model: split; its parameters at rest are not counted.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._model = model
        self._at_rest = _Storages()
        self._made = _Storages()
        self._of_parameters = _Storages()
        self._hooks: list[RemovableHandle] = []
        for parameter in model.parameters():
            self._at_rest.add(parameter.to_local() if isinstance(parameter, DTensor) else parameter)

    def __enter__(self) -> MemoryCount:
        # Behind FSDP2's own hooks a module's parameters are the gathered ones.
        register = nn.Module.register_forward_pre_hook  # also where a split sequence refuses hooks of others
        self._hooks = [register(module, self._meet) for module in self._model.modules()]
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for hook in self._hooks:
            hook.remove()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(each, DTensor) for each in types):
            return NotImplemented  # DTensor takes the operation apart; what it makes comes back here
        result = func(*args, **(kwargs or {}))
        given = {id(each.untyped_storage()) for each in _tensors((args, kwargs))}
        for each in _tensors(result):
            if id(each.untyped_storage()) in given:
                continue
            self._made.add(each)
            if func is torch.ops.aten._to_copy.default and args[0] in self._at_rest:
                self._of_parameters.add(each)
        return result

    def held(self) -> HeldBytes:
        """What lives of all that was made inside. Let go of the model's output before, but keep the loss."""
        nbytes = {key: storage.nbytes() for key, storage in self._made.living()}
        gathered = sum(nbytes.get(key, 0) for key, _ in self._of_parameters.living())
        return HeldBytes(activations=sum(nbytes.values()) - gathered, gathered=gathered)

    def _meet(self, module: nn.Module, args: Any) -> None:
        for parameter in module._parameters.values():
            if parameter is not None and not isinstance(parameter, DTensor):
                self._of_parameters.add(parameter)


class _Storages:
    """Storages of tensors, none of them kept alive."""

    def __init__(self) -> None:
        self._refs: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def add(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        self._refs[id(storage)] = weakref.ref(storage)

    def __contains__(self, tensor: Tensor) -> bool:
        ref = self._refs.get(id(tensor.untyped_storage()))
        return ref is not None and ref() is not None

    def living(self) -> list[tuple[int, torch.UntypedStorage]]:
        return [(key, storage) for key, ref in self._refs.items() if (storage := ref()) is not None]


def _tensors(values: Any) -> Iterator[Tensor]:
    for each in tree_iter(values):
        if isinstance(each, AsyncCollectiveTensor):
            yield each.elem  # the wrapper has no memory of its own
        elif isinstance(each, Tensor):
            yield each
