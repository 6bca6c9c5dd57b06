"""nvFSDP's sharding strategies."""

from __future__ import annotations

import enum
from typing import Any

from shardwise.compat.warned import warn_once
from shardwise.plan.options import FsdpPolicy, check_choice

__all__ = ["Strategy", "read_strategy", "warn_of_unused"]


class Strategy(enum.Enum):
    """What data ranks shard; the values are the names that nvFSDP takes."""

    NO_SHARD = "no_shard"
    OPTIM = "optim"
    OPTIM_GRADS = "optim_grads"
    OPTIM_GRADS_PARAMS = "optim_grads_params"

    def policy(self, units: tuple[str, ...], **options: Any) -> FsdpPolicy:
        """The `FsdpPolicy` that does it, with other options of it."""
        stage = {Strategy.OPTIM: 1, Strategy.OPTIM_GRADS: 2}.get(self, 3)
        return FsdpPolicy(zero_stage=stage, units=units, **options)


_OF_THE_DOCUMENT = {"params": Strategy.OPTIM_GRADS_PARAMS, "grads_params": Strategy.OPTIM_GRADS_PARAMS}


def read_strategy(name: str) -> Strategy:
    """The strategy of that name.

    Raises:
        ConfigError: there is none.
    """
    known = {each.value: each for each in Strategy} | _OF_THE_DOCUMENT
    check_choice("data_parallel_sharding_strategy", name, tuple(known))
    return known[name]


def warn_of_unused(**given: bool) -> None:
    """Warns once of every argument that is given another value than its default and has no equivalent in FSDP2."""
    for name in (name for name, is_given in given.items() if is_given):
        warn_once(f"nvfsdp_strategy_parallelize: {name} has no equivalent in FSDP2 and changes nothing")
