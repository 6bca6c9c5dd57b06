"""Converts full inputs for modules inside a region: slices, local shapes and shares of a bias.

# [Note: inputs with a local shape]
Some attentions reshape the output of their heads by the size of their input (`embed_dim = hidden_states.size(2)`). No
attribute could be divided for them. A rank computes only its own heads, so the input reports the rank's part of the
size, but still computes with all features.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from shardwise.comm.collectives import copy_to_region
from shardwise.runtime.arguments import change_arguments
from shardwise.runtime.context import Axis
from shardwise.runtime.reading import read_in_forward

_KEEPING = frozenset({"transpose", "permute", "contiguous"})


def install_sliced(module: nn.Module, argument: str, *, dim: int, num_heads: int, enters: bool, axis: Axis) -> None:
    """Passes `module` only this rank's slice of the input called `argument`: features if `dim` is the last dim, else
    heads.

    Args:
        dim: the dim to slice; with heads it may have size batch * num_heads, such as the biases of ALiBi.
        enters: whether the input comes from outside of any region, so that backward must sum its gradient over `axis`.
    """

    def own_part(x: Tensor) -> Tensor:
        return own_slice(copy_to_region(x, axis.group) if enters else x, dim, num_heads, axis)

    change_arguments(module, [argument], own_part)


def own_slice(x: Tensor, dim: int, num_heads: int, axis: Axis) -> Tensor:
    """Returns this rank's slice of an input (see `install_sliced`). Communicates nothing."""
    if dim == x.ndim - 1:
        sizes = axis.even_sizes(x.shape[dim])
        return x.narrow(dim, sum(sizes[: axis.coord]), sizes[axis.coord])
    if x.shape[dim] % num_heads:
        return x  # one for all heads
    own = num_heads // axis.size
    heads = x.unflatten(dim, (-1, num_heads))
    return heads.narrow(dim + 1, axis.coord * own, own).flatten(dim, dim + 1)


def install_local_shapes(module: nn.Module, argument: str, axis: Axis) -> None:
    """Makes `module` see the last dim of its input `argument` as 1 / (number of ranks) of its real size."""
    change_arguments(module, [argument], lambda x: _with_local_size(x, x.shape[-1] // axis.size))


class _LocalShapeTensor(Tensor):
    """Tensor that reports a part of its last dim. Results are plain tensors, except views of the same features."""

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
    """Returns the result of a size query, with the local size for the last dim."""
    dim = args[0] if args else kwargs.get("dim")
    if dim is None:
        return torch.Size((*sizes[:-1], x_local._local_size))
    return x_local._local_size if dim % x_local.dim() == x_local.dim() - 1 else sizes


class _FakeLocalShapeTensor(_LocalShapeTensor, FakeTensor):
    """`_LocalShapeTensor` that is also a fake tensor."""


def _with_local_size(x: Tensor, size: int) -> Tensor:
    x_local: Any = x.view_as(x) if isinstance(x, FakeTensor) else x.as_subclass(_LocalShapeTensor)
    if isinstance(x, FakeTensor):
        x_local.__class__ = _FakeLocalShapeTensor
    x_local._local_size = size
    return x_local


def install_shares(module: nn.Module, names: tuple[str, ...], axis: Axis) -> None:
    """Makes the forward of `module` read the parameters called `names` divided by the size of the axis.

    The module adds them to partial sums, which are then summed over the axis. Stored values do not change. The
    gradients are partial sums.
    """
    read_in_forward(module, names, lambda parameter: parameter / axis.size)
