"""Gradients of zero for what a unit did not use.

FSDP2 before torch 2.13 reduces the gradients that are there. Ranks whose rows went to other experts would then reduce
tensors of other sizes with each other.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["reach_all_parameters"]


def reach_all_parameters(unit: nn.Module) -> None:
    """Makes every trained parameter of `unit` part of its output's graph, in place; to be called before FSDP2 shards
    it. A parameter that the unit did not use gets a gradient of zeros.
    """

    def reach(module: nn.Module, args: Any, output: Any) -> Any:
        parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
        if not torch.is_grad_enabled() or not parameters:
            return output
        if isinstance(output, Tensor):
            return _Reach.apply(output, *parameters)
        return type(output)((_Reach.apply(output[0], *parameters), *output[1:]))

    unit.register_forward_hook(reach)


class _Reach(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, *parameters: Tensor) -> Tensor:
        ctx.like = [(parameter.shape, parameter.dtype, parameter.device) for parameter in parameters]
        return x.clone()  # no view: what is written into a view later escapes the hooks on this output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, ...]:
        return gradient, *(torch.zeros(shape, dtype=dtype, device=device) for shape, dtype, device in ctx.like)
