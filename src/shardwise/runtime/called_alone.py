"""Parts of a model under FSDP2 that are called by themselves: `model.get_encoder()(ids)`, `model.lm_head(hidden)`.

# [Note: a part called alone]
FSDP2 takes the first module that runs for its root, and gathers what is in no unit when the root runs. But generation
runs an encoder by itself, and a loop of one's own may run the base model, or the head on chunks of the sequence. So
what FSDP2 does around the root's forward is done around such a call, too.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

from torch import nn
from torch.distributed.fsdp import FSDPModule

from shardwise.runtime.gathered import free_after_evaluation, take_changes

__all__ = ["run_as_root"]


def run_as_root(root: nn.Module, parts: Iterable[nn.Module]) -> None:
    """Makes FSDP2 treat a call of one of `parts`, outside of a forward of `root`, as one of `root`. Call it after FSDP2
    has installed its hooks.
    """
    running: list[nn.Module] = []
    state = cast(FSDPModule, root)._get_fsdp_state()

    def begin(module: nn.Module, args: Any, kwargs: Any) -> Any:
        if module is root:
            running.clear()  # of what Ctrl-C has interrupted
        running.append(module)
        if len(running) > 1 or module is root:
            return None
        take_changes(root)
        return state._pre_forward(root, args, kwargs)

    def end(module: nn.Module, args: Any, output: Any) -> Any:
        return output if len(running) > 1 else state._post_forward(root, args, output)

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        if running and running[-1] is module:
            running.pop()
        if not running and module is not root:
            free_after_evaluation(root)

    for module in (root, *parts):
        module.register_forward_pre_hook(begin, prepend=True, with_kwargs=True)
        if module is not root:
            module.register_forward_hook(end)
        module.register_forward_hook(leave, always_call=True)
