"""Assignments to `data` of parameters of which ranks hold parts: accepted, or an error."""

import itertools
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import optimizer as torch_optimizer
from torch.utils import _foreach_utils

from shardwise.errors import UnsupportedError
from shardwise.parameters.registry import (
    DataHandling,
    ParameterEntry,
    attach_entry,
    axes_of,
    entries_of,
    entry_of,
    find_parameters,
    registry_of,
    untied,
)
from shardwise.plan.decision import SplitPlan
from shardwise.plan.structure import fqn_of
from shardwise.sharding.layout import Layout, steps_along
from shardwise.topology.shape import FSDP_AXES

_DATA: Any = Tensor.data


class _AssignedDTensor(DTensor):
    """A `DTensor` parameter that accepts a `DTensor` assigned to `data`. torch would keep the old values."""

    def _set_data(self, value: Tensor) -> None:
        def kind(x: Any) -> Any:
            return isinstance(x, DTensor) and (x.shape, x.dtype, x.placements)

        if kind(value) != kind(self):
            raise _refused(
                f"p.data = a {type(value).__name__} of {list(value.shape)}", self.to_local().shape, self.dtype
            )
        with torch.no_grad():
            self._local_tensor.copy_(value._local_tensor)  # type: ignore[attr-defined]  # a `DTensor`

    data = property(_DATA.__get__, _set_data)

    def detach(self) -> Any:
        """Like torch, but of the same class, as `nn.Parameter` requires."""
        value = super().detach()
        value.__class__ = type(self)
        return value

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        copied = memo[id(self)] = nn.Parameter(DTensor.detach(self).clone(), self.requires_grad)
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        return DTensor.detach(self).__reduce_ex__(protocol)


def take_assignments(parameter: Any) -> None:
    """Makes a `DTensor` parameter accept assignments to its `data`, or raise."""
    if type(parameter) is DTensor:
        parameter.__class__ = _AssignedDTensor


def check_assignments(model: nn.Module) -> None:
    """Checks assignments to `data` of parameters: with data axes at once, with only tp at the next training forward."""
    entries = []
    for _, parameter, entry in find_parameters(model):
        entries += [entry] if entry is not None else []
        take_assignments(parameter)
    if any(entry.split is not None and entry.data is not DataHandling.FSDP for entry in entries):
        model.register_forward_pre_hook(_check_shapes, prepend=True)


def _check_shapes(model: nn.Module, *_: Any) -> None:
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        deque(find_parameters(model), maxlen=0)


def _refused(what: str, shape: Sequence[int], dtype: torch.dtype) -> UnsupportedError:
    return UnsupportedError(
        f"{what}, of a parameter of which this rank holds a part",
        why=f"that is {list(shape)} of {dtype}, split as before",
        fix="assign what was made of p (p.data * 0.5, a clone of p), or load full tensors by load_state_dict",
    )


for _types in (torch_optimizer._foreach_supported_types, _foreach_utils._foreach_supported_types):
    _types.append(_AssignedDTensor)  # as torch does for `DTensor`


_INPUT = "_shardwise_input"


def note_inputs(model: nn.Module, plan: SplitPlan) -> None:
    """Records the input of every module: "split" features or heads, a "part" of the sequence, or "full" tensors.

    Parameters that are added to the module later have the same input.
    """
    split = {plan.tensor.head, *plan.tensor.modules, *(region.fqn for region in plan.tensor.regions)}
    sequence = plan.tokens
    for name, module in model.named_modules() if plan.num_parts > 1 else ():
        if any(fqn in split for fqn in itertools.accumulate(name.split("."), "{}.{}".format)):
            module.__dict__[_INPUT] = "split"
        else:
            has_part = sequence is not None and sequence.stack_of(name) is not None
            module.__dict__[_INPUT] = "part" if has_part else "full"


def adopt_parameters(model: nn.Module) -> None:
    """Registers every trained parameter without an entry, as replicated on every rank."""
    registry, inputs = registry_of(model), {"": "full"}
    mesh = registry.mesh
    steps = steps_along(("tp", *FSDP_AXES[::-1]), mesh.shape)
    for name, module in model.named_modules():
        kind = inputs[name] = module.__dict__.get(_INPUT) or inputs[name.rpartition(".")[0]]
        for own, parameter in module._parameters.items():
            if parameter is None or not parameter.requires_grad or own in entries_of(module):
                continue
            fqn, entry = fqn_of(name, own), entry_of(parameter)
            if entry is None and (tied := set(registry.names_of(registry.tied.get(fqn, fqn))) - {fqn}):
                raise untied(min(tied), fqn)
            if mesh.size("pp") > 1 or (kind == "split" and (entry is None or entry.split is not None)):
                raise UnsupportedError(
                    f"{fqn}, which came into the model after it was split",
                    why="its split and its stage are unknown",
                    fix="add it before shardwise.parallelize splits the model (adapters by adapter=), or freeze it",
                )
            new = ParameterEntry(
                fqn=fqn,
                layout=Layout(tuple(parameter.shape), steps),
                partial_over=axes_of("partial" if kind == "part" else "full"),
                data=DataHandling.ALL_REDUCE if mesh.data_size > 1 else DataHandling.NONE,
                registry=registry,
            )
            attach_entry(module, own, entry or new)
