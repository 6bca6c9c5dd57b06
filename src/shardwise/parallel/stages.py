"""Pipeline parallelism: makes a model compute stage by stage, and lets go of the parameters of foreign stages."""

from __future__ import annotations

from torch import nn

from shardwise.runtime.registry import Registry
from shardwise.runtime.stages import Stages

__all__ = ["apply_stages"]


def apply_stages(model: nn.Module, registry: Registry) -> Stages:
    """Makes `model` the stages of this rank, as `registry.plan.pipeline` cuts them, in place; names stay.

    Foreign parameters go: they use no memory, `named_parameters()` no longer has them.

    Returns:
        What runs the stages; also kept as `registry.stages`.

    Communicates: nothing.
    """
    raise NotImplementedError
