"""The few calls of `torch_xla.core.xla_model` that NxD's listings make."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from shardwise.comm.agree import raise_on_all_ranks
from shardwise.comm.operations import all_gather_objects, all_reduce_
from shardwise.compat.neuronx_distributed.parallel_layers import parallel_state as ps
from shardwise.job.devices import pick_device
from shardwise.job.groups import world_group
from shardwise.job.rendezvous import read_rank as get_ordinal
from shardwise.job.rendezvous import read_world_size
from shardwise.optim.summing import average_gradients
from shardwise.plan.options import check_choice

__all__ = [
    "REDUCE_MAX", "REDUCE_SUM", "add_step_closure", "all_reduce", "get_ordinal", "is_master_ordinal", "mark_step",
    "master_print", "mesh_reduce", "optimizer_step", "reduce_gradients", "rendezvous", "set_rng_state", "xla_device",
    "xrt_world_size",
]  # fmt: skip

REDUCE_SUM, REDUCE_MAX = "sum", "max"


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
    reduce_gradients(optimizer, groups)
    return optimizer.step(**(optimizer_args or {}))


def reduce_gradients(optimizer: torch.optim.Optimizer, groups: Sequence[Sequence[int]] | None = None) -> None:
    """The first half of `optimizer_step`."""
    ps.check_data_groups(groups, "the reduction of gradients")
    average_gradients((each for group in optimizer.param_groups for each in group["params"]), ps.current_mesh())


def all_reduce(reduce_type: str, inputs: Any, scale: float = 1.0, groups: Sequence[Sequence[int]] | None = None) -> Any:
    """The sum or the largest over `groups`, those of `parallel_state`, or over all ranks, times `scale`; a new tensor,
    or None where `inputs` is a list, whose tensors are changed in place.

    Raises:
        ConfigError: the groups are others, or it is another reduction.
    """
    check_choice("reduce_type", reduce_type, (REDUCE_SUM, REDUCE_MAX))
    if isinstance(inputs, list):
        for each in inputs:
            each.data.copy_(all_reduce(reduce_type, each, scale, groups))
        return None
    out, group = inputs.detach().clone(), ps.current_mesh().group_of(groups)
    if group is not None:
        all_reduce_(out, group, largest=reduce_type == REDUCE_MAX)
    return out * scale


def mesh_reduce(tag: str, data: Any, reduce_fn: Callable[[list[Any]], Any]) -> Any:
    """`reduce_fn` of every rank's `data`, a small object."""
    return reduce_fn(all_gather_objects(data, world_group(read_world_size())))


def set_rng_state(seed: int, device: Any = None) -> None:
    """`torch.manual_seed`."""
    torch.manual_seed(seed)


def mark_step(wait: bool = False) -> None:
    """Nothing: operations run at once."""


def xla_device(n: int | None = None, devkind: str | None = None) -> torch.device:
    """The device of this rank."""
    return ps.current_mesh().device if ps.model_parallel_is_initialized() else pick_device(None)


def rendezvous(tag: str, payload: bytes = b"", replicas: Sequence[int] = ()) -> None:
    """Waits for all ranks.

    Communicates: a gather of a small object over all ranks.
    """
    with raise_on_all_ranks(world_group(read_world_size()), f"coming to {tag}"):
        pass


def master_print(*args: Any, **kwargs: Any) -> None:
    """Prints on rank 0."""
    if is_master_ordinal():
        print(*args, **kwargs)


def xrt_world_size() -> int:
    """Number of ranks, also before they meet."""
    return dist.get_world_size() if dist.is_initialized() else read_world_size()


def is_master_ordinal(local: bool = True) -> bool:
    """Whether this is rank 0."""
    return get_ordinal() == 0


def add_step_closure(closure: Callable[..., Any], args: Sequence[Any] = ()) -> None:
    """Runs `closure`: every step ends at once."""
    closure(*args)
