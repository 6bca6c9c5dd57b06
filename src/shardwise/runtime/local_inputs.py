"""What a module in a region is given of full tensors: its part of an input, a local shape, its share of a bias.

# [Note: inputs with a local shape]
Some attentions reshape what their heads computed by the size of what they were given
(`embed_dim = hidden_states.size(2)`), which no attribute says that could be divided. On a rank, what the heads computed
is a part; so the input is made to report the part's size, and still computes with all of its features.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from shardwise.comm.collectives import copy_to_region
from shardwise.runtime.arguments import change_arguments
from shardwise.runtime.axis import Axis
from shardwise.runtime.reading import read_in_forward

__all__ = ["install_local_shapes", "install_shares", "install_sliced", "own_slice"]

_KEEPING = frozenset({"transpose", "permute", "contiguous"})


def install_sliced(module: nn.Module, argument: str, *, dim: int, num_heads: int, enters: bool, axis: Axis) -> None:
    """Gives `module` its own part of an input: of features, its last dim, a run; along another `dim`, its heads.

    Heads stand in the dim once, or in a row for every sequence.

    Args:
        enters: whether the input comes from outside of any region, so that its gradients must be summed here.
    """

    def own_part(x: Tensor) -> Tensor:
        return own_slice(copy_to_region(x, axis.group) if enters else x, dim, num_heads, axis)

    change_arguments(module, [argument], own_part)


def own_slice(x: Tensor, dim: int, num_heads: int, axis: Axis) -> Tensor:
    """This rank's part of an input, see `install_sliced`. Communicates nothing."""
    if dim == x.ndim - 1:
        sizes = axis.even_sizes(x.shape[dim])
        return x.narrow(dim, sum(sizes[: axis.coord]), sizes[axis.coord])
    if x.shape[dim] % num_heads:
        return x  # one for all heads
    own = num_heads // axis.size
    heads = x.unflatten(dim, (-1, num_heads))
    return heads.narrow(dim + 1, axis.coord * own, own).flatten(dim, dim + 1)


def install_local_shapes(module: nn.Module, argument: str, axis: Axis) -> None:
    """Makes the input called `argument` report 1 / tp of the size of its last dim to `module`."""
    change_arguments(module, [argument], lambda x: _with_local_size(x, x.shape[-1] // axis.size))


class _LocalShapeTensor(Tensor):
    """A tensor that reports a part of its last dim; whatever is computed from it, except views of the same features,
    is a plain tensor.
    """

    _local_size: int

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            out = func(*args, **(kwargs or {}))
            x_local, name = args[0] if args else None, getattr(func, "__name__", "")
            if not isinstance(x_local, _LocalShapeTensor):
                return out
            if name == "size" or func == Tensor.shape.__get__:  # type: ignore[attr-defined]
                return _with_last(out, x_local, args[1:], kwargs or {})
            if name in _KEEPING and out.shape[-1] == x_local.shape[-1]:
                return _with_local_size(out, x_local._local_size)
            return out


def _with_last(sizes: Any, x_local: _LocalShapeTensor, args: Any, kwargs: Any) -> Any:
    """What was asked of a tensor's sizes, with the local size for its last dim."""
    dim = args[0] if args else kwargs.get("dim")
    if dim is None:
        return torch.Size((*sizes[:-1], x_local._local_size))
    return x_local._local_size if dim % x_local.dim() == x_local.dim() - 1 else sizes


class _FakeLocalShapeTensor(_LocalShapeTensor, FakeTensor):
    """The same of a tensor without values, which must stay one."""


def _with_local_size(x: Tensor, size: int) -> Tensor:
    x_local: Any = x.view_as(x) if isinstance(x, FakeTensor) else x.as_subclass(_LocalShapeTensor)
    if isinstance(x, FakeTensor):
        x_local.__class__ = _FakeLocalShapeTensor
    x_local._local_size = size
    return x_local


def install_shares(module: nn.Module, names: tuple[str, ...], axis: Axis) -> None:
    """Makes the forward of `module` read the parameters called `names` divided by the size of the axis.

    The module adds them to partial sums, which are then summed over the axis. Stored values do not change. Their
    gradients are partial.
    """
    read_in_forward(module, names, lambda parameter: parameter / axis.size)
