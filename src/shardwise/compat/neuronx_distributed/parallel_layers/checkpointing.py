"""`parallel_layers.save` and `load`: each rank's parts in its own file, or one file of full tensors.

`shardwise.save_checkpoint` makes checkpoints that any layout can load.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

from shardwise.comm.agree import run_serially
from shardwise.compat.neuronx_distributed.parallel_layers.parallel_state import current_mesh
from shardwise.errors import ConfigError, LoadError, as_error
from shardwise.plan.options import check_kind
from shardwise.weights.staging import atomic_file, disk_errors

__all__ = ["load", "save"]

_NAME = "checkpoint.pt"


def save(
    state_dict: Mapping[str, Any],
    save_dir: str | os.PathLike[str],
    save_serially: bool = True,
    save_xser: bool = False,
    down_cast_bf16: bool = False,
    master_dp_only: bool = True,
) -> None:
    """Writes this rank's parts to `save_dir/tp_rank_TT_pp_rank_PP/checkpoint.pt`, atomically.

    A `DTensor` is gathered over the data ranks first; all of them must call.

    Args:
        save_serially: write one (tp, pp) rank after the other, so that few tensors are in host memory at a time.
        save_xser: no effect, like `load_xser`.
        down_cast_bf16: write floating-point tensors in bfloat16.
        master_dp_only: only data rank 0 writes; else every data rank, with `_dp_rank_DD` in the name.

    Raises:
        LoadError: a file cannot be written. The same on every rank.

    Communicates: a gather of a small object over all ranks per turn; an all-gather of every `DTensor`.
    """
    check_kind("state_dict", state_dict, Mapping, fix="pass a dictionary, such as model.state_dict()")
    mesh = current_mesh()
    tree = tree_map_only(DTensor, lambda each: each.full_tensor(), dict(state_dict))
    if down_cast_bf16:
        tree = tree_map_only(Tensor, lambda each: each.bfloat16() if each.is_floating_point() else each, tree)
    turn = mesh.coord("pp") * mesh.size("tp") + mesh.coord("tp") if save_serially else 0
    run_serially(
        lambda: write_tree(tree, _place(save_dir, master_dp_only=master_dp_only)),
        mesh.group(),
        turn=-1 if mesh.data_rank and master_dp_only else turn,
        num_turns=mesh.size("tp") * mesh.size("pp") if save_serially else 1,
        doing="saving",
    )


def load(
    load_dir: str | os.PathLike[str],
    model_or_optimizer: nn.Module | torch.optim.Optimizer | None = None,
    model_key: str = "model",
    load_xser: bool = False,
    sharded: bool = True,
    model: nn.Module | torch.optim.Optimizer | None = None,
    master_dp_only: bool = True,
) -> Any:
    """Reads the files of `save` at the same degrees; with `sharded=False` one file of full tensors at any degrees.

    No code in the files is run.

    Args:
        load_dir: the directory; the file if not `sharded`.
        model_or_optimizer: receives the entry `model_key`; `model` is another name for it.

    Returns:
        The other entries; all entries without a model or optimizer.

    Raises:
        LoadError: there is no such file, it has no such entry, or the entry does not fit. The same on every rank.

    Communicates: one gather of a small object over all ranks per tp rank: they read one after the other.
    """
    mesh, target = current_mesh(), model_or_optimizer if model_or_optimizer is not None else model
    if not sharded and target is None:
        raise ConfigError("sharded=False without a model", fix="pass the model that takes the full tensors")

    def read() -> Any:
        path = _place(load_dir, master_dp_only=master_dp_only) if sharded else Path(load_dir)
        state = read_tree(path) if sharded else _read(path)
        if target is None:
            return state
        if not sharded and model_key not in state:
            state = {model_key: state}
        if model_key not in state:
            raise LoadError(f"{path} has no entry {model_key!r}", why=f"it has {', '.join(map(repr, state))}")
        fix = "load it at the tp and pp sizes at which it was saved; checkpoints of save_checkpoint fit any"
        with as_error(LoadError, f"{path} does not fit at {mesh.shape}", RuntimeError, ValueError, fix=fix, limit=300):
            target.load_state_dict(state.pop(model_key))
        return state

    return run_serially(read, mesh.group(), turn=mesh.coord("tp"), num_turns=mesh.size("tp"), doing="loading")


def _place(directory: str | os.PathLike[str], *, master_dp_only: bool) -> Path:
    mesh = current_mesh()
    name = f"tp_rank_{mesh.coord('tp'):02d}_pp_rank_{mesh.coord('pp'):02d}"
    return Path(directory) / (name if master_dp_only else f"{name}_dp_rank_{mesh.data_rank:02d}")


def write_tree(tree: Any, place: Path) -> None:
    """Writes tensors and plain values to `place/checkpoint.pt`."""
    with disk_errors(f"cannot write {place}"), atomic_file(place / _NAME) as partial:
        torch.save(tree_map_only(Tensor, lambda each: each.detach().cpu(), tree), partial)


def read_tree(place: Path) -> Any:
    """Reads the file of `write_tree`, to the CPU."""
    if not (place / _NAME).is_file():
        raise LoadError(f"no checkpoint at {place / _NAME}", fix="load it at the degrees at which it was saved")
    return _read(place / _NAME)


def _read(path: Path) -> Any:
    with as_error(LoadError, f"cannot read {path}", limit=300):
        return torch.load(path, map_location="cpu", weights_only=True)
