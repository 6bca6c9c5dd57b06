"""Weights of neuronx_distributed (NxD) and Optimum Neuron, a `.pt` file per tp and pp rank, for `shardwise convert`.

torch reads the files with `weights_only=True`.

# [Note: joined by plan]
NxD's files hold local tensors without a description of the split. A tensor is joined if our plan for the model gives
every rank one run along one dim, in rank order, with the shapes in the files. Fused tensors, copied or reordered heads,
and parameters of other names are refused.

# [Note: heads of Optimum Neuron]
Optimum Neuron writes metadata beside the files. Key and value heads are repeated `kv_size_multiplier` times (all heads,
then all again). Query heads, and the columns of the output projection, are in the order of the key heads they meet.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardwise.errors import LoadError, UnsupportedError, as_error
from shardwise.sharding.boxes import Box, full_box, shape_of
from shardwise.sharding.layout import Layout
from shardwise.weights.foreign import Chunk, ChunkedIndex, ChunkedTensor

Layouts = Callable[[int], Mapping[str, Layout]]  # the layout of each parameter, by name, over that many tp ranks

_States = Sequence[tuple[Path, Mapping[str, Tensor]]]  # file and tensors of every tp rank of a stage

_NAME = re.compile(r"dp_rank_(?P<dp>\d+)(?P<ep>_ep_rank_\d+)?_tp_rank_(?P<tp>\d+)_pp_rank_(?P<pp>\d+)\.pt")
_NOT_SAID = {
    "why": "they do not say how it was divided, and the model's config does not tell either: the model has none of\n"
    "that name or shape, several tensors may be fused in it, heads copied, or what should be copies differs",
    "fix": "merge them with NxD's scripts/checkpoint_converter.py (--convert_to_full_state), which is told",
}


class _TensorReference:
    """Stands for torch_xla's class of that name: a tensor in its own file."""

    tid: int


def open_nxd(directory: Path, layouts: Layouts) -> ChunkedIndex:
    """Opens the model's tensors in the directory of a tag, or in one with a single tag. See [Note: joined by plan]."""
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
        planned = layouts(len(files)) if len(files) > 1 else {}
        for name in dict.fromkeys(name for _, state in states for name in state):
            tensors.setdefault(name, _join(name, states, planned.get(name)))
    return ChunkedIndex(tensors, str(directory))


def _join(name: str, states: _States, layout: Layout | None) -> ChunkedTensor:
    parts = [(path, state[name]) for path, state in states if name in state]
    first = parts[0][1]
    shape = tuple(first.shape) if layout is None else layout.shape
    boxes = None if layout is None else _runs(layout, [tuple(value.shape) for _, value in parts])
    are_copies = tuple(first.shape) == shape and all(torch.equal(value, first) for _, value in parts)
    if len(parts) != len(states) or (boxes is None and not are_copies):
        raise UnsupportedError(f"NxD's files of {len(states)} tp ranks: {name}", at=str(parts[0][0]), **_NOT_SAID)
    placed = zip(parts, boxes, strict=True) if boxes is not None else [(parts[0], full_box(shape))]
    return ChunkedTensor(first.dtype, shape, [Chunk.of(value, box, path) for (path, value), box in placed])


def _runs(layout: Layout, shapes: Sequence[tuple[int, ...]]) -> list[Box] | None:
    """The ranks' boxes in the full tensor if they are consecutive runs along one dim with these shapes; else None."""
    pieces = [layout.pieces({"tp": rank}) for rank in range(len(shapes))]
    boxes = [each[0].full for each in pieces if len(each) == 1]
    cut = [dim for dim, size in enumerate(layout.shape) if shapes[0][dim] != size]
    if [shape_of(box) for box in boxes] != list(shapes) or len(cut) != 1:
        return None
    starts, stops = [box[cut[0]][0] for box in boxes], [box[cut[0]][1] for box in boxes]
    return boxes if starts == [0, *stops[:-1]] and stops[-1] == layout.shape[cut[0]] else None


def open_optimum_neuron(directory: Path) -> ChunkedIndex:
    """Opens the model's tensors in a directory with `shards/`, or in `shards/`. See [Note: heads of Optimum Neuron]."""
    root = directory / "shards" if (directory / "shards").is_dir() else directory
    tensors: dict[str, ChunkedTensor] = {}
    for stage, files in _stages(root / "model").items():
        path = root / f"mp_metadata_pp_rank_{stage}.pt"
        metadata = _load(path)
        states = [(each, _load_state(each)) for each in files]
        kinds = KeyError, TypeError, ValueError, IndexError, AttributeError
        with as_error(LoadError, f"{path.name} does not fit the files of its ranks", *kinds, at=str(path)):
            split, heads = metadata["sharded_metadata"], metadata.get("gqa_qkv_metadata") or {}
            for name in states[0][1]:
                for original, kind in _originals(name, heads):
                    dim = int(split[name]["partition_dim"]) if split.get(name, {}).get("kind") == "sharded" else None
                    tensors.setdefault(original, _unsharded(name, kind, states, dim, heads))
    return ChunkedIndex(tensors, str(directory))


def _originals(name: str, heads: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Returns the model's names of the tensors fused into `name`, each with "q", "k", "v", "output" or ""."""
    renamed = heads.get("original_names_to_gqa_qkv_names") or {}
    originals = [original for original, found in renamed.items() if found == name]
    kinds = "qkv" if name.endswith("_qkv") else name[-1]
    if originals:
        return list(zip(originals, kinds, strict=True))
    return [(name, "output" if name in (heads.get("output_projections_names") or ()) else "")]


def _unsharded(name: str, kind: str, states: _States, dim: int | None, heads: Mapping[str, Any]) -> ChunkedTensor:
    first = states[0][1][name]
    if dim is None or (kind == "output" and first.ndim == 1):
        shape = tuple(first.shape)
        return ChunkedTensor(first.dtype, shape, [Chunk.of(first, full_box(shape), states[0][0])])
    parts = [(path, state[name]) for path, state in states]
    if kind and name.endswith("_qkv"):
        query, key = int(heads["q_output_size_per_partition"]), int(heads["kv_output_size_per_partition"])
        start, length = {"q": (0, query), "k": (query, key), "v": (query + key, key)}[kind]
        parts = [(path, value.narrow(dim, start, length)) for path, value in parts]
    total = sum(value.shape[dim] for _, value in parts)
    chunks, size = [], 0
    for start, length in _order(kind, total, heads):
        offset = 0
        for path, value in parts:
            first_row, end = max(start, offset), min(start + length, offset + value.shape[dim])
            if first_row < end:
                piece = value.narrow(dim, first_row - offset, end - first_row)
                box = list(full_box(tuple(piece.shape)))
                box[dim] = (size + first_row - start, size + end - start)
                chunks.append(Chunk.of(piece, tuple(box), path))
            offset += value.shape[dim]
        size += length
    shape = tuple(size if number == dim else extent for number, extent in enumerate(first.shape))
    return ChunkedTensor(first.dtype, shape, chunks)


def _order(kind: str, total: int, heads: Mapping[str, Any]) -> list[tuple[int, int]]:
    """Runs (start, length) of the ranks' concatenated rows that make up the full tensor, in its order."""
    if not kind:
        return [(0, total)]
    copies, num_keys = int(heads["kv_size_multiplier"]), int(heads["num_key_value_heads"])
    if kind in ("k", "v"):
        return [(0, total // copies)]
    group = int(heads["num_attention_heads"]) // (num_keys * copies) * (total // int(heads["num_attention_heads"]))
    return [((copy * num_keys + key) * group, group) for key in range(num_keys) for copy in range(copies)]


def _stages(directory: Path) -> dict[int, list[Path]]:
    """Returns the files of data rank 0 by stage, in the order of tp ranks."""
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
    admitted: list[Any] = [(_TensorReference, "torch_xla.utils.serialization.TensorReference")]
    with (
        as_error(LoadError, f"{path.name} cannot be read", at=str(path), limit=300),
        torch.serialization.safe_globals(admitted),
    ):
        return torch.load(path, map_location="cpu", mmap=True, weights_only=True)


def _load_state(path: Path) -> dict[str, Tensor]:
    """Returns a rank's tensors; with xser each is in its own file."""
    state = _load(path)
    if not isinstance(state, Mapping):
        raise LoadError(f"{path.name} holds a {type(state).__name__}", at=str(path), why="a state dict was expected")
    tensors = path.with_name(f"{path.name}.tensors")
    found = {
        str(name): _load(tensors / f"tensor_{int(value.tid)}.pt") if isinstance(value, _TensorReference) else value
        for name, value in state.items()
    }
    return {name: value for name, value in found.items() if isinstance(value, Tensor)}
