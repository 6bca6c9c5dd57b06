"""Access to private names of `torch.distributed.fsdp`. No other file reads them.

Each private name is read in one function here. The names were checked in torch 2.11, 2.12 and 2.13.

# [Note: left gathered]
After a forward without backward, FSDP2 leaves some units gathered. Their modules then hold unsharded parameters instead
of the sharded ones that optimizers know. So a forward without gradients frees them when it ends. After a forward with
gradients a backward may still come: `zero_grad` frees them first, and a changed `requires_grad` is carried over. An
optimizer over gathered parameters is an error.

# [Note: a part called alone]
FSDP2 treats the first module that runs as its root, and gathers parameters outside of units when the root runs.
Generation runs an encoder alone, and a user's loop may run the base model, or the head on chunks of the sequence. So
such a call runs FSDP2's root hooks too.

# [Note: parameters that no rank used]
Ranks that run different experts or branches must still reduce the same gradients. So FSDP2 reduces zeros for the
parameters that a rank did not use. If no rank used a parameter, the unsplit model has no gradient for it, and an
optimizer skips it; with a zero gradient, weight decay and momentum would change it. So this rank records which
gradients it contributes. In the gradient phase ranks exchange these records (`optim/summing.py`), and a gradient that
was None before and that no rank contributed to becomes None again. FSDP2 may accumulate over several backwards before
it reduces: a record is kept until the parameter is reduced.

A unit may also receive a tensor that it does not use. FSDP2 passes all inputs through an autograd function, which would
turn the missing gradient into zeros. `keep_unused_gradients_none` prevents that.
"""

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from shardwise.errors import UnsupportedError

_REDUCES_UNUSED = hasattr(FSDPModule, "set_reduce_scatter_unused_params")  # torch 2.13


def units_of(root: nn.Module) -> list[FSDPModule]:
    """Returns the FSDP2 units (`FSDPModule`) in `root`, including `root`."""
    return [module for module in root.modules() if isinstance(module, FSDPModule)]


def _groups(unit: FSDPModule) -> list[Any]:
    """Returns the `FSDPParamGroup`s of a unit."""
    state = unit._get_fsdp_state()
    groups = state._fsdp_param_groups if hasattr(state, "_fsdp_param_groups") else [state._fsdp_param_group]
    return [group for group in groups if group is not None]


def _fsdp_params(root: nn.Module) -> Iterator[Any]:
    """Yields every `FSDPParam` in `root`."""
    for unit in units_of(root):
        for group in _groups(unit):
            yield from group.fsdp_params


def _gathered(fsdp_param: Any) -> nn.Parameter | None:
    """Returns the gathered parameter; None before the first forward."""
    parameter: nn.Parameter | None = getattr(fsdp_param, "_unsharded_param", None)
    return parameter


def free(unit: FSDPModule) -> None:
    """Frees the gathered parameters of an FSDP2 unit, so that its modules hold the sharded ones again."""
    groups = _groups(unit)
    if not all(group.is_sharded for group in groups):
        for group in groups:
            _carry_over_requires_grad(group)
        unit.reshard()


def free_after_evaluation(root: nn.Module, *_: Any) -> None:
    """Frees gathered parameters after the FSDP2 root's forward without gradients; see [Note: left gathered]."""
    for unit in units_of(root) if not torch.is_grad_enabled() else ():
        free(unit)


def gathered_parameters(root: nn.Module) -> set[nn.Parameter]:
    """Returns the unsharded parameters that modules hold while units are gathered."""
    return {parameter for each in _fsdp_params(root) if (parameter := _gathered(each)) is not None}


def drop_unreduced(root: nn.Module) -> None:
    """Drops the gradients in all units of `root` that FSDP2 keeps for a later backward to reduce."""
    for unit in units_of(root):
        for group in _groups(unit):
            group._partial_reduce_output = None
    for fsdp_param in _fsdp_params(root):
        if not isinstance(getattr(type(fsdp_param), "unsharded_accumulated_grad", None), property):
            fsdp_param.unsharded_accumulated_grad = None  # torch 2.15 keeps it in the gathered parameter
        if (parameter := _gathered(fsdp_param)) is not None:
            parameter.grad = None


def reset_interrupted(root: FSDPModule) -> None:
    """Resets FSDP2 after a forward or backward that raised; drops unreduced gradients. Not inside a backward."""
    if torch._C._current_graph_task_id() != -1:
        return
    state = root._get_fsdp_state()
    if not hasattr(state, "_reset_iter_state"):
        if state._state_ctx.post_backward_final_callback_queued:
            raise UnsupportedError(
                "a step after a backward that was interrupted, with FSDP2",
                why=f"torch {torch.__version__} cannot reset it, and would reduce no gradients",
                fix="use torch 2.13 or newer, or split the model again and load a checkpoint",
            )
        return
    if state._is_root and any(each._training_state.name != "IDLE" for each in state._state_ctx.all_states):
        state._reset_iter_state()
        drop_unreduced(root)  # type: ignore[arg-type]  # it is a module


def carry_over_changes(root: nn.Module, units: Iterable[FSDPModule]) -> None:
    """Carries `requires_grad` from gathered parameters over to the sharded ones, before a forward."""
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
                why="FSDP2 would go on with the one that it was given",
                fix="replace it before the split, or write into it: load_state_dict, or p.data = what is made of p",
            )


def _carry_over_requires_grad(group: Any) -> None:
    """See [Note: left gathered]."""
    for fsdp_param in group.fsdp_params if group.is_unsharded else ():
        fsdp_param.sharded_param.requires_grad_(fsdp_param._unsharded_param.requires_grad)


def run_as_root(root: nn.Module, parts: Iterable[nn.Module]) -> None:
    """Makes a call of one of `parts` outside of a forward of `root` run FSDP2's root hooks of `root`.

    See [Note: a part called alone]. Call this after FSDP2 has installed its hooks.
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
    """Records which parameters this rank's backwards have used since the last gradient phase.

    Covers the units that ranks may use differently; see [Note: parameters that no rank used].

    Attributes:
        fills: whether this class replaces missing gradients by zeros, because FSDP2 does not (torch before 2.13).
        has_reduced: whether FSDP2 has reduced any of the units since the last gradient phase.
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
        """Makes FSDP2 reduce all trained parameters of `unit`, used or not, and records which were used."""
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
        """Returns whether this rank has used each parameter. Ranks sum these values."""
        return [number in self._used for number in range(len(self._fsdp_params))]

    def settle(self, counts: Tensor) -> None:
        """Sets to None the gradients to which no rank has contributed.

        Args:
            counts: int `[n]`, `used` summed over data ranks.
        """
        absent = [self._fsdp_params[number].sharded_param for number in self._absent - self._used]
        if any(parameter.requires_grad for parameter in absent):  # only a rank that lacks one looks
            unused = {number for number, count in enumerate(counts.tolist()) if not count}
            for number in unused & self._absent:
                self._fsdp_params[number].sharded_param.grad = None
        self._used = {number for number in self._used if self._fsdp_params[number].sharded_param.grad is None}
        self._absent.clear()
        self.has_reduced = False


def keep_unused_gradients_none(unit: FSDPModule) -> None:
    """Keeps the gradients of a unit's inputs None where the unit makes none."""
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
