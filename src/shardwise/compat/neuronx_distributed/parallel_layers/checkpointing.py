"""`parallel_layers.save` and `load`: what each rank holds, in a file of its own; or one file of full tensors."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from shardwise.comm.agree import raise_on_all_ranks
from shardwise.compat.neuronx_distributed.parallel_layers.parallel_state import current_mesh
from shardwise.errors import ConfigError, LoadError
from shardwise.mesh import Mesh
from shardwise.weights.staging import atomic_file

__all__ = ["load", "save"]

_MARK = "shardwise tensor "


def save(
    state_dict: Mapping[str, Any],
    save_dir: str | os.PathLike[str],
    save_serially: bool = True,
    save_xser: bool = False,
    down_cast_bf16: bool = False,
    master_dp_only: bool = True,
) -> None:
    """Writes what this rank holds to `save_dir/tp_rank_TT_pp_rank_PP/checkpoint.pt`, complete or not at all.

    Args:
        save_serially: one model-parallel rank after the other, so that few tensors are in host memory at a time.
        save_xser: a file for every tensor, in `tp_rank_TT_pp_rank_PP.tensors/`; `load` needs `load_xser` then.
        down_cast_bf16: write floating-point tensors in bfloat16.
        master_dp_only: only data rank 0 writes; else every one, with `_dp_rank_DD` in its name.

    Raises:
        LoadError: a file cannot be written. The same on every rank.

    Communicates: one gather of a small object over all ranks, for every turn.
    """
    mesh = current_mesh()
    num_turns = mesh.size("tp") * mesh.size("pp") if save_serially else 1
    for turn in range(num_turns):
        with raise_on_all_ranks(mesh.group(), "saving"):
            mine = not save_serially or turn == mesh.coord("pp") * mesh.size("tp") + mesh.coord("tp")
            if mine and (mesh.data_rank == 0 or not master_dp_only):
                place = _place(save_dir, mesh, master_dp_only=master_dp_only)
                try:
                    _write(tree_map(lambda x: _stored(x, down_cast_bf16), dict(state_dict)), place, xser=save_xser)
                except OSError as error:
                    raise LoadError(f"cannot write {place}", why=str(error)) from error


def load(
    load_dir: str | os.PathLike[str],
    model_or_optimizer: nn.Module | torch.optim.Optimizer | None = None,
    model_key: str = "model",
    load_xser: bool = False,
    sharded: bool = True,
    strict: bool = True,
    master_dp_only: bool = True,
    model: nn.Module | torch.optim.Optimizer | None = None,
) -> Any:
    """Reads what `save` wrote, at the same degrees; or with `sharded=False` one file of full tensors, at any.

    Args:
        load_dir: the directory; the file where not `sharded`.
        model_or_optimizer: what takes the entry `model_key`; `model` is another name for it.
        strict: whether names must be those of the model.

    Returns:
        The other entries; all of them where nothing takes one.

    Raises:
        LoadError: there is no such file, or it has no such entry. The same on every rank.

    Communicates: one gather of a small object over all ranks.
    """
    mesh, target = current_mesh(), model_or_optimizer if model_or_optimizer is not None else model
    if not sharded and target is None:
        raise ConfigError("sharded=False without a model", fix="pass the model that takes the full tensors")
    with raise_on_all_ranks(mesh.group(), "loading"):
        place = _place(load_dir, mesh, master_dp_only=master_dp_only) if sharded else Path(load_dir)
        state = _read(place, xser=load_xser and sharded, sharded=sharded)
        if target is None:
            return state
        if not sharded and model_key not in state:
            state = {model_key: state}
        if model_key not in state:
            raise LoadError(f"{place} has no entry {model_key!r}", why=f"it has {', '.join(map(repr, state))}")
        values = state.pop(model_key)
        if isinstance(target, nn.Module):
            target.load_state_dict(values, strict=strict)
        else:
            target.load_state_dict(values)
    return state


def _place(directory: str | os.PathLike[str], mesh: Mesh, *, master_dp_only: bool) -> Path:
    name = f"tp_rank_{mesh.coord('tp'):02d}_pp_rank_{mesh.coord('pp'):02d}"
    return Path(directory) / (name if master_dp_only else f"{name}_dp_rank_{mesh.data_rank:02d}")


def _stored(value: Any, to_bf16: bool) -> Any:
    if not isinstance(value, Tensor):
        return value
    value = value.detach().cpu()
    return value.to(torch.bfloat16) if to_bf16 and value.is_floating_point() else value


def _write(state: Any, place: Path, *, xser: bool) -> None:
    if not xser:
        with atomic_file(place / "checkpoint.pt") as partial:
            torch.save(state, partial)
        return
    tensors: list[Tensor] = []

    def take_out(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        tensors.append(value)
        return f"{_MARK}{len(tensors) - 1}"

    tree = tree_map(take_out, state)
    for number, tensor in enumerate(tensors):
        with atomic_file(Path(f"{place}.tensors") / f"tensor_{number}.pt") as partial:
            torch.save(tensor.clone(), partial)
    with atomic_file(place) as partial:  # last: it names all of them
        torch.save(tree, partial)


def _read(place: Path, *, xser: bool, sharded: bool) -> Any:
    path = place if xser or not sharded else place / "checkpoint.pt"
    if not path.is_file():
        other = Path(f"{place}.tensors").is_dir() if not xser else (place / "checkpoint.pt").is_file()
        raise LoadError(
            f"no checkpoint at {path}",
            why=f"it was saved with save_xser={not xser}" if other else "there is no such file",
            fix=f"pass load_xser={not xser}" if other else "load it at the degrees at which it was saved",
        )
    state = torch.load(path, map_location="cpu", weights_only=True)
    if not xser:
        return state

    def put_back(value: Any) -> Any:
        if not isinstance(value, str) or not value.startswith(_MARK):
            return value
        path = Path(f"{place}.tensors") / f"tensor_{value.removeprefix(_MARK)}.pt"
        return torch.load(path, map_location="cpu", weights_only=True)

    return tree_map(put_back, state)
