"""`NeuronZero1Optimizer`: ZeRO-1 by torch's `ZeroRedundancyOptimizer`, with files of its states.

Models sharded by FSDP2 (`FsdpPolicy`) have sharded states with any optimizer.
"""

import os
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from shardwise.comm.agree import run_serially
from shardwise.compat.neuronx_distributed.parallel_layers.checkpointing import read_tree, write_tree
from shardwise.compat.neuronx_distributed.parallel_layers.parallel_state import (
    check_data_groups,
    current_mesh,
    get_tensor_model_parallel_group,
)
from shardwise.compat.neuronx_distributed.trainer.optimizer import NxDOptimizer
from shardwise.compat.warned import warn_idle
from shardwise.mesh import Mesh
from shardwise.optim.optimizer import check_class, divided_groups, local_state_of
from shardwise.optim.steps import inner_of
from shardwise.plan.options import check_count
from shardwise.topology.shape import DATA_AXES

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # what torch says of its own package
    from torch.distributed.optim import ZeroRedundancyOptimizer


_IDLE = {"higher_cc_precision", "lazy_init", "optimizer_dtype", "save_master_weights", "use_grad_acc_hook"}


class NeuronZero1Optimizer(NxDOptimizer):
    """An optimizer of any torch class whose states are sharded over data ranks. Clips in `step`.

    Args:
        params: parameters or groups of them, the same on all data ranks.
        max_norm: maximum norm of the full gradients, with `grad_clipping`.
        sharding_groups: the data-parallel groups, which are also the default.
        grad_norm_groups, pin_layout: no effect: every element counts once, however it is stored.

    Raises:
        ConfigError: `sharding_groups` are other groups.

    Communicates: a step averages gradients of unregistered parameters, clips, and broadcasts updated parameters over
    data ranks.
    """

    def __init__(
        self,
        params: Iterable[Any],
        optimizer_class: type[torch.optim.Optimizer],
        grad_clipping: bool = True,
        max_norm: float = 1.0,
        sharding_groups: Sequence[Sequence[int]] | None = None,
        grad_norm_groups: Any = None,
        pin_layout: bool = False,
        **defaults: Any,
    ) -> None:
        mesh = current_mesh()
        check_data_groups(sharding_groups, "NeuronZero1Optimizer shards")
        idle = {name: defaults.pop(name) for name in _IDLE.intersection(defaults)}
        idle["pin_layout"] = pin_layout
        idle["grad_norm_groups"] = grad_norm_groups not in (None, get_tensor_model_parallel_group(as_list=True))
        warn_idle("NeuronZero1Optimizer", "the norm and the states are those of the full parameters", **idle)
        inner = build_sharded(params, optimizer_class, mesh, **defaults)
        super().__init__(inner, mesh, max_norm=max_norm if grad_clipping else None)

    @property
    def base_optimizer(self) -> torch.optim.Optimizer:
        """The optimizer of `optimizer_class` over the parameters whose states this rank has."""
        return inner_of(self.optimizer)

    def state_dict(self) -> Any:
        """Returns the states of this rank."""
        _copy_options(self.optimizer, self.base_optimizer)  # what a scheduler has set since the last step
        return local_state_of(self.base_optimizer)

    def load_state_dict(self, state_dict: Any) -> None:
        """Loads the result of `state_dict` on this rank."""
        self.base_optimizer.load_state_dict(state_dict)
        _copy_options(self.base_optimizer, self.optimizer)

    def save_sharded_state_dict(self, output_dir: str | os.PathLike[str], save_serially: bool = True) -> None:
        """Writes this rank's states to its own file, for the same degrees.

        Args:
            save_serially: write one data rank after the other.

        Communicates: one gather of a small object over all ranks per turn.
        """
        mesh = current_mesh()
        turn, num_turns = (mesh.data_rank, mesh.data_size) if save_serially else (0, 1)
        write = lambda: write_tree(self.state_dict(), _place(output_dir))  # noqa: E731
        run_serially(write, mesh.group(), turn=turn, num_turns=num_turns, doing="saving its states")

    def load_sharded_state_dict(self, output_dir: str | os.PathLike[str], num_workers_per_step: int = 8) -> None:
        """Reads the file of `save_sharded_state_dict` on this rank; needs the same number of data ranks.

        Args:
            num_workers_per_step: number of ranks that read at the same time.

        Raises:
            LoadError: the file is missing. The same on every rank.
            ValueError: the saved optimizer has other groups. The same on every rank.

        Communicates: one gather of a small object over all ranks per turn.
        """
        check_count("num_workers_per_step", num_workers_per_step)
        mesh = current_mesh()
        turn, num_turns = mesh.rank // num_workers_per_step, -(-mesh.shape.world_size // num_workers_per_step)
        read = lambda: self.load_state_dict(read_tree(_place(output_dir)))  # noqa: E731
        run_serially(read, mesh.group(), turn=turn, num_turns=num_turns, doing="loading optimizer states")


def _copy_options(source: torch.optim.Optimizer, target: torch.optim.Optimizer) -> None:
    for group, own in zip(source.param_groups, target.param_groups, strict=True):
        own.update({name: value for name, value in group.items() if name != "params"})


def _place(directory: str | os.PathLike[str]) -> Path:
    mesh = current_mesh()
    ranks = f"dp_rank_{mesh.data_rank:02d}.tp_rank_{mesh.coord('tp'):02d}_pp_rank_{mesh.coord('pp'):02d}"
    return Path(directory) / f"optim.{ranks}"


def build_sharded(
    parameters: Iterable[Any], optimizer_class: type[torch.optim.Optimizer], mesh: Mesh, **options: Any
) -> torch.optim.Optimizer:
    """Returns an optimizer of that class with states sharded over data ranks."""
    check_class(optimizer_class)
    groups, group = divided_groups(parameters) or [{"params": []}], mesh.group(*DATA_AXES)  # a stage may train nothing
    if (
        group is None
        or not groups[0]["params"]
        or any(isinstance(each, DTensor) for own in groups for each in own["params"])
    ):
        return optimizer_class(groups, **options)
    return ZeroRedundancyOptimizer(groups, optimizer_class, process_group=group, **options)
