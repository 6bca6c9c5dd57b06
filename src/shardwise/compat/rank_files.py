"""Files of what one rank holds, which the same rank of the same layout reads again: for code that saves by itself.

See `shardwise.save_checkpoint` for checkpoints that any layout can load.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from shardwise.comm.agree import run_in_turns
from shardwise.comm.operations import all_gather_objects
from shardwise.errors import LoadError, one_line
from shardwise.mesh import Mesh
from shardwise.topology.axes import DATA_AXES
from shardwise.weights.staging import atomic_file

__all__ = ["load_by_rank", "read_tree", "write_by_rank", "write_tree"]

_MARK = "shardwise tensor "
_NAME = "checkpoint.pt"


def place_of(directory: str | os.PathLike[str], mesh: Mesh, *, by_data_rank: bool = False) -> Path:
    """Where this rank's file is: that of its tp and pp coords, or of its data rank, too."""
    name = f"tp_rank_{mesh.coord('tp'):02d}_pp_rank_{mesh.coord('pp'):02d}"
    return Path(directory) / (f"{name}_dp_rank_{mesh.data_rank:02d}" if by_data_rank else name)


def write_by_rank(
    tree: Any,
    directory: str | os.PathLike[str],
    mesh: Mesh,
    *,
    serially: bool = False,
    by_data_rank: bool = False,
    file_per_tensor: bool = False,
    dtype: torch.dtype | None = None,
) -> None:
    """Writes what every rank of the first data rank holds, or of all of them (`by_data_rank`); see `write_tree`. Of
    what the data axes shard (a `DTensor`) it writes the tensor that the data ranks hold together.

    Args:
        serially: one place of tp and pp after the other, so that few tensors are in host memory at a time.

    Raises:
        LoadError: a file cannot be written, or ranks pass different numbers of such tensors. The same on every rank.

    Communicates: a gather of a small object over all ranks, and one for every turn; an all-gather of every `DTensor`.
    """
    numbers = all_gather_objects(sum(isinstance(each, DTensor) for each in tree_leaves(tree)), mesh.group())
    if any(len({numbers[rank] for rank in line}) > 1 for line in mesh.shape.groups(*DATA_AXES)):
        raise LoadError(
            "data ranks save different numbers of sharded tensors",
            why=f"by rank they are {numbers}",
            fix="pass the same entries on every rank",
        )
    tree = tree_map_only(DTensor, lambda each: each.full_tensor(), tree)
    turn, num_turns = 0, 1
    if serially:
        turn, num_turns = mesh.coord("pp") * mesh.size("tp") + mesh.coord("tp"), mesh.size("tp") * mesh.size("pp")
    if mesh.data_rank and not by_data_rank:
        turn = -1
    place = place_of(directory, mesh, by_data_rank=by_data_rank)
    run_in_turns(
        lambda: write_tree(tree, place, file_per_tensor=file_per_tensor, dtype=dtype),
        mesh.group(),
        turn=turn,
        num_turns=num_turns,
        doing="saving",
    )


def load_by_rank(
    place: str | os.PathLike[str],
    mesh: Mesh,
    target: Any = None,
    *,
    key: str = "model",
    strict: bool = True,
    sharded: bool = True,
    by_data_rank: bool = False,
    file_per_tensor: bool = False,
) -> Any:
    """Gives `target` the entry `key` of what `write_by_rank` wrote; returns the other entries, all without a target.

    Args:
        place: the directory; where not `sharded` one file of full tensors, of `key` or the entries.
        target: a module, or an optimizer.

    Raises:
        LoadError: there is no such file, or it has no such entry. The same on every rank.

    Communicates: one gather of a small object over all ranks for each tp rank: one after the other reads.
    """

    def read() -> Any:
        path = place_of(place, mesh, by_data_rank=by_data_rank) if sharded else Path(place)
        state = read_tree(path, file_per_tensor=file_per_tensor) if sharded else read_file(path)
        if target is None:
            return state
        state = state if sharded or key in state else {key: state}
        if key not in state:
            raise LoadError(f"{path} has no entry {key!r}", why=f"it has {', '.join(map(repr, state))}")
        options = {"strict": strict} if isinstance(target, nn.Module) else {}
        try:
            target.load_state_dict(state.pop(key), **options)
        except (RuntimeError, ValueError) as error:
            raise LoadError(
                f"what {path} holds does not fit on {mesh.shape}",
                why=one_line(error, limit=400),
                fix="load it at the tensor and pipeline parallel degrees at which it was saved; a layer with copies of "
                "key/value heads after move_model_to_device, or with num_heads=; "
                "nxd.save_checkpoint saves for any degrees",
            ) from error
        return state

    return run_in_turns(read, mesh.group(), turn=mesh.coord("tp"), num_turns=mesh.size("tp"), doing="loading")


def write_tree(tree: Any, place: Path, *, file_per_tensor: bool = False, dtype: torch.dtype | None = None) -> None:
    """Writes tensors and plain values to `place/checkpoint.pt`, complete or not at all.

    Args:
        file_per_tensor: write every tensor to a file of its own in `place.tensors`, and then their tree to `place`.
        dtype: of floating-point tensors in the file; by default their own.

    Raises:
        LoadError: a file cannot be written.
    """
    tensors: list[Tensor] = []

    def stored(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        value = value.detach().cpu()
        value = value.to(dtype) if dtype is not None and value.is_floating_point() else value
        tensors.append(value)
        return f"{_MARK}{len(tensors) - 1}" if file_per_tensor else value

    tree = tree_map(stored, tree)
    try:
        if file_per_tensor:  # a tree that is there must not name tensors of which some are new
            place.unlink(missing_ok=True)
        for number, tensor in enumerate(tensors if file_per_tensor else ()):
            with atomic_file(_tensor_file(place, number)) as partial:
                torch.save(tensor.clone(), partial)
        with atomic_file(place if file_per_tensor else place / _NAME) as partial:  # last: it names all of them
            torch.save(tree, partial)
    except OSError as error:
        raise LoadError(f"cannot write {place}", why=str(error)) from error


def read_tree(place: Path, *, file_per_tensor: bool = False) -> Any:
    """What `write_tree` wrote, on the CPU. No code in the files is run.

    Raises:
        LoadError: it is not there, or was written the other way.
    """
    path = place if file_per_tensor else place / _NAME
    if not path.is_file():
        other = _tensor_file(place, 0).parent.is_dir() if not file_per_tensor else (place / _NAME).is_file()
        raise LoadError(
            f"no checkpoint at {path}",
            why=f"it was written {'with' if not file_per_tensor else 'without'} a file for every tensor (xser)"
            if other
            else "there is no such file",
            fix=f"pass load_xser={not file_per_tensor}" if other else "load it at the degrees at which it was saved",
        )
    tree = read_file(path)
    if not file_per_tensor:
        return tree

    def put_back(value: Any) -> Any:
        if not isinstance(value, str) or not value.startswith(_MARK):
            return value
        return read_file(_tensor_file(place, int(value.removeprefix(_MARK))))

    return tree_map(put_back, tree)


def _tensor_file(place: Path, number: int) -> Path:
    return Path(f"{place}.tensors") / f"tensor_{number}.pt"


def read_file(path: Path) -> Any:
    """What `torch.save` wrote, on the CPU. No code in the file is run.

    Raises:
        LoadError: it is not there or damaged.
    """
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise LoadError(f"cannot read {path}", why=one_line(error, limit=300)) from error
