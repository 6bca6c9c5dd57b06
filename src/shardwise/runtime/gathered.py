"""Units that FSDP2 has gathered.

# [Note: left gathered]
After a forward without backward FSDP2 leaves the last units gathered, or all: whoever then asks a module for its
parameters is given others than those at rest, whose gradients and `requires_grad` count. What is done to them is done
to those at rest, too: `zero_grad` frees the units first, and a `requires_grad` that was changed is carried over.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule

__all__ = ["follow_requires_grad", "free", "param_groups"]


def free(unit: FSDPModule) -> None:
    """Frees a unit's gathered parameters: its modules have those at rest again."""
    _follow(unit)
    unit.reshard()


def follow_requires_grad(root: nn.Module) -> None:
    """Carries over to the parameters at rest what gathered ones were told; see [Note: left gathered]."""
    for module in root.modules():
        if isinstance(module, FSDPModule):
            _follow(module)


def param_groups(unit: FSDPModule) -> list[Any]:
    """What FSDP2 gathers and reduces at once of a unit."""
    state = unit._get_fsdp_state()
    found = state._fsdp_param_groups if hasattr(state, "_fsdp_param_groups") else [state._fsdp_param_group]
    return [group for group in found if group is not None]


def _follow(unit: FSDPModule) -> None:
    for group in param_groups(unit):
        for held in group.fsdp_params if group.is_unsharded else ():
            held.sharded_param.requires_grad_(held._unsharded_param.requires_grad)
