"""When FSDP2 reduces gradients and frees parameters, where several backwards make one step."""

from __future__ import annotations

from typing import Any

from shardwise.parameters.registry import Registry

__all__ = ["time_reduction"]


def time_reduction(registry: Registry, *, is_last: bool) -> None:
    """Tells FSDP2 what the next backward reduces and frees, by `FsdpPolicy.zero_stage`.

    Args:
        is_last: whether it is the last one of a step.
    """
    root: Any = registry.data_root
    if root is None:
        return
    mesh, stage = registry.mesh, registry.policy.zero_stage
    root.set_is_last_backward(is_last)
    if stage == 1 or mesh.size("fsdp") == 1:
        root.set_requires_gradient_sync(is_last)
    elif mesh.size("ddp") > 1:
        root.set_requires_all_reduce(is_last)
    if stage < 3:
        root.set_reshard_after_backward(is_last)
