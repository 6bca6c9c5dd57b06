"""`NeuronZero1Optimizer`: ZeRO-1 by torch's `ZeroRedundancyOptimizer`, and files of its states.

Models that FSDP2 holds (`FsdpPolicy`) have sharded states with any optimizer.
"""

from __future__ import annotations

import os
import shutil
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardwise.comm.agree import run_in_turns
from shardwise.compat.neuronx_distributed.parallel_layers.parallel_state import (
    check_data_groups,
    current_mesh,
    get_tensor_model_parallel_group,
)
from shardwise.compat.neuronx_distributed.trainer.optimizer import NxDOptimizer
from shardwise.compat.rank_files import read_tree, write_tree
from shardwise.compat.warned import warn_once
from shardwise.errors import ConfigError, LoadError, UnsupportedError
from shardwise.mesh import Mesh
from shardwise.optim.optimizer import check_class, divided_groups
from shardwise.optim.plain_step import inner_of
from shardwise.parameters.registry import entry_of
from shardwise.plan.options import check_count
from shardwise.topology.axes import DATA_AXES

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # what torch says of its own package
    from torch.distributed.optim import ZeroRedundancyOptimizer

__all__ = ["NeuronZero1Optimizer"]

_IDLE = {
    "bucket_cap_mb_all_gather", "bucket_cap_mb_reduce_scatter", "higher_cc_precision", "lazy_init", "optimizer_dtype",
    "pin_layout", "save_master_weights", "use_grad_acc_hook",
}  # fmt: skip


class NeuronZero1Optimizer(NxDOptimizer):
    """An optimizer of any torch class, each of whose states one data rank has; clips in `step`.

    Args:
        params: parameters or groups of them, the same on all data ranks.
        max_norm: of the full gradients, where `grad_clipping`.
        sharding_groups: the data-parallel groups, which are also the default.
        grad_norm_groups: changes nothing: every element counts once, however it is stored.
        defaults: options of `optimizer_class`, and those of theirs that change nothing (`pin_layout`, …).

    Raises:
        ConfigError: the groups are others, or nothing is trained.

    Communicates: a step averages gradients that nobody has, clips, and broadcasts updated parameters over data ranks.
    """

    def __init__(
        self,
        params: Iterable[Any],
        optimizer_class: type[torch.optim.Optimizer],
        grad_clipping: bool = True,
        max_norm: float = 1.0,
        sharding_groups: Sequence[Sequence[int]] | None = None,
        grad_norm_groups: Any = None,
        **defaults: Any,
    ) -> None:
        mesh = current_mesh()
        check_data_groups(sharding_groups, "NeuronZero1Optimizer shards")
        if grad_norm_groups not in (None, get_tensor_model_parallel_group(as_list=True)):
            warn_once("NeuronZero1Optimizer: grad_norm_groups changes nothing: the norm is that of the full gradients")
        for name in _IDLE.intersection(defaults):
            if defaults.pop(name) and name != "pin_layout":
                warn_once(f"NeuronZero1Optimizer: {name} changes nothing")
        inner = build_sharded(params, optimizer_class, mesh, **defaults)
        super().__init__(inner, mesh, max_norm=max_norm if grad_clipping else None)

    @property
    def base_optimizer(self) -> torch.optim.Optimizer:
        """The optimizer of `optimizer_class`, over the parameters whose states this rank has."""
        return getattr(self.optimizer, "optim", self.optimizer)

    def state_dict(self) -> Any:
        """The states that this rank has."""
        return self.base_optimizer.state_dict()

    def load_state_dict(self, state_dict: Any) -> None:
        """What `state_dict` gave on this rank."""
        load_own_states(self.optimizer, state_dict)

    def save_sharded_state_dict(
        self, output_dir: str | os.PathLike[str], save_serially: bool = True, num_workers_per_step: int = 8
    ) -> None:
        """Writes the states that this rank has, by parameter name."""
        save_states(
            self.optimizer, _place(output_dir, current_mesh().data_rank), current_mesh(), serially=save_serially
        )
        if current_mesh().data_rank == 0:  # an earlier save of more data ranks must not be read with this one
            written = {_place(output_dir, rank) for rank in range(current_mesh().data_size)}
            for place in set(Path(output_dir).glob(_place("", "*").name)) - written:
                shutil.rmtree(place)

    def load_sharded_state_dict(self, output_dir: str | os.PathLike[str], num_workers_per_step: int = 8) -> None:
        """Reads what `save_sharded_state_dict` wrote, of any number of data ranks; so many ranks at the same time."""
        check_count("num_workers_per_step", num_workers_per_step)
        places = sorted(Path(output_dir).glob(_place("", "*").name))
        load_states(self.optimizer, places, current_mesh(), ranks_at_a_time=num_workers_per_step)


def _place(directory: str | os.PathLike[str], data_rank: int | str) -> Path:
    mesh = current_mesh()
    number = data_rank if isinstance(data_rank, str) else f"{data_rank:02d}"
    return Path(directory) / f"optim.dp_rank_{number}.tp_rank_{mesh.coord('tp'):02d}_pp_rank_{mesh.coord('pp'):02d}"


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
    held = {id(parameter) for parameter in _all(inner.param_groups)}
    # A parameter that no forward has used has no state yet.
    states = {name: own.get(id(parameter), {}) for name, parameter in names.items() if id(parameter) in held}
    options = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    run_in_turns(
        lambda: write_tree({"states": states, "options": options}, place),
        mesh.group(),
        turn=mesh.data_rank if serially else 0,
        num_turns=mesh.data_size if serially else 1,
        doing="saving optimizer states",
    )


def load_states(
    optimizer: torch.optim.Optimizer, places: Sequence[Path], mesh: Mesh, *, ranks_at_a_time: int = 8
) -> None:
    """Reads what data ranks wrote, of which there may have been another number; each takes what it has now. A rank
    begins with its own file, and ends with the file in which it has found everything.

    Args:
        places: of all that wrote, those of this rank's tp and pp coords, by data rank.
        ranks_at_a_time: how many ranks read at the same time.

    Raises:
        LoadError: a file is missing or damaged, a state that was saved is of another shape, or one was not saved. The
            same on every rank; nothing is changed then.

    Communicates: one gather of a small object over all ranks, for every turn.
    """
    _refuse_sharded(optimizer)
    inner = inner_of(optimizer)
    held = {id(parameter) for parameter in _all(inner.param_groups)}
    wanted = {name: parameter for name, parameter in _names(optimizer).items() if id(parameter) in held}
    first = mesh.data_rank % max(len(places), 1)

    def read() -> tuple[dict[str, Any], list[Any]]:
        saved: dict[str, Any] = {}
        options: list[Any] | None = None
        is_any = False
        for place in (*places[first:], *places[:first]):
            if options is not None and wanted.keys() <= saved.keys():
                break
            tree = read_tree(place)
            options, is_any = tree["options"], is_any or bool(tree["states"])
            saved |= {name: state for name, state in tree["states"].items() if name in wanted}
        if options is None:
            raise LoadError("no optimizer states to load", fix="pass the directory that save_sharded_state_dict wrote")
        for name, parameter in wanted.items():
            _check(name, parameter, saved, is_any=is_any)
        if len(options) != len(optimizer.param_groups):
            raise LoadError(f"{len(options)} parameter groups were saved, and {len(optimizer.param_groups)} are here")
        return saved, options

    turn, num_turns = mesh.rank // ranks_at_a_time, -(-mesh.shape.world_size // ranks_at_a_time)
    done = run_in_turns(read, mesh.group(), turn=turn, num_turns=num_turns, doing="loading optimizer states")
    assert done is not None
    saved, options = done
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
