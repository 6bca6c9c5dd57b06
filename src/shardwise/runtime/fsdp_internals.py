"""What FSDP2 keeps to itself and we need: the one file that reads private names of `torch.distributed.fsdp`.

Every private name stands in one function or method here. They were read in torch 2.11, 2.12 and 2.13; what a version
lacks is said where it is asked for.

# [Note: left gathered]
After a forward without backward FSDP2 leaves the last units gathered, or all: a module then has other parameters than
those at rest, which alone count. So a forward without gradients frees them when it ends. After one with gradients
backward may come: `zero_grad` frees them first, a changed `requires_grad` is carried over, and an optimizer over
gathered parameters is an error.

# [Note: a part called alone]
FSDP2 takes the first module that runs for its root, and gathers what is in no unit when the root runs. But generation
runs an encoder by itself, and a loop of one's own may run the base model, or the head on chunks of the sequence. So
what FSDP2 does around the root's forward is done around such a call, too.

# [Note: parameters that no rank used]
Ranks that run other experts, or other branches, must reduce the same gradients all the same. So FSDP2 reduces zeros for
the parameters of a unit that a rank has not used. Where no rank has used one, the unsplit model has no gradient, and an
optimizer leaves the parameter as it is; zeros it would decay, and move by momentum. So what FSDP2 takes is noted before
it is reduced, and the gradient phase tells the ranks of each other's (`optim/summing.py`): a gradient that was None
before, and that nobody contributed to, becomes None again. FSDP2 may hold a gradient back over several backwards before
it reduces: a note is kept until the parameter has its sum.

A tensor that a unit receives and does not use has no gradient either; FSDP2, which passes all of them through a
function of its own, would make it zeros, and so of the parameters that it was made of (`keep_unused_gradients_none`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from shardwise.errors import UnsupportedError

__all__ = [
    "UnusedParameters",
    "carry_over_changes",
    "drop_unreduced",
    "free",
    "free_after_evaluation",
    "gathered_parameters",
    "keep_unused_gradients_none",
    "reset_interrupted",
    "run_as_root",
    "units_of",
]

_REDUCES_UNUSED = hasattr(FSDPModule, "set_reduce_scatter_unused_params")  # torch 2.13


def units_of(root: nn.Module) -> list[FSDPModule]:
    """The modules in `root` that FSDP2 gathers by themselves, `root` included."""
    return [module for module in root.modules() if isinstance(module, FSDPModule)]


def _groups(unit: FSDPModule) -> list[Any]:
    """FSDP2's groups of parameters that are gathered and reduced together (`FSDPParamGroup`) of a unit."""
    state = unit._get_fsdp_state()
    groups = state._fsdp_param_groups if hasattr(state, "_fsdp_param_groups") else [state._fsdp_param_group]
    return [group for group in groups if group is not None]


def _fsdp_params(root: nn.Module) -> Iterator[Any]:
    """FSDP2's parameters (`FSDPParam`) of all units in `root`."""
    for unit in units_of(root):
        for group in _groups(unit):
            yield from group.fsdp_params


def _gathered(fsdp_param: Any) -> nn.Parameter | None:
    """The gathered parameter; None before the first forward."""
    parameter: nn.Parameter | None = getattr(fsdp_param, "_unsharded_param", None)
    return parameter


def free(unit: FSDPModule) -> None:
    """Frees a unit's gathered parameters: its modules have those at rest again."""
    groups = _groups(unit)
    if not all(group.is_sharded for group in groups):
        for group in groups:
            _carry_over_requires_grad(group)
        unit.reshard()


def free_after_evaluation(root: nn.Module, *_: Any) -> None:
    """Frees gathered parameters after a forward without gradients (a forward hook of the FSDP2 root).

    See [Note: left gathered].
    """
    for unit in units_of(root) if not torch.is_grad_enabled() else ():
        free(unit)


def gathered_parameters(root: nn.Module) -> set[nn.Parameter]:
    """The parameters that modules have in place of those at rest while these are gathered."""
    return {parameter for each in _fsdp_params(root) if (parameter := _gathered(each)) is not None}


def drop_unreduced(root: nn.Module) -> None:
    """Drops gradients in all units of `root` that FSDP2 keeps for a later backward to reduce."""
    for unit in units_of(root):
        for group in _groups(unit):
            group._partial_reduce_output = None
    for fsdp_param in _fsdp_params(root):
        if not isinstance(getattr(type(fsdp_param), "unsharded_accumulated_grad", None), property):
            fsdp_param.unsharded_accumulated_grad = None  # torch 2.15 keeps it in the gathered parameter
        if (parameter := _gathered(fsdp_param)) is not None:
            parameter.grad = None


def reset_interrupted(root: FSDPModule) -> None:
    """Has FSDP2 forget a forward or backward that ended in an exception, with what it had not yet reduced; not inside
    of a backward, which recomputes.

    Raises:
        UnsupportedError: a backward ended so, after which torch before 2.13 reduces no gradients.
    """
    if torch._C._current_graph_task_id() != -1:
        return
    state = root._get_fsdp_state()
    if not hasattr(state, "_reset_iter_state"):
        if state._state_ctx.post_backward_final_callback_queued:
            raise UnsupportedError(
                "a step after a backward that was interrupted, with FSDP2",
                why=f"torch {torch.__version__} cannot forget it, and would reduce no gradients",
                fix="use torch 2.13 or newer, or split the model again and load a checkpoint",
            )
        return
    if state._is_root and any(each._training_state.name != "IDLE" for each in state._state_ctx.all_states):
        state._reset_iter_state()
        drop_unreduced(root)  # type: ignore[arg-type]  # it is a module


def carry_over_changes(root: nn.Module, units: Iterable[FSDPModule]) -> None:
    """Before a forward: carries `requires_grad` set on gathered parameters over to those at rest.

    Raises:
        UnsupportedError: a module has another parameter than FSDP2 gathers for it: that one would be lost. Before the
            first forward FSDP2 takes another `DTensor`, as `load_state_dict(assign=True)` puts in.
    """
    for group in [group for unit in units for group in _groups(unit)]:
        _carry_over_requires_grad(group)
        if not group.is_sharded:
            continue
        for fsdp_param in group.fsdp_params:
            place = fsdp_param._module_info
            held = place.module._parameters.get(place.param_name)
            if held is fsdp_param.sharded_param or (isinstance(held, DTensor) and not group._reset_sharded_params):
                continue
            path = next(path for path, module in root.named_modules() if module is place.module)
            raise UnsupportedError(
                f"another parameter in place of {path}.{place.param_name}, after the split",
                why="FSDP2 gathers and reduces the one that it was given, and would go on with that",
                fix="replace it before the split, or write into it: load_state_dict, or p.data = what is made of p",
            )


def _carry_over_requires_grad(group: Any) -> None:
    """See [Note: left gathered]."""
    for fsdp_param in group.fsdp_params if group.is_unsharded else ():
        fsdp_param.sharded_param.requires_grad_(fsdp_param._unsharded_param.requires_grad)


def run_as_root(root: nn.Module, parts: Iterable[nn.Module]) -> None:
    """Makes FSDP2 treat a call of one of `parts`, outside of a forward of `root`, as one of `root`; see [Note: a part
    called alone]. Call it after FSDP2 has installed its hooks.
    """
    running: list[nn.Module] = []
    units = units_of(root)
    state = root._get_fsdp_state()  # type: ignore[operator]  # it is an `FSDPModule`

    def begin(module: nn.Module, args: Any, kwargs: Any) -> Any:
        if module is root:
            running.clear()  # of what Ctrl-C has interrupted
        running.append(module)
        if len(running) > 1 or module is root:
            return None
        carry_over_changes(root, units)
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


class UnusedParameters:
    """Which parameters this rank's backwards have used since the last gradient phase, of the units that ranks may use
    differently; see [Note: parameters that no rank used].

    Attributes:
        fills: whether zeros are put in place of missing gradients here, where FSDP2 does not (before torch 2.13).
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

    def watch(self, unit: FSDPModule) -> None:
        """Has FSDP2 reduce all trained parameters of a unit, whatever a rank has used, and notes which it has."""
        if not self.fills:
            unit.set_reduce_scatter_unused_params(True, recurse=False)  # torch 2.13
        for group in _groups(unit):
            first = len(self._fsdp_params)
            self._fsdp_params += group.fsdp_params
            group.post_backward = functools.partial(self._note_and_reduce, group, first, group.post_backward)

    def _note_and_reduce(self, group: Any, first: int, reduce: Callable[..., None], *arguments: Any) -> None:
        for number, fsdp_param in enumerate(group.fsdp_params, first):
            self._note(number, fsdp_param, is_reduced=group.reduce_grads)
        reduce(*arguments)

    def _note(self, number: int, fsdp_param: Any, *, is_reduced: bool) -> None:
        parameter = _gathered(fsdp_param)
        if parameter is None:
            return
        if fsdp_param.sharded_param.grad is None:
            self._absent.add(number)
        if parameter.grad is not None or fsdp_param.unsharded_accumulated_grad is not None:
            self._used.add(number)
        elif self.fills and is_reduced and parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)
        self.has_reduced |= is_reduced

    def used(self) -> list[bool]:
        """Whether this rank has used each parameter: what ranks sum."""
        return [number in self._used for number in range(len(self._fsdp_params))]

    def settle(self, counts: Tensor) -> None:
        """Takes gradients away that no rank has contributed to. Args: counts `[n]`: `used`, summed over data ranks."""
        absent = [self._fsdp_params[number].sharded_param for number in self._absent - self._used]
        if any(parameter.requires_grad for parameter in absent):  # only a rank that lacks one looks
            unused = {number for number, count in enumerate(counts.tolist()) if not count}
            for number in unused & self._absent:
                self._fsdp_params[number].sharded_param.grad = None
        self._used = {number for number in self._used if self._fsdp_params[number].sharded_param.grad is None}
        self._absent.clear()
        self.has_reduced = False


def keep_unused_gradients_none(unit: FSDPModule) -> None:
    """Leaves gradients of a unit's inputs absent where it makes none."""
    for group in _groups(unit):
        group._register_post_backward_hook = functools.partial(_pass_through, group._register_post_backward_hook)


def _pass_through(register: Callable[..., Any], *inputs: Any) -> Any:
    passed = register(*inputs)
    for value in tree_leaves(passed):
        node: Any = value.grad_fn if isinstance(value, Tensor) else None
        if type(node).__name__ == "RegisterPostBackwardFunctionBackward":
            node.set_materialize_grads(False)  # of all inputs: one function took them
            break
    return passed
