"""`NxDOptimizer`: the result of `initialize_parallel_optimizer`."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from shardwise.compat.layers.split_module import mark_known
from shardwise.mesh import Mesh
from shardwise.optim.clip import clip_grad_norm_
from shardwise.optim.optimizer import local_state_of
from shardwise.optim.summing import average_gradients
from shardwise.parameters.canonical import sharded_alike


class NxDOptimizer(torch.optim.Optimizer):
    """Wraps an optimizer; schedulers and torch treat it as one.

    Args:
        optimizer: an optimizer of a split model, or of an unregistered one that is equal on tp ranks.
        mesh: mesh whose data ranks share the batch.

    Attributes:
        grad_norm: norm of the last step before clipping; None without clipping.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, mesh: Mesh, *, max_norm: float | None) -> None:
        # No super().__init__: what is registered for steps runs in the wrapped optimizer's.
        self.optimizer, self.max_norm = optimizer, max_norm
        self.grad_norm: Tensor | None = None
        self._mesh = mesh

    @property
    def params(self) -> list[Tensor]:
        """The parameters of all groups."""
        return [each for group in self.param_groups for each in group["params"]]

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Averages gradients of unregistered parameters over data ranks, clips by their full norm, and steps.

        Communicates: like `average_gradients` and `clip_grad_norm_`.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        average_gradients(self.params, self._mesh)
        if self.max_norm is not None:
            known = self.params or [torch.empty(0)]  # a stage without any takes part in the sum
            mark_known(known, self._mesh)
            self.grad_norm = clip_grad_norm_(known, self.max_norm)
        self.optimizer.step()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Calls the wrapped optimizer's `zero_grad`."""
        self.optimizer.zero_grad(set_to_none)

    def state_dict(self) -> Any:
        """Returns the wrapped optimizer's state dict with this rank's parts, for saving per rank."""
        return local_state_of(self.optimizer)

    def load_state_dict(self, state_dict: Any) -> None:
        """Loads the result of `state_dict` on this rank, or on the data ranks together."""
        self.optimizer.load_state_dict(state_dict)
        for parameter, state in self.optimizer.state.items():
            for name, value in state.items():
                state[name] = sharded_alike(value, parameter) if isinstance(value, Tensor) else value

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["optimizer"], name)
