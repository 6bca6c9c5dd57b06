"""ZeRO-1 for models whose data ranks hold all parameters: torch's `ZeroRedundancyOptimizer`, and files of its states.

Models that FSDP2 holds (`FsdpPolicy`) have sharded states with any optimizer.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardwise.comm.agree import raise_on_all_ranks, run_in_turns
from shardwise.errors import ConfigError, LoadError, UnsupportedError
from shardwise.mesh import Mesh
from shardwise.optim.optimizer import check_class, divided_groups
from shardwise.optim.plain_step import inner_of
from shardwise.parameters.registry import entry_of
from shardwise.topology.axes import DATA_AXES
from shardwise.weights.rank_files import read_tree, write_tree

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # what torch says of its own package
    from torch.distributed.optim import ZeroRedundancyOptimizer

__all__ = ["build_sharded", "load_own_states", "load_states", "save_states"]


def build_sharded(
    parameters: Iterable[Any], optimizer_class: type[torch.optim.Optimizer], mesh: Mesh, **options: Any
) -> torch.optim.Optimizer:
    """An optimizer of that class, each of whose states one data rank has.

    Args:
        parameters: or groups of them, the same on every data rank.

    Raises:
        ConfigError: none of them is trained.

    Communicates: a step broadcasts, over the data ranks, the parameters that each has updated.
    """
    check_class(optimizer_class)
    groups = divided_groups(parameters)
    if not groups:
        raise ConfigError("an optimizer was given no parameter that is trained")
    group = mesh.group(*DATA_AXES)
    if group is None or any(isinstance(each, DTensor) for each in _all(groups)):
        return optimizer_class(groups, **options)
    return ZeroRedundancyOptimizer(groups, optimizer_class, process_group=group, **options)


def save_states(optimizer: torch.optim.Optimizer, place: Path, mesh: Mesh, *, serially: bool) -> None:
    """Writes the states that this rank has, by the names of their parameters.

    Args:
        place: of this rank alone.
        serially: one data rank after the other.

    Raises:
        LoadError: it cannot. The same on every rank.

    Communicates: one gather of a small object over all ranks, for every turn.
    """
    _refuse_sharded(optimizer)
    inner = inner_of(optimizer)
    names = _names(optimizer)
    own = {id(parameter): state for parameter, state in inner.state.items()}
    states = {name: own[id(parameter)] for name, parameter in names.items() if id(parameter) in own}
    options = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    run_in_turns(
        lambda: write_tree({"states": states, "options": options}, place),
        mesh.group(),
        turn=mesh.data_rank if serially else 0,
        num_turns=mesh.data_size if serially else 1,
        doing="saving optimizer states",
    )


def load_states(optimizer: torch.optim.Optimizer, places: Iterable[Path], mesh: Mesh) -> None:
    """Reads what data ranks wrote, of which there may have been another number; each takes what it has now.

    Args:
        places: of all that wrote, those of this rank's tp and pp coords.

    Raises:
        LoadError: a file is missing or damaged, a state that was saved is of another shape, or one was not saved. The
            same on every rank; nothing is changed then.

    Communicates: one gather of a small object over all ranks.
    """
    _refuse_sharded(optimizer)
    inner = inner_of(optimizer)
    held = {id(parameter) for parameter in _all(inner.param_groups)}
    wanted = {name: parameter for name, parameter in _names(optimizer).items() if id(parameter) in held}
    with raise_on_all_ranks(mesh.group(), "loading optimizer states"):
        trees = [read_tree(place) for place in places]
        if not trees:
            raise LoadError("no optimizer states to load", fix="pass the directory that save_sharded_state_dict wrote")
        saved = {name: state for tree in trees for name, state in tree["states"].items()}
        for name, parameter in wanted.items():
            _check(name, parameter, saved, is_any=bool(saved))
        options = trees[0]["options"]
        if len(options) != len(optimizer.param_groups):
            raise LoadError(f"{len(options)} parameter groups were saved, and {len(optimizer.param_groups)} are here")
    for group, inner_group, values in zip(optimizer.param_groups, inner.param_groups, options, strict=True):
        group.update(values)
        inner_group.update(values)
    for name, parameter in wanted.items():
        state = saved.get(name, {})
        inner.state[parameter] = {
            key: value.to(parameter.device) if isinstance(value, Tensor) and value.ndim else value
            for key, value in state.items()
        }


def load_own_states(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
    """Gives the optimizer of this rank's states what its `state_dict` gave; the same options to the one around it."""
    inner = inner_of(optimizer)
    inner.load_state_dict(state_dict)
    for group, own in zip(optimizer.param_groups, inner.param_groups, strict=True):
        group.update({name: value for name, value in own.items() if name != "params"})


def _refuse_sharded(optimizer: torch.optim.Optimizer) -> None:
    if any(isinstance(each, DTensor) for each in _all(optimizer.param_groups)):
        raise UnsupportedError(
            "files of the states that one rank has, where FSDP2 holds the parameters",
            why="their parts depend on the number of data ranks",
            fix="use shardwise.save_checkpoint, which any layout can load",
        )


def _check(name: str, parameter: Tensor, saved: dict[str, Any], *, is_any: bool) -> None:
    if name not in saved and is_any:
        raise LoadError(f"no optimizer state of {name} was saved", why="another model's were saved")
    for key, value in saved.get(name, {}).items():
        if isinstance(value, Tensor) and value.ndim and value.shape != parameter.shape:
            raise LoadError(
                f"the optimizer's {key} of {name} was saved in shape {tuple(value.shape)}",
                why=f"this rank's part of the parameter has shape {tuple(parameter.shape)}",
                fix="load it at the tensor and pipeline parallel degrees at which it was saved",
            )


def _names(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """By the names of the model that knows the parameters; by their number in the optimizer where none does."""
    found = {}
    for number, parameter in enumerate(_all(optimizer.param_groups)):
        entry = entry_of(parameter)
        found[entry.fqn if entry is not None and entry.registry.model() is not None else str(number)] = parameter
    return found


def _all(groups: Iterable[dict[str, Any]]) -> list[Tensor]:
    return [parameter for group in groups for parameter in group["params"]]
