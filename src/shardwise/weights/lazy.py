"""`LazyTensor`: represents bytes in a checkpoint. transformers' weight conversions run on it unchanged.

A conversion slices, stacks, concatenates, transposes and reshapes full tensors. On lazy tensors each operation becomes
a node that maps a box back to its sources (`nodes.py`), and no bytes move. Reading a box then touches only the bytes it
is made of.

# [Note: operations outside the algebra]
Other operations (arithmetic, gathers by index, strided slices, operations that depend on values) run at once on their
full arguments. That is correct, but reads more than a box. No conversion of transformers does it.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from shardwise.errors import UnsupportedError
from shardwise.sharding.boxes import Box, full_box, shape_of, slices, volume
from shardwise.sharding.layout import Piece
from shardwise.weights.nodes import Cast, Joined, Narrowed, Node, Permuted, Reshaped, Store, StoredTensor

_aten = torch.ops.aten


class LazyTensor(torch.Tensor):
    """A tensor with shape, strides and dtype that reads its elements on demand.

    It claims to be on the CPU. Its metadata is that of a meta tensor on which the same operations ran.
    """

    node: Node
    meta: torch.Tensor

    @staticmethod
    def __new__(cls, node: Node, meta: torch.Tensor) -> "LazyTensor":
        result = torch.Tensor._make_wrapper_subclass(
            cls, meta.shape, strides=meta.stride(), dtype=meta.dtype, device=torch.device("cpu")
        )
        result.node, result.meta = node, meta
        return result

    @classmethod
    def of_node(cls, node: StoredTensor) -> "LazyTensor":
        """Returns a lazy tensor of a stored tensor."""
        return cls(node, torch.empty(node.shape, dtype=node.dtype, device="meta"))

    @classmethod
    def of_value(cls, value: torch.Tensor) -> "LazyTensor":
        """Returns a lazy tensor of an ordinary tensor in memory."""
        return cls(_node_of(value), value.to("meta"))

    # Every operation goes to __torch_dispatch__, where few and primitive ones arrive.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return _run(func, args, kwargs or {})

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"LazyTensor(shape={list(self.shape)}, dtype={self.dtype}, keys={list(self.keys)})"

    @property
    def keys(self) -> tuple[str, ...]:
        """Keys of the stored tensors it is made of, in order of use."""
        return tuple(dict.fromkeys(node.key for node in self.node.walk() if isinstance(node, StoredTensor)))

    def read(self, box: Box | None = None, *, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Returns the elements `box` (default: all) as a new tensor that owns its storage."""
        box = full_box(tuple(self.shape)) if box is None else box
        out = torch.empty(shape_of(box), dtype=dtype or self.dtype)
        self.fill(box, out)
        return out

    def read_local(
        self,
        pieces: Sequence[Piece],
        local_shape: Sequence[int],
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str = "cpu",
    ) -> torch.Tensor:
        """Returns a new tensor of `local_shape` that owns its storage, filled by `pieces` of this tensor.

        Elements go from the checkpoint directly to their place; nothing else of their size is allocated.
        """
        out = torch.empty(tuple(local_shape), dtype=dtype or self.dtype, device=device)
        assert sum(volume(piece.local) for piece in pieces) == out.numel(), "pieces that leave a gap"
        for piece in pieces:
            self.fill(piece.full, out[slices(piece.local)])
        return out

    def map_local(self, pieces: Sequence[Piece], local_shape: Sequence[int]) -> torch.Tensor | None:
        """Returns `read_local` as private pages of the checkpoint's mapping if the part is contiguous there; else None.

        Nothing is read until it is touched. Writing copies the pages.
        """
        shape = tuple(local_shape)
        is_one_box = len(pieces) == 1 and shape != () and shape_of(pieces[0].full) == shape
        return self.node.map_rows(pieces[0].full) if is_one_box else None

    def fill(self, box: Box, out: torch.Tensor) -> None:
        """Copies the elements `box` into `out`, which has their shape."""
        with torch.no_grad():
            self.node.fill(box, out)


def _run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if func._schema.is_mutable and isinstance(args[0], LazyTensor):
        raise UnsupportedError(
            f"{func} would write into a lazy tensor", at=repr(args[0]), why="its elements are in a checkpoint"
        )
    leaves, structure = tree_flatten((args, kwargs))
    rule = _RULES.get(func)
    if rule is not None:
        meta_args, meta_kwargs = tree_unflatten([_meta_of(leaf) for leaf in leaves], structure)
        metas = func(*meta_args, **meta_kwargs)
        nodes = rule(metas, *args, **kwargs)
        if isinstance(nodes, Node):
            return LazyTensor(nodes, metas)
        if nodes is not None:
            return type(metas)(LazyTensor(node, meta) for node, meta in zip(nodes, metas, strict=True))
    # See [Note: operations outside the algebra].
    args, kwargs = tree_unflatten([leaf.read() if isinstance(leaf, LazyTensor) else leaf for leaf in leaves], structure)
    return func(*args, **kwargs)


def _meta_of(leaf: Any) -> Any:
    if isinstance(leaf, LazyTensor):
        return leaf.meta
    if isinstance(leaf, torch.Tensor):
        return leaf.to("meta")
    return torch.device("meta") if isinstance(leaf, torch.device) else leaf


# Rules: what an operation does to nodes. Called with the result's metadata and the operation's arguments; None where
# this use of the operation is outside the algebra.
_Rule = Callable[..., "Node | list[Node] | None"]


def _node_of(value: torch.Tensor) -> Node:
    if isinstance(value, LazyTensor):
        return value.node
    return StoredTensor(_Constant(value), "", tuple(value.shape), value.dtype)


class _Constant(Store):
    """`Store` of an ordinary tensor that a conversion has added."""

    def __init__(self, value: torch.Tensor) -> None:
        self._value = value

    def map_tensor(self, key: str) -> torch.Tensor:
        return self._value


def _same(meta: torch.Tensor, source: LazyTensor, **_: Any) -> Node:
    return source.node


def _reshape(meta: torch.Tensor, source: LazyTensor, *_: Any, **__: Any) -> Node:
    return Reshaped(source.node, tuple(meta.shape))


def _permute(meta: torch.Tensor, source: LazyTensor, dims: Sequence[int]) -> Node:
    return Permuted(source.node, tuple(meta.shape), tuple(dim % source.ndim for dim in dims))


def _transpose(meta: torch.Tensor, source: LazyTensor, dim0: int, dim1: int) -> Node:
    if source.ndim == 0:
        return source.node
    dims = list(range(source.ndim))
    dims[dim0], dims[dim1] = dims[dim1], dims[dim0]
    return Permuted(source.node, tuple(meta.shape), tuple(dims))


def _t(meta: torch.Tensor, source: LazyTensor) -> Node:
    return _transpose(meta, source, 0, 1) if source.ndim == 2 else source.node


def _slice(
    meta: torch.Tensor,
    source: LazyTensor,
    dim: int = 0,
    start: int | None = None,
    end: int | None = None,
    step: int = 1,
) -> Node | None:
    if step != 1:
        return None
    first = slice(start, end).indices(source.shape[dim])[0]
    return Narrowed(source.node, tuple(meta.shape), dim % source.ndim, first)


def _select(meta: torch.Tensor, source: LazyTensor, dim: int, index: int) -> Node:
    dim, index = dim % source.ndim, index % source.shape[dim]
    kept = (*source.shape[:dim], 1, *source.shape[dim + 1 :])
    return Reshaped(Narrowed(source.node, kept, dim, index), tuple(meta.shape))


def _split(metas: Sequence[torch.Tensor], source: LazyTensor, _: Any, dim: int = 0) -> list[Node]:
    nodes: list[Node] = []
    start, dim = 0, dim % source.ndim
    for meta in metas:
        nodes.append(Narrowed(source.node, tuple(meta.shape), dim, start))
        start += meta.shape[dim]
    return nodes


def _unbind(metas: Sequence[torch.Tensor], source: LazyTensor, dim: int = 0) -> list[Node]:
    return [_select(meta, source, dim, index) for index, meta in enumerate(metas)]


def _cat(meta: torch.Tensor, tensors: Sequence[torch.Tensor], dim: int = 0) -> Node:
    # torch lets the empty tensor of shape (0,) be concatenated with anything; it adds no elements.
    parts = [part for part in tensors if part.ndim == meta.ndim]
    return Joined(_nodes_in(parts, meta.dtype), tuple(meta.shape), dim % meta.ndim)


def _stack(meta: torch.Tensor, tensors: Sequence[torch.Tensor], dim: int = 0) -> Node:
    dim %= meta.ndim
    shape = (*meta.shape[:dim], 1, *meta.shape[dim + 1 :])
    parts = tuple(Reshaped(node, shape) for node in _nodes_in(tensors, meta.dtype))
    return Joined(parts, tuple(meta.shape), dim)


def _nodes_in(tensors: Sequence[torch.Tensor], dtype: torch.dtype) -> tuple[Node, ...]:
    nodes = [_node_of(tensor) for tensor in tensors]
    return tuple(node if node.dtype == dtype else Cast(node, dtype) for node in nodes)


def _to_copy(meta: torch.Tensor, source: LazyTensor, *, device: Any = None, **_: Any) -> Node | None:
    if device is not None and torch.device(device).type != "cpu":
        raise UnsupportedError(
            f"a weight conversion moves a tensor to {device}", at=repr(source), why="lazy tensors have no device"
        )
    return source.node if meta.dtype == source.dtype else Cast(source.node, meta.dtype)


_RULES: dict[Any, _Rule] = {
    _aten.alias.default: _same,
    _aten.clone.default: _same,
    _aten.detach.default: _same,
    _aten.lift_fresh.default: _same,
    _aten._reshape_alias.default: _reshape,
    _aten._unsafe_view.default: _reshape,
    _aten.squeeze.default: _reshape,
    _aten.squeeze.dim: _reshape,
    _aten.squeeze.dims: _reshape,
    _aten.unsqueeze.default: _reshape,
    _aten.view.default: _reshape,
    _aten.permute.default: _permute,
    _aten.transpose.int: _transpose,
    _aten.t.default: _t,
    _aten.slice.Tensor: _slice,
    _aten.select.int: _select,
    _aten.split.Tensor: _split,
    _aten.split_with_sizes.default: _split,
    _aten.unbind.int: _unbind,
    _aten.cat.default: _cat,
    _aten.stack.default: _stack,
    _aten._to_copy.default: _to_copy,
}
