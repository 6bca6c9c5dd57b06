"""Assignments to `data` of parameters of which ranks hold parts: accepted, or an error."""

from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import optimizer as torch_optimizer
from torch.utils import _foreach_utils

from shardwise.errors import UnsupportedError
from shardwise.parameters.registry import DataHandling, find_parameters

_DATA: Any = Tensor.data


class _AssignedDTensor(DTensor):
    """A `DTensor` parameter that accepts a `DTensor` assigned to `data`. torch would keep the old values."""

    def _get_data(self) -> Any:
        return _DATA.__get__(self)

    def _set_data(self, value: Tensor) -> None:
        def kind(x: Any) -> Any:
            return isinstance(x, DTensor) and (x.shape, x.dtype, x.placements)

        if kind(value) != kind(self):
            raise _refused(
                f"p.data = a {type(value).__name__} of {list(value.shape)}", self.to_local().shape, self.dtype
            )
        with torch.no_grad():
            self._local_tensor.copy_(value._local_tensor)  # type: ignore[attr-defined]  # a `DTensor`

    data = property(_get_data, _set_data)

    def detach(self) -> Any:
        """Like torch, but of the same class, as `nn.Parameter` requires."""
        value = super().detach()
        value.__class__ = type(self)
        return value

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        copied = memo[id(self)] = nn.Parameter(DTensor.detach(self).clone(), self.requires_grad)
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        return DTensor.detach(self).__reduce_ex__(protocol)


def take_assignments(parameter: Any) -> None:
    """Makes a `DTensor` parameter accept assignments to its `data`, or raise."""
    if type(parameter) is DTensor:
        parameter.__class__ = _AssignedDTensor


def check_assignments(model: nn.Module) -> None:
    """Checks assignments to `data` of a split model's parameters: with data axes immediately, with only tp at the next
    training forward.
    """
    entries = []
    for _, parameter, entry in find_parameters(model):
        entries += [entry] if entry is not None else []
        take_assignments(parameter)
    if any(entry.split is not None and entry.data is not DataHandling.FSDP for entry in entries):
        model.register_forward_pre_hook(_check_shapes, prepend=True)


def _check_shapes(model: nn.Module, *_: Any) -> None:
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        deque(find_parameters(model), maxlen=0)


def _refused(what: str, shape: Sequence[int], dtype: torch.dtype) -> UnsupportedError:
    return UnsupportedError(
        f"{what}, of a parameter of which this rank holds a part",
        why=f"that is {list(shape)} of {dtype}, split as before",
        fix="assign what was made of p (p.data * 0.5, a clone of p), or load full tensors by load_state_dict",
    )


for _types in (torch_optimizer._foreach_supported_types, _foreach_utils._foreach_supported_types):
    _types.append(_AssignedDTensor)  # as torch does for `DTensor`
