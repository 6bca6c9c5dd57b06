"""Nodes of lazy tensors: a graph of layout operations over stored tensors, from which boxes can be read.

`fill(box, out)` copies the elements `box` of a node into `out`. It asks the sources only for the elements of the box.
`out` may have any strides, dtype and device, as in `out.copy_(value)`.
"""

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch

from shardwise.sharding.boxes import Box, Interval, full_box, intersect, move, shape_of, slices

Shape = tuple[int, ...]


def reshape_boxes(box: Box, shape: Shape, source_shape: Shape) -> list[tuple[Box, Box]]:
    """Maps the elements `box` of a tensor of `shape` that was reshaped from `source_shape`.

    Returns:
        Pairs (box of the source, box of the result) with the same elements in the same row-major order. The result
            boxes are disjoint and cover `box`. Empty if `box` is.
    """
    if any(start >= stop for start, stop in box):
        return []
    per_group = [
        _group_boxes(box[mine], shape[mine], source_shape[theirs]) for mine, theirs in _groups(shape, source_shape)
    ]
    return [
        (tuple(itertools.chain(*(b[0] for b in parts))), tuple(itertools.chain(*(b[1] for b in parts))))
        for parts in itertools.product(*per_group)
    ]


def _groups(shape: Shape, source_shape: Shape) -> Iterator[tuple[slice, slice]]:
    """Yields the smallest runs of dims of the two shapes with equal products. The shapes contain no zero."""
    i = j = 0
    while i < len(shape) or j < len(source_shape):
        i_start, j_start = i, j
        mine = theirs = 1
        if i < len(shape):
            mine, i = shape[i], i + 1
        while mine != theirs:
            if mine < theirs:
                mine, i = mine * shape[i], i + 1
            else:
                theirs, j = theirs * source_shape[j], j + 1
        if i_start == i:  # only size-1 dims of the source are left
            j += 1
        yield slice(i_start, i), slice(j_start, j)


def _group_boxes(box: Box, shape: Shape, source_shape: Shape) -> list[tuple[Box, Box]]:
    if shape == source_shape:
        return [(box, box)]
    pairs: list[tuple[Box, Box]] = []
    todo = list(_flat_runs(box, shape))[::-1]
    while todo:
        run = todo.pop()
        # A run is done when it is a box on both sides. Otherwise cut it at the rows of the side where it is not.
        source_parts, parts = list(_run_boxes(run, source_shape)), list(_run_boxes(run, shape))
        if len(source_parts) == len(parts) == 1:
            pairs.append((source_parts[0][1], parts[0][1]))
        else:
            cut = source_parts if len(source_parts) > 1 else parts
            todo.extend(part for part, _ in reversed(cut))
    return pairs


def _flat_runs(box: Box, shape: Shape) -> Iterator[Interval]:
    """Yields the elements of `box` as runs of row-major positions, in order."""
    inner = len(shape)
    while inner > 1 and box[inner - 1] == (0, shape[inner - 1]):
        inner -= 1
    # Dims from `inner - 1` on are one run; the dims before it are enumerated.
    run_dim = max(inner - 1, 0)
    row = math.prod(shape[run_dim + 1 :])
    start, stop = box[run_dim] if box else (0, 1)
    for position in itertools.product(*(range(*interval) for interval in box[:run_dim])):
        base = 0
        for index, size in zip(position, shape[:run_dim], strict=True):
            base = base * size + index
        base *= shape[run_dim] if shape else 1
        yield (base + start) * row, (base + stop) * row


def _run_boxes(run: Interval, shape: Shape) -> Iterator[tuple[Interval, Box]]:
    """Yields a run of row-major positions as boxes of `shape`, in order, each with the run it covers."""
    if not shape:
        yield run, ()
        return
    if len(shape) == 1:
        yield run, (run,)
        return
    start, stop = run
    row = math.prod(shape[1:])
    first_full, last_full = -(-start // row), stop // row
    if first_full > last_full:  # strictly inside one row
        yield from _inside_row(run, last_full, shape)
        return
    if start < first_full * row:
        yield from _inside_row((start, first_full * row), first_full - 1, shape)
    if first_full < last_full:
        full_rows = tuple((0, size) for size in shape[1:])
        yield (first_full * row, last_full * row), ((first_full, last_full), *full_rows)
    if last_full * row < stop:
        yield from _inside_row((last_full * row, stop), last_full, shape)


def _inside_row(run: Interval, index: int, shape: Shape) -> Iterator[tuple[Interval, Box]]:
    offset = index * math.prod(shape[1:])
    for (start, stop), box in _run_boxes((run[0] - offset, run[1] - offset), shape[1:]):
        yield (start + offset, stop + offset), ((index, index + 1), *box)


class Store(Protocol):
    """Source of stored tensors; `CheckpointIndex` is one."""

    def map_tensor(self, key: str) -> torch.Tensor:
        """Returns the tensor `key`, without copying it."""
        ...

    def count(self, nbytes: int) -> None:
        """Records how many bytes were copied out of a mapped tensor; by default not, as for tensors in memory."""
        return


class Node(ABC):
    """One tensor in the graph, with its shape, its dtype and the nodes it is made of."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    sources: "tuple[Node, ...]" = ()

    @abstractmethod
    def fill(self, box: Box, out: torch.Tensor) -> None:
        """Copies the elements `box` into `out`."""

    def map_rows(self, box: Box) -> torch.Tensor | None:
        """Returns the elements `box` as a new lazily mapped tensor, if the store supports it; else None."""
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
