"""Units that FSDP2 has gathered.

# [Note: left gathered]
After a forward without backward FSDP2 leaves the last units gathered, or all: whoever then asks a module for its
parameters is given others than those at rest, which alone count. So a forward without gradients frees them when it
ends. After one with gradients backward may come: `zero_grad` frees them first, a `requires_grad` that was changed is
carried over, and an optimizer that was built over them is an error.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from shardwise.errors import UnsupportedError

__all__ = [
    "drop_unreduced",
    "forget_interrupted",
    "free",
    "free_after_evaluation",
    "gathered_parameters",
    "hands_out_gradients",
    "param_groups",
    "take_changes",
]


def free(unit: FSDPModule) -> None:
    """Frees a unit's gathered parameters: its modules have those at rest again."""
    for group in param_groups(unit):
        if not group.is_sharded:
            _follow_requires_grad(unit)
            unit.reshard()
            return


def forget_interrupted(root: nn.Module) -> None:
    """Lets FSDP2 forget a forward or backward that ended in an exception, with what it had not yet reduced; not inside
    of a backward, which recomputes.

    Raises:
        UnsupportedError: a backward ended so, after which this torch reduces no gradients.
    """
    if torch._C._current_graph_task_id() != -1:
        return
    state = cast(FSDPModule, root)._get_fsdp_state()
    states = state._state_ctx.all_states
    if not hasattr(state, "_reset_iter_state"):
        if state._state_ctx.post_backward_final_callback_queued:
            raise UnsupportedError(
                "a step after a backward that was interrupted, with FSDP2",
                why=f"torch {torch.__version__} cannot forget it, and would reduce no gradients",
                fix="use torch 2.13 or newer, or split the model again and load a checkpoint",
            )
        return
    if state._is_root and any(each._training_state.name != "IDLE" for each in states):
        state._reset_iter_state()
        drop_unreduced(root)


def drop_unreduced(root: nn.Module) -> None:
    """Lets FSDP2 forget gradients that wait for a later backward to be reduced, of all units of `root`."""
    for group in (group for each in root.modules() if isinstance(each, FSDPModule) for group in param_groups(each)):
        group._partial_reduce_output = None
        for fsdp_param in group.fsdp_params:
            fsdp_param.unsharded_accumulated_grad = None
            if hasattr(fsdp_param, "_unsharded_param"):
                fsdp_param._unsharded_param.grad = None


def free_after_evaluation(root: nn.Module, *_: Any) -> None:
    """A forward hook of a root: without gradients no backward follows; see [Note: left gathered]."""
    for module in root.modules() if not torch.is_grad_enabled() else ():
        if isinstance(module, FSDPModule):
            free(module)


def gathered_parameters(root: nn.Module) -> set[nn.Parameter]:
    """What modules have in place of their parameters at rest while those are gathered."""
    units = (module for module in root.modules() if isinstance(module, FSDPModule))
    fsdp_params = (each for unit in units for group in param_groups(unit) for each in group.fsdp_params)
    return {each._unsharded_param for each in fsdp_params if hasattr(each, "_unsharded_param")}


def hands_out_gradients(root: nn.Module) -> bool:
    """Whether the backward that runs is `torch.autograd.grad` of gathered parameters: before FSDP2 reduces anything."""
    for unit in (module for module in root.modules() if isinstance(module, FSDPModule)):
        for fsdp_param in (each for group in param_groups(unit) for each in group.fsdp_params):
            parameter = getattr(fsdp_param, "_unsharded_param", None)
            if parameter is None or not parameter.requires_grad:
                continue
            try:
                if torch._C._will_engine_execute_node(torch.autograd.graph.get_gradient_edge(parameter).node):
                    return False
            except RuntimeError:  # torch's answer for leaves that are handed out
                return True
    return False


def param_groups(unit: FSDPModule) -> list[Any]:
    """What FSDP2 gathers and reduces at once of a unit."""
    state = unit._get_fsdp_state()
    found = state._fsdp_param_groups if hasattr(state, "_fsdp_param_groups") else [state._fsdp_param_group]
    return [group for group in found if group is not None]


def take_changes(root: nn.Module) -> None:
    """Before a forward: `requires_grad` set on gathered parameters is carried over to those at rest.

    Raises:
        UnsupportedError: a module has another parameter than FSDP2 gathers for it: that one would be lost. Before the
            first forward FSDP2 takes another `DTensor`, as `load_state_dict(assign=True)` puts in.
    """
    for unit in (module for module in root.modules() if isinstance(module, FSDPModule)):
        _follow_requires_grad(unit)
        for group in param_groups(unit):
            for fsdp_param in group.fsdp_params if group.is_sharded else ():
                owner, name = fsdp_param._module_info.module, fsdp_param._module_info.param_name
                own = getattr(owner, name)
                if own is fsdp_param.sharded_param or (isinstance(own, DTensor) and not group._reset_sharded_params):
                    continue
                path = next(path for path, module in root.named_modules() if module is owner)
                raise UnsupportedError(
                    f"another parameter in place of {path}.{name}, after the split",
                    why="FSDP2 gathers and reduces the one that it was given, and would go on with that",
                    fix="replace it before the split, or write into it: load_state_dict, or p.data = what is made of p",
                )


def _follow_requires_grad(unit: FSDPModule) -> None:
    """See [Note: left gathered]."""
    for group in param_groups(unit):
        for fsdp_param in group.fsdp_params if group.is_unsharded else ():
            fsdp_param.sharded_param.requires_grad_(fsdp_param._unsharded_param.requires_grad)
