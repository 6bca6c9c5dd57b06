"""`NxDOptimizer`: an optimizer whose step completes and clips the gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardwise.compat.neuronx_distributed.parallel_layers.grads import clip_grad_norm
from shardwise.compat.neuronx_distributed.parallel_layers.parallel_state import current_mesh
from shardwise.train.average import average_gradients

__all__ = ["NxDOptimizer", "grouped"]


class NxDOptimizer(torch.optim.Optimizer):
    """Wraps an optimizer; schedulers and torch take it for one.

    Attributes:
        optimizer: the wrapped one.
        grad_norm: before clipping, of the last step; None where nothing is clipped.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, nxd_config: Mapping[str, Any]) -> None:
        # No super().__init__: what is registered for steps runs in the wrapped optimizer's.
        self.optimizer, self.nxd_config = optimizer, nxd_config
        self.grad_norm: Tensor | None = None

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Averages over data ranks what nobody has, clips by the norm of the full gradients, and steps.

        Communicates: as `average_gradients` and `clip_grad_norm`.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        parameters = [each for group in self.param_groups for each in group["params"]]
        average_gradients(parameters, current_mesh())
        options = self.nxd_config["optimizer_config"]
        if options["grad_clipping"]:
            self.grad_norm = clip_grad_norm(parameters, options["max_grad_norm"])
        self.optimizer.step()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """The wrapped one's."""
        self.optimizer.zero_grad(set_to_none)

    def state_dict(self) -> Any:
        """The wrapped one's, where this rank's parts are wanted; see `save_checkpoint`."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: Any) -> None:
        """The wrapped one's."""
        self.optimizer.load_state_dict(state_dict)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["optimizer"], name)

    def __repr__(self) -> str:
        return f"NxDOptimizer({self.optimizer!r})"


def grouped(parameters: Iterable[Any]) -> list[dict[str, Any]]:
    """Parameter groups in which what FSDP2 holds is apart from what it does not: foreach optimizers take no mixture."""
    groups = list(parameters)
    if not groups or not isinstance(groups[0], dict):
        groups = [{"params": groups}]
    found = []
    for group in groups:
        chosen = [each for each in group["params"] if each.requires_grad]
        for kind in (True, False):
            own = [each for each in chosen if isinstance(each, DTensor) is kind]
            found += [{**group, "params": own}] if own else []
    return found
