"""Nodes of lazy tensors: a graph of layout operations over stored tensors, from which boxes can be read.

`fill(box, out)` copies the elements `box` of a node into `out`. It asks the sources only for the elements of the box.
`out` may have any strides, dtype and device, as in `out.copy_(value)`.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch

from shardwise.sharding.boxes import Box, full_box, intersect, move, shape_of, slices
from shardwise.weights.views import reshape_boxes


class Store(Protocol):
    """Source of stored tensors; `CheckpointIndex` is one."""

    def map_tensor(self, key: str) -> torch.Tensor:
        """The tensor `key`, without copying it."""
        ...

    def count(self, nbytes: int) -> None:
        """Records how many bytes were copied out of a mapped tensor."""
        ...


class Node(ABC):
    """One tensor in the graph, with its shape, its dtype and the nodes it is made of."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    sources: "tuple[Node, ...]" = ()

    @abstractmethod
    def fill(self, box: Box, out: torch.Tensor) -> None:
        """Copies the elements `box` into `out`."""

    def map_rows(self, box: Box) -> torch.Tensor | None:
        """The elements `box` as a new lazily mapped tensor, if the store supports it; else None."""
        return None

    def walk(self) -> "Iterator[Node]":
        """Yields this node and all below it, each once."""
        seen, todo = {id(self)}, [self]
        while todo:
            node: Node = todo.pop()
            yield node
            for source in reversed(node.sources):
                if id(source) not in seen:
                    seen.add(id(source))
                    todo.append(source)


@dataclass(eq=False)
class StoredTensor(Node):
    """A tensor of a checkpoint."""

    store: Store
    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    def fill(self, box: Box, out: torch.Tensor) -> None:
        part = self.store.map_tensor(self.key)[slices(box)]
        out.copy_(part)
        self.store.count(part.nbytes)


@dataclass(eq=False)
class _Unary(Node):
    source: Node
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        self.dtype, self.sources = self.source.dtype, (self.source,)


@dataclass(eq=False)
class Permuted(_Unary):
    """Dim `i` of this tensor is dim `dims[i]` of the source."""

    dims: tuple[int, ...]

    def fill(self, box: Box, out: torch.Tensor) -> None:
        inverse = sorted(range(len(self.dims)), key=self.dims.__getitem__)
        self.source.fill(tuple(box[dim] for dim in inverse), out.permute(inverse))


@dataclass(eq=False)
class Narrowed(_Unary):
    """Slice of the source along `dim`, from `start`; `shape` gives its length."""

    dim: int
    start: int

    def fill(self, box: Box, out: torch.Tensor) -> None:
        start, stop = box[self.dim]
        shifted = (start + self.start, stop + self.start)
        self.source.fill((*box[: self.dim], shifted, *box[self.dim + 1 :]), out)


@dataclass(eq=False)
class Reshaped(_Unary):
    """The source's elements, in row-major order, in another shape."""

    def fill(self, box: Box, out: torch.Tensor) -> None:
        for source_box, part in reshape_boxes(box, self.shape, self.source.shape):
            target = out[slices(move(part, box, full_box(out.shape)))]
            seen = target.reshape(shape_of(source_box))
            self.source.fill(source_box, seen)
            # `reshape` gives a view where the strides of `out` allow one, else a copy that has to be put back.
            if seen.untyped_storage().data_ptr() != out.untyped_storage().data_ptr():
                target.copy_(seen.reshape(target.shape))


@dataclass(eq=False)
class Joined(Node):
    """Concatenation of the parts along `dim`; all have one dtype."""

    parts: tuple[Node, ...]
    shape: tuple[int, ...]
    dim: int

    def __post_init__(self) -> None:
        self.dtype, self.sources = self.parts[0].dtype, self.parts

    def fill(self, box: Box, out: torch.Tensor) -> None:
        start = 0
        for part in self.parts:
            stop = start + part.shape[self.dim]
            place = (*box[: self.dim], (start, stop), *box[self.dim + 1 :])
            common = intersect(box, place)
            if common is not None:
                first, last = common[self.dim]
                wanted = (*common[: self.dim], (first - start, last - start), *common[self.dim + 1 :])
                offset = first - box[self.dim][0]
                part.fill(wanted, out.narrow(self.dim, offset, last - first))
            start = stop


@dataclass(eq=False)
class Cast(Node):
    """The source in another dtype."""

    source: Node
    dtype: torch.dtype

    def __post_init__(self) -> None:
        self.shape, self.sources = self.source.shape, (self.source,)

    def fill(self, box: Box, out: torch.Tensor) -> None:
        if out.dtype == self.dtype:
            self.source.fill(box, out)  # the copy out of the source converts
        else:  # two conversions, and the first may round
            rounded = torch.empty(out.shape, dtype=self.dtype, device=out.device)
            self.source.fill(box, rounded)
            out.copy_(rounded)
