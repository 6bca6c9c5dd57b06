"""The few calls of `torch_xla.core.xla_model` that NxD's listings make."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from shardwise.comm.agree import raise_on_all_ranks
from shardwise.compat.neuronx_distributed.parallel_layers.parallel_state import (
    check_data_groups,
    current_mesh,
    model_parallel_is_initialized,
)
from shardwise.job.devices import pick_device
from shardwise.optim.average import average_gradients

__all__ = [
    "add_step_closure", "get_ordinal", "is_master_ordinal", "mark_step", "master_print", "optimizer_step", "rendezvous",
    "xla_device", "xrt_world_size",
]  # fmt: skip


def optimizer_step(
    optimizer: torch.optim.Optimizer,
    barrier: bool = False,
    optimizer_args: Mapping[str, Any] | None = None,
    groups: Sequence[Sequence[int]] | None = None,
) -> Any:
    """Averages gradients over the data ranks, where that has not been done (`move_model_to_device`), and steps.

    Args:
        groups: the data-parallel groups, which are also the default (torch_xla's is all ranks, and it divides by their
            number, also where these groups are smaller).

    Raises:
        ConfigError: the groups are others.

    Communicates: as `average_gradients`.
    """
    mesh = current_mesh()
    check_data_groups(groups, "optimizer_step")
    average_gradients((each for group in optimizer.param_groups for each in group["params"]), mesh)
    return optimizer.step(**(optimizer_args or {}))


def mark_step() -> None:
    """Nothing: operations run at once."""


def xla_device() -> torch.device:
    """The device of this rank."""
    return current_mesh().device if model_parallel_is_initialized() else pick_device(None)


def rendezvous(tag: str) -> None:
    """Waits for all ranks.

    Communicates: a gather of a small object over all ranks.
    """
    with raise_on_all_ranks(current_mesh().group(), f"coming to {tag}"):
        pass


def master_print(*args: Any, **kwargs: Any) -> None:
    """Prints on rank 0."""
    if is_master_ordinal():
        print(*args, **kwargs)


def get_ordinal() -> int:
    """This process's rank."""
    return current_mesh().rank if model_parallel_is_initialized() else 0


def xrt_world_size() -> int:
    """Number of ranks."""
    return current_mesh().shape.world_size if model_parallel_is_initialized() else 1


def is_master_ordinal(local: bool = True) -> bool:
    """Whether this is rank 0."""
    return get_ordinal() == 0


def add_step_closure(closure: Callable[..., Any], args: Sequence[Any] = ()) -> None:
    """Runs `closure`: every step ends at once."""
    closure(*args)
