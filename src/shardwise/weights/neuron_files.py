"""Weights that neuronx_distributed (NxD) has written, a file for each tp and pp rank, put together for `shardwise
convert` where they say how.

NxD's own files hold names and local tensors, and say nothing of how these were divided. That is taken from how our plan
for the model divides them over as many ranks, where this is the only way that fits (see [Note: joined by plan]).

Optimum Neuron writes beside them, for every stage, along which dim each tensor was split and what became of query, key
and value heads. Its key and value heads stand `kv_size_multiplier` times one after the other (all heads, then all
again), and the query heads and the columns of the output projection in the order of the key heads that they meet; here
they are where the model has them.

Everything is read by torch with `weights_only=True`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardwise.errors import LoadError, UnsupportedError
from shardwise.sharding.boxes import Box, full_box, shape_of
from shardwise.sharding.layout import Layout
from shardwise.weights.chunks import Chunk, ChunkedIndex, ChunkedTensor

__all__ = ["Layouts", "open_nxd", "open_optimum_neuron"]

Layouts = Callable[[int], Mapping[str, Layout]]
"""How our plan for a model divides each of its parameters, by name, over so many tp ranks."""

_NAME = re.compile(r"dp_rank_(?P<dp>\d+)(?:_ep_rank_(?P<ep>\d+))?_tp_rank_(?P<tp>\d+)_pp_rank_(?P<pp>\d+)\.pt")
_FUSED = ("q", "k", "v")


class _TensorReference:
    """Represents torch_xla's class of that name: a tensor in a file of its own."""

    tid: int


@dataclass(frozen=True)
class _Part:
    """Rows or columns of what a tp rank holds: along `dim` from `start`, and where they are in the full tensor."""

    rank: int
    start: int
    length: int
    target: int


def open_optimum_neuron(directory: Path) -> ChunkedIndex:
    """The model's tensors in a directory with `shards/`, or in that.

    Raises:
        LoadError: a file is missing or damaged, or does not fit what was written of it.
    """
    root = directory / "shards" if (directory / "shards").is_dir() else directory
    tensors: dict[str, ChunkedTensor] = {}
    for stage, files in _stages(root / "model").items():
        path = root / f"mp_metadata_pp_rank_{stage}.pt"
        described = _load(path)
        states = [(each, _load_state(each)) for each in files]
        try:
            found = _Stage(states, described["sharded_metadata"], described.get("gqa_qkv_metadata") or {})
            tensors = {**found.tensors(), **tensors}
        except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
            raise LoadError(
                f"{path.name} does not fit the files of its ranks", at=str(path), why=repr(error)
            ) from error
    return ChunkedIndex(tensors, str(directory))


def open_nxd(directory: Path, layouts: Layouts) -> ChunkedIndex:
    """The model's tensors in the directory of a tag, or in one that has a single tag.

    Args:
        layouts: of the model's parameters; only needed where there are several tp ranks.

    Raises:
        LoadError: a file is missing or damaged.
        UnsupportedError: there are several tp ranks, and a tensor of which it is not certain how they divide it.
    """
    tags = [each.parent for each in sorted(directory.glob("*/model")) if any(each.glob("dp_rank_*"))]
    root = directory if (directory / "model").is_dir() or not tags else tags[0]
    if root != directory and len(tags) > 1:
        names = ", ".join(each.name for each in tags)
        raise LoadError(f"{directory.name} holds several checkpoints", at=str(directory), fix=f"pass one of {names}")
    if not (root / "model").is_dir():
        raise UnsupportedError("the files of parallel_layers.save", at=str(directory), **_NOT_SAID)
    tensors: dict[str, ChunkedTensor] = {}
    for files in _stages(root / "model").values():
        states = [(each, _load_state(each)) for each in files]
        known = layouts(len(files)) if len(files) > 1 else {}
        found = _Stage(states, {}, {}).tensors() if len(files) == 1 else _joined(states, known)
        tensors = {**found, **tensors}
    return ChunkedIndex(tensors, str(directory))


# [Note: joined by plan]
# What a rank's file holds is one run of a tensor's rows or columns, in the order of the ranks, unless several tensors
# are fused in it or heads are copied or put into another order; nothing in the file tells. Fused tensors and copied
# heads are cut by our own plan into several runs, or into runs that overlap. So a tensor is joined where our plan gives
# every rank one run, these follow each other, and have the shapes that the files have; and where the names are the
# model's, since layers that change the order of heads have parameters of other names. Everything else is refused.


def _joined(
    states: Sequence[tuple[Path, Mapping[str, Tensor]]], layouts: Mapping[str, Layout]
) -> dict[str, ChunkedTensor]:
    """The full tensors of several tp ranks' files; see [Note: joined by plan]."""
    found = {}
    for name in dict.fromkeys(name for _, state in states for name in state):
        held = [(path, state[name]) for path, state in states if name in state]
        first, layout = held[0][1], layouts.get(name)
        shape = tuple(first.shape) if layout is None else layout.shape
        boxes = _runs(layout, [tuple(value.shape) for _, value in held]) if layout is not None else None
        are_copies = tuple(first.shape) == shape and all(torch.equal(value, first) for _, value in held)
        if len(held) != len(states) or (boxes is None and not are_copies):
            raise UnsupportedError(f"NxD's files of {len(states)} tp ranks: {name}", at=str(held[0][0]), **_NOT_SAID)
        parts = zip(held, boxes, strict=True) if boxes is not None else [(held[0], full_box(shape))]
        chunks = [Chunk.of(value, box, path) for (path, value), box in parts]
        found[name] = ChunkedTensor(first.dtype, shape, chunks)
    return found


def _runs(layout: Layout, shapes: Sequence[tuple[int, ...]]) -> list[Box] | None:
    """Where the ranks' parts are in the full tensor: runs along one dim, one after the other; None where they are not
    that, or have other shapes.
    """
    pieces = [layout.pieces({"tp": rank}) for rank in range(len(shapes))]
    if any(len(each) != 1 for each in pieces):
        return None
    boxes = [each[0].full for each in pieces]
    if [shape_of(box) for box in boxes] != list(shapes):
        return None
    cut = [dim for dim, size in enumerate(layout.shape) if shapes[0][dim] != size]
    if len(cut) != 1:
        return None
    starts, stops = [box[cut[0]][0] for box in boxes], [box[cut[0]][1] for box in boxes]
    return boxes if starts == [0, *stops[:-1]] and stops[-1] == layout.shape[cut[0]] else None


_NOT_SAID = {
    "why": "they do not say how it was divided, and the model's config does not tell either: the model has none of\n"
    "that name or shape, several tensors may be fused in it, heads copied, or what should be copies differs",
    "fix": "merge them with NxD's scripts/checkpoint_converter.py (--convert_to_full_state), which is told",
}


def _stages(directory: Path) -> dict[int, list[Path]]:
    """The files of data rank 0 by stage, in the order of tp ranks."""
    found: dict[int, dict[int, Path]] = {}
    for path in sorted(directory.glob("dp_rank_*.pt")):
        match = _NAME.fullmatch(path.name)
        if match is None or int(match["dp"]):
            continue
        if match["ep"] is not None:
            raise UnsupportedError(f"{path.name} is of expert parallelism", at=str(path), **_NOT_SAID)
        found.setdefault(int(match["pp"]), {})[int(match["tp"])] = path
    for stage, files in found.items():
        if sorted(files) != list(range(len(files))):
            raise LoadError(f"the files of stage {stage} are of tp ranks {sorted(files)}", at=str(directory))
    if sorted(found) != list(range(len(found))) or not found:
        raise LoadError(f"the files are of stages {sorted(found)}", at=str(directory), why="some are missing")
    return {stage: [files[rank] for rank in sorted(files)] for stage, files in sorted(found.items())}


def _load(path: Path) -> Any:
    try:
        with torch.serialization.safe_globals([(_TensorReference, "torch_xla.utils.serialization.TensorReference")]):
            return torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except OSError as error:
        raise LoadError(f"cannot read {path.name}", at=str(path), why=str(error)) from error
    except Exception as error:  # torch's reader fails in many ways
        raise LoadError(
            f"{path.name} cannot be read", at=str(path), why=str(error)[:300], fix="only plain tensors are read"
        ) from error


def _load_state(path: Path) -> dict[str, Tensor]:
    """A rank's tensors; with xser each from a file of its own."""
    state = _load(path)
    if not isinstance(state, Mapping):
        raise LoadError(f"{path.name} holds a {type(state).__name__}", at=str(path), why="a state dict was expected")
    found = {}
    for name, value in state.items():
        is_elsewhere = isinstance(value, _TensorReference)
        own = path.with_name(f"{path.name}.tensors") / f"tensor_{int(value.tid)}.pt" if is_elsewhere else None
        tensor = value if own is None else _load(own)
        if isinstance(tensor, Tensor):
            found[str(name)] = tensor
    return found


class _Stage:
    """What the tp ranks of a stage hold.

    Args:
        states: every tp rank's file and tensors.
        split: by name: `kind`, and `partition_dim` where that is "sharded"; others are the same on all.
        heads: what became of query, key and value; empty where nothing did.
    """

    def __init__(
        self,
        states: Sequence[tuple[Path, Mapping[str, Tensor]]],
        split: Mapping[str, Mapping[str, Any]],
        heads: Mapping[str, Any],
    ) -> None:
        self._states, self._split, self._heads = states, split, heads
        self._originals: dict[str, list[str]] = {}
        for original, name in (heads.get("original_names_to_gqa_qkv_names") or {}).items():
            self._originals.setdefault(name, []).append(original)
        self._outputs = set(heads.get("output_projections_names") or ())

    def tensors(self) -> dict[str, ChunkedTensor]:
        """The full tensors, by the model's names."""
        found = {}
        for name in self._states[0][1]:
            for number, original in enumerate(self._originals.get(name, [name])):
                kind = name.rpartition("_")[2]
                if kind == "qkv":
                    kind = _FUSED[number]
                found[original] = self._tensor(name, original, kind if name in self._originals else "")
        return found

    def _tensor(self, name: str, original: str, kind: str) -> ChunkedTensor:
        values = [state[name] for _, state in self._states]
        facts = self._split.get(name, {"kind": "tied"})
        if facts["kind"] == "tied" or (original in self._outputs and values[0].ndim == 1):
            shape = tuple(values[0].shape)
            return ChunkedTensor(values[0].dtype, shape, [self._chunk(0, values[0], full_box(shape))])
        dim = int(facts["partition_dim"])
        rows = [self._rows(name, kind, value, dim) for value in values]
        parts = self._parts([stop - start for start, stop in rows], kind, is_output=original in self._outputs)
        size = sum(part.length for part in parts)
        chunks = []
        for part in parts:
            start = rows[part.rank][0] + part.start
            value = values[part.rank].narrow(dim, start, part.length)
            box = list(full_box(tuple(value.shape)))
            box[dim] = (part.target, part.target + part.length)
            chunks.append(self._chunk(part.rank, value, tuple(box)))
        shape = tuple(size if number == dim else extent for number, extent in enumerate(values[0].shape))
        return ChunkedTensor(values[0].dtype, shape, chunks)

    def _rows(self, name: str, kind: str, value: Tensor, dim: int) -> tuple[int, int]:
        """Where this kind is in a rank's tensor: all of it, or its rows of a fused one."""
        if not (kind and name.endswith("_qkv")):
            return 0, value.shape[dim]
        query, key = int(self._heads["q_output_size_per_partition"]), int(self._heads["kv_output_size_per_partition"])
        start = {"q": 0, "k": query, "v": query + key}[kind]
        return start, start + (query if kind == "q" else key)

    def _parts(self, sizes: Sequence[int], kind: str, *, is_output: bool) -> list[_Part]:
        """Where rows of ranks are in the full tensor."""
        starts = [sum(sizes[:rank]) for rank in range(len(sizes))]
        if kind in ("k", "v"):
            whole = sum(sizes) // int(self._heads["kv_size_multiplier"])
            found = [_Part(r, 0, min(n, whole - at), at) for r, (at, n) in enumerate(zip(starts, sizes, strict=True))]
            return [part for part in found if part.length > 0]
        if kind != "q" and not is_output:
            return [_Part(r, 0, n, at) for r, (at, n) in enumerate(zip(starts, sizes, strict=True))]
        num_heads, num_keys = int(self._heads["num_attention_heads"]), int(self._heads["num_key_value_heads"])
        copies = int(self._heads["kv_size_multiplier"])
        row = sum(sizes) // num_heads
        group = num_heads // (num_keys * copies) * row  # the query heads that meet one copy of a key head
        parts = []
        for slot in range(num_keys * copies):
            at = slot * group
            rank = next(r for r, start in enumerate(starts) if start <= at < start + sizes[r])
            copy, key = divmod(slot, num_keys)
            parts.append(_Part(rank, at - starts[rank], group, (key * copies + copy) * group))
        return parts

    def _chunk(self, rank: int, value: Tensor, box: Box) -> Chunk:
        return Chunk.of(value, box, self._states[rank][0])
