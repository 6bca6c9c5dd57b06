"""Which parameters backward has used, where FSDP2 reduces zeros for those that it has not.

# [Note: parameters that no rank used]
Ranks that run other experts, or other branches, must reduce the same gradients all the same. So FSDP2 gives zeros to
those parameters of a unit that a rank has not used. Where no rank has, the unsplit model has no gradient at all, and an
optimizer leaves the parameter as it is; zeros it would decay, and move by momentum. So whatever FSDP2 takes is noted
before it is reduced, and the gradient phase tells the ranks of each other's (`optim/summing.py`): a gradient that was
None before, and that nobody contributed to, becomes None again.

A tensor that a unit is given and does not use has no gradient either; FSDP2, which hands all of them through a function
of its own, would make it zeros, and so of the parameters that it was made of (`keep_absent`).

FSDP2 may hold a gradient back over several backwards before it reduces: a note is kept until the parameter has its sum.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.utils._pytree import tree_leaves

from shardwise.runtime.gathered import param_groups

__all__ = ["Uses", "keep_absent"]

_REDUCES_UNUSED = hasattr(FSDPModule, "set_reduce_scatter_unused_params")  # torch 2.13


class Uses:
    """What ranks may use differently, and what this rank's backwards have used of it since the last gradient phase.

    Attributes:
        fills: whether a gradient of zeros is given here, where FSDP2 does not do so by itself (before torch 2.13).
        has_reduced: whether FSDP2 has reduced any of it since the last gradient phase.
    """

    def __init__(self) -> None:
        self.fills = not _REDUCES_UNUSED
        self.has_reduced = False
        self._fsdp_params: list[Any] = []
        self._used: set[int] = set()
        self._absent: set[int] = set()

    def __bool__(self) -> bool:
        return bool(self._fsdp_params)

    def watch(self, unit: nn.Module) -> None:
        """Has FSDP2 reduce all trained parameters of a unit, whatever a rank has used, and notes which it has."""
        if not self.fills:
            unit.set_reduce_scatter_unused_params(True, recurse=False)  # type: ignore[operator]
        for group in param_groups(unit):  # type: ignore[arg-type]
            self._watch_group(group)

    def _watch_group(self, group: Any) -> None:
        first = len(self._fsdp_params)
        self._fsdp_params += group.fsdp_params
        reduce = group.post_backward

        def note_and_reduce(*arguments: Any) -> None:
            for number, fsdp_param in enumerate(group.fsdp_params, first):
                self._note(number, fsdp_param, is_reduced=group.reduce_grads)
            reduce(*arguments)

        group.post_backward = note_and_reduce

    def _note(self, number: int, fsdp_param: Any, *, is_reduced: bool) -> None:
        if not hasattr(fsdp_param, "_unsharded_param"):  # it has never been gathered
            return
        unsharded = fsdp_param._unsharded_param
        if fsdp_param.sharded_param.grad is None:
            self._absent.add(number)
        if unsharded.grad is not None or fsdp_param.unsharded_accumulated_grad is not None:
            self._used.add(number)
        elif self.fills and is_reduced and unsharded.requires_grad:
            unsharded.grad = torch.zeros_like(unsharded)
        self.has_reduced |= is_reduced

    def used(self) -> list[bool]:
        """Whether this rank has used each parameter: what ranks sum."""
        return [number in self._used for number in range(len(self._fsdp_params))]

    def settle(self, counts: Tensor) -> None:
        """Takes the gradients away that no rank has contributed to; `counts` are summed over the data ranks."""
        absent = [self._fsdp_params[number].sharded_param for number in self._absent - self._used]
        if any(parameter.requires_grad for parameter in absent):  # only a rank that lacks one looks
            nowhere = {number for number, count in enumerate(counts.tolist()) if not count}
            for number in nowhere & self._absent:
                self._fsdp_params[number].sharded_param.grad = None
        self._used = {number for number in self._used if self._fsdp_params[number].sharded_param.grad is None}
        self._absent.clear()
        self.has_reduced = False


def keep_absent(unit: FSDPModule) -> None:
    """Leaves gradients of a unit's inputs absent where it makes none."""
    for group in param_groups(unit):
        group._register_post_backward_hook = functools.partial(_pass_through, group._register_post_backward_hook)


def _pass_through(register: Callable[..., Any], *inputs: Any) -> Any:
    passed = register(*inputs)
    for each in tree_leaves(passed):
        made_by: Any = each.grad_fn if isinstance(each, Tensor) else None
        if type(made_by).__name__ == "RegisterPostBackwardFunctionBackward":
            made_by.set_materialize_grads(False)  # of all inputs: one function took them
            break
    return passed
