"""`NeuronZero1Optimizer`: an optimizer whose states are sharded over data ranks."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from shardwise.compat.neuronx_distributed.parallel_layers.parallel_state import check_data_groups, current_mesh
from shardwise.compat.optimizers.wrapped import CompletingOptimizer
from shardwise.compat.optimizers.zero_redundancy import build_sharded, load_own_states, load_states, save_states
from shardwise.compat.warned import warn_once

__all__ = ["NeuronZero1Optimizer"]

_IDLE = {
    "bucket_cap_mb_all_gather", "bucket_cap_mb_reduce_scatter", "higher_cc_precision", "lazy_init", "optimizer_dtype",
    "pin_layout", "save_master_weights", "use_grad_acc_hook",
}  # fmt: skip


class NeuronZero1Optimizer(CompletingOptimizer):
    """An optimizer of any torch class, each of whose states one data rank has; clips in `step`.

    Args:
        params: parameters or groups of them, the same on all data ranks.
        max_norm: of the full gradients, where `grad_clipping`.
        sharding_groups: the data-parallel groups, which are also the default.
        grad_norm_groups: without meaning: every element counts once, however it is stored.
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

    def load_sharded_state_dict(self, output_dir: str | os.PathLike[str], num_workers_per_step: int = 8) -> None:
        """Reads what `save_sharded_state_dict` wrote, of any number of data ranks."""
        load_states(self.optimizer, sorted(Path(output_dir).glob(_place("", "*").name)), current_mesh())


def _place(directory: str | os.PathLike[str], data_rank: int | str) -> Path:
    mesh = current_mesh()
    number = data_rank if isinstance(data_rank, str) else f"{data_rank:02d}"
    return Path(directory) / f"optim.dp_rank_{number}.tp_rank_{mesh.coord('tp'):02d}_pp_rank_{mesh.coord('pp'):02d}"
