"""The functions of `torch_xla.core.xla_model` that NxD's listings use."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from shardwise.comm.agree import raise_on_all_ranks
from shardwise.compat.neuronx_distributed.parallel_layers import parallel_state as ps
from shardwise.job.groups import world_group
from shardwise.job.processes import pick_device
from shardwise.job.rendezvous import read_rank, read_world_size
from shardwise.optim.summing import average_gradients


def optimizer_step(
    optimizer: torch.optim.Optimizer,
    barrier: bool = False,
    optimizer_args: Mapping[str, Any] | None = None,
    groups: Sequence[Sequence[int]] | None = None,
) -> Any:
    """Averages gradients over the data ranks, unless `move_model_to_device` already makes backward do so, and steps.

    Args:
        groups: the data-parallel groups, which are also the default (torch_xla averages over all ranks by default, and
            divides by their number even if the groups are smaller).

    Raises:
        ConfigError: `groups` are other groups.

    Communicates: like `average_gradients`.
    """
    ps.check_data_groups(groups, "the reduction of gradients")
    average_gradients((each for group in optimizer.param_groups for each in group["params"]), ps.current_mesh())
    return optimizer.step(**(optimizer_args or {}))


def mark_step(wait: bool = False) -> None:
    """Does nothing: operations run eagerly."""


def xla_device(n: int | None = None, devkind: str | None = None) -> torch.device:
    """Returns the device of this rank."""
    return mesh.device if (mesh := ps.opened_mesh()) is not None else pick_device(None)


def rendezvous(tag: str, payload: bytes = b"", replicas: Sequence[int] = ()) -> None:
    """Waits for all ranks.

    Communicates: a gather of a small object over all ranks.
    """
    with raise_on_all_ranks(world_group(read_world_size()), f"coming to {tag}"):
        pass


def master_print(*args: Any, **kwargs: Any) -> None:
    """Prints on rank 0."""
    if read_rank() == 0:
        print(*args, **kwargs)
