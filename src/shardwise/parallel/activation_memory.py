"""Counts the memory kept between forward and backward, exactly, on real and fake tensors."""

import logging
import sys
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.hooks import RemovableHandle

from shardwise.estimate.memory import ActivationBytes
from shardwise.runtime.modes import with_attributes


@contextmanager
def fake_tensors() -> Iterator[None]:
    """Context manager: new tensors are fake. torch's log of failed fake operations is silenced; they still raise."""
    log = logging.getLogger(fake_tensor.__name__)
    with with_attributes(log, disabled=True), FakeTensorMode(allow_non_fake_inputs=True):
        yield


class FakeTensorCorrections(TorchDispatchMode):
    """Corrects fake tensors: grouped products exist in every dtype, waiting returns the same tensor, and what is
    computed from real tensors alone is real.

    Args:
        makes_integers: make new integers real, for forwards that compute the sizes of images from them.
    """

    def __init__(self, *, makes_integers: bool = False) -> None:
        super().__init__()
        self._makes_integers = makes_integers

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default and isinstance(args[0], FakeTensor):  # two of three operations
            return args[0].fake_device
        if func is torch.ops.aten._grouped_mm.default:
            described = func(*(each.bfloat16() for each in args[:2]), *args[2:], **(kwargs or {}))
            return described.to(args[0].dtype)
        if func is torch.ops._c10d_functional.wait_tensor.default:
            return args[0]
        given = [isinstance(each, FakeTensor) for each in tree_iter((args, kwargs)) if isinstance(each, Tensor)]
        if any(given) or not given:
            made = func(*args, **(kwargs or {}))
            is_new = self._makes_integers and not given and isinstance(made, Tensor)
            if not is_new or made.is_floating_point():
                return made
        with unset_fake_temporarily():
            return func(*args, **(kwargs or {}))


_FORETELL = getattr(getattr(ShardingPropagator, "_propagate_tensor_meta_non_cached", None), "__code__", None)

_Storages = weakref.WeakValueDictionary[int, torch.UntypedStorage]
"""Storages of tensors by their ids, none of them kept alive."""


class _Count(TorchDispatchMode):
    """Observes the results of operations. The stored parameters of the split model are not counted."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._at_rest, self._made = _Storages(), _Storages()
        for parameter in model.parameters():
            _add(parameter.to_local() if isinstance(parameter, DTensor) else parameter, self._at_rest)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(each, DTensor) for each in types):
            return NotImplemented  # DTensor takes the operation apart; what it makes comes back here
        result = func(*args, **(kwargs or {}))
        if _is_foretold():
            return result
        self._see(func, args, {id(storage): storage for storage in _storages((args, kwargs))}, result)
        return result

    def _see(self, func: Any, args: Any, given: Mapping[int, torch.UntypedStorage], result: Any) -> None:
        raise NotImplementedError


class MemoryCount(_Count):
    """Context manager that observes the tensors made in a forward and counts those that are still alive."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self._model, self._of_parameters = model, _Storages()
        self._hooks: list[RemovableHandle] = []

    def __enter__(self) -> "MemoryCount":
        # Behind FSDP2's own hooks a module's parameters are the gathered ones.
        register = nn.Module.register_forward_pre_hook  # also where a split sequence refuses hooks of others
        self._hooks = [register(module, self._meet) for module in self._model.modules()]
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for hook in self._hooks:
            hook.remove()

    def _see(self, func: Any, args: Any, given: Mapping[int, torch.UntypedStorage], result: Any) -> None:
        for each in _tensors(result):
            if id(each.untyped_storage()) in given:
                continue
            _add(each, self._made)
            if func is torch.ops.aten._to_copy.default and id(args[0].untyped_storage()) in self._at_rest:
                _add(each, self._of_parameters)

    def total(self) -> ActivationBytes:
        """Returns the bytes still alive of tensors made inside. Delete the model's output first, but not the loss."""
        nbytes = {key: storage.nbytes() for key, storage in self._made.items()}
        gathered = sum(nbytes.get(key, 0) for key in self._of_parameters)
        return ActivationBytes(activations=sum(nbytes.values()) - gathered, gathered=gathered)

    def _meet(self, module: nn.Module, args: Any) -> None:
        for parameter in module._parameters.values():
            if parameter is not None and not isinstance(parameter, DTensor):
                _add(parameter, self._of_parameters)


class PeakCount(_Count):
    """Context manager that records the peak memory of all tensors made inside, gradients included.

    Workspace inside operations and buffers of the communication backend are not counted.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.peak_bytes = 0
        self._sizes: dict[int, int] = {}  # of what lived when it was summed last, and was made or has grown since
        self._most = 0  # their sum: what lives, or more

    def _see(self, func: Any, args: Any, given: Mapping[int, torch.UntypedStorage], result: Any) -> None:
        for key, storage in given.items():
            if self._made.get(key) is storage:  # FSDP2 frees what it gathered by size, and gathers into it again
                self._note(key, storage, grown=storage.nbytes() - self._sizes[key])
        for storage in _storages(result):
            key = id(storage)
            if key not in given and self._at_rest.get(key) is not storage and self._made.get(key) is not storage:
                self._made[key] = storage
                self._note(key, storage, grown=storage.nbytes())
        if self._most > self.peak_bytes:
            self._sizes = {key: storage.nbytes() for key, storage in list(self._made.items())}
            self._most = sum(self._sizes.values())
            self.peak_bytes = max(self.peak_bytes, self._most)

    def _note(self, key: int, storage: torch.UntypedStorage, *, grown: int) -> None:
        self._sizes[key] = storage.nbytes()
        self._most += max(grown, 0)


def _is_foretold() -> bool:
    """Whether DTensor is running an operation on meta tensors of the full shape, only to learn the result's shape."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code is _FORETELL:
            return True
        frame = frame.f_back
    return False


def _add(tensor: Tensor, storages: _Storages) -> None:
    storage = tensor.untyped_storage()
    storages[id(storage)] = storage


def _storages(values: Any) -> Iterator[torch.UntypedStorage]:
    return (each.untyped_storage() for each in _tensors(values))


def _tensors(values: Any) -> Iterator[Tensor]:
    for each in tree_iter(values):
        if isinstance(each, AsyncCollectiveTensor):
            yield each.elem  # the wrapper has no memory of its own
        elif isinstance(each, Tensor):
            yield each
