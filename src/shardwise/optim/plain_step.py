"""Steps of torch's optimizers over plain tensors: those in `DTensor`s, and in gradients that know their full ones.

An operation on `DTensor`s decides in Python, for every tensor, what to do with its parts. Elementwise optimizers update
parts as they would update full tensors, so while a step is under way its groups hold the parts. Before and after it
they hold parameters, and states are stored with these, in the same form.
"""

from __future__ import annotations

import functools
import operator
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from shardwise.parameters.registry import entry_of, local_part

__all__ = ["KEPT_BY_STEPS", "class_of", "inner_of", "leave_out", "stepping_class", "takes_left_out", "with_fused"]

_PARTS = "_shardwise_parts"
_LEFT_OUT = "_shardwise_left_out"
KEPT_BY_STEPS = (_PARTS, _LEFT_OUT, "_shardwise_known")
"""Attributes of optimizers in which steps keep what they found, for the next one."""

_FUSED = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD)
"""Adagrad has a fused form on CPUs alone."""

_HOW = ("foreach", "fused", "capturable", "differentiable")


def stepping_class(optimizer_class: type[torch.optim.Optimizer]) -> type[torch.optim.Optimizer]:
    """An optimizer class of torch that has a fused form, whose instances step over plain tensors; any other class as it
    is.
    """
    return _stepping(optimizer_class) if optimizer_class in _FUSED else optimizer_class


@functools.cache
def _stepping(optimizer_class: Any) -> type[torch.optim.Optimizer]:
    own = optimizer_class.step
    own = own.__wrapped__ if getattr(own, "hooked", False) else own  # hooks of a step run once

    @functools.wraps(own)
    def step(self: Any, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        is_left_out = self.__dict__.pop(_LEFT_OUT, None)
        with _plain_tensors(self):
            if is_left_out is None:
                own(self)
                return loss
            self.found_inf = is_left_out  # as GradScaler gives it
            try:
                own(self)
            finally:
                del self.found_inf
        return loss

    def reduce(self: Any) -> tuple[Any, ...]:
        return _new, (optimizer_class,), self.__getstate__()

    names = {
        "step": step,
        "__reduce__": reduce,
        "__module__": optimizer_class.__module__,
        "__qualname__": optimizer_class.__qualname__,
        "__doc__": optimizer_class.__doc__,
    }
    return type(optimizer_class.__name__, (optimizer_class,), names)


def class_of(optimizer: torch.optim.Optimizer) -> type[torch.optim.Optimizer]:
    """The class that an optimizer was asked for: torch's in place of one that steps over plain tensors."""
    kind = type(optimizer)
    return next((base for base in _FUSED if kind is _stepping(base)), kind)


def inner_of(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The optimizer that updates: the one inside of torch's `ZeroRedundancyOptimizer`, or `optimizer` itself."""
    inner = getattr(optimizer, "optim", None)
    return inner if isinstance(inner, torch.optim.Optimizer) else optimizer


def takes_left_out(optimizer: torch.optim.Optimizer, device: torch.device) -> bool:
    """Whether a step of the optimizer leaves out what a scalar on `device` says: the same on all ranks, also on those
    to which ZeRO gives no parameters.
    """
    optimizer = inner_of(optimizer)
    if type(optimizer).__bases__[0] not in _FUSED or not {"found_inf", "grad_scale"}.isdisjoint(optimizer.__dict__):
        return False
    return all(
        group["fused"]
        and not (group.get("momentum") and group["dampening"])
        and {each.device for each in group["params"]} <= {device}
        for group in optimizer.param_groups
    )


def leave_out(optimizer: torch.optim.Optimizer, is_left_out: Tensor) -> None:
    """Has the optimizer's next step change nothing where the float32 scalar `is_left_out` is 1."""
    optimizer = inner_of(optimizer)
    known = optimizer.__dict__.get(_LEFT_OUT)  # of another model of its
    optimizer.__dict__[_LEFT_OUT] = is_left_out if known is None else torch.maximum(known, is_left_out)


def _new(optimizer_class: type[torch.optim.Optimizer]) -> torch.optim.Optimizer:
    """An empty one, for `pickle` and `copy` to fill: classes made here have no place of their own."""
    made = stepping_class(optimizer_class)
    return made.__new__(made)


@dataclass
class _Part:
    """A parameter, what this rank holds of it, and the states of both.

    Attributes:
        source: what `local` was made of; another one means that the parameter is stored elsewhere now.
        outer: the parameter's state; None before there is one.
        inner: the same of plain tensors.
    """

    parameter: Tensor
    source: Tensor
    local: Tensor
    outer: dict[str, Any] | None
    inner: dict[str, Any]

    @classmethod
    def of(cls, parameter: Tensor, outer: dict[str, Any] | None) -> _Part:
        source = _source_of(parameter)
        return cls(parameter, source, source.detach(), outer, {})


class _Parts:
    """The parts of an optimizer's parameters, kept from step to step: hashing tensors takes calls, too."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.states = optimizer.state
        self.groups = [[*group["params"]] for group in optimizer.param_groups]
        known = dict(optimizer.state)
        self.parts = [[_Part.of(each, known.get(each)) for each in group] for group in self.groups]
        self.inner: Any = defaultdict(dict)
        for part in (part for group in self.parts for part in group):
            self.inner[part.local] = part.inner
        self.values = list(self.states.values())

    def fits(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether the optimizer's parameters and states are still these."""
        given = [group["params"] for group in optimizer.param_groups]
        values = list(optimizer.state.values())
        if self.states is not optimizer.state or len(given) != len(self.groups) or len(values) != len(self.values):
            return False
        if not all(map(operator.is_, values, self.values)):
            return False
        for mine, theirs, parts in zip(self.groups, given, self.parts, strict=True):
            if len(mine) != len(theirs) or not all(map(operator.is_, mine, theirs)):
                return False
            for part in parts:
                parameter = part.parameter
                source = parameter._local_tensor if isinstance(parameter, DTensor) else parameter
                if source is not part.source or not torch._C._is_alias_of(source, part.local):  # type: ignore[attr-defined]
                    return False
                if source.storage_offset() != part.local.storage_offset():
                    return False
        return True

    def enter(self, groups: Sequence[Mapping[str, Any]]) -> list[list[Tensor]]:
        """Groups of the plain tensors that have gradients, with their states as the parameters have them.

        Fused SGD is given momenta of zeros, from which a step goes as from none: it fails where one parameter's first
        gradient comes after the others', and would leave without values the momenta of a first step that is left out.
        """
        found = []
        for parts, group in zip(self.parts, groups, strict=True):
            plain = []
            begins = group["fused"] and bool(group.get("momentum")) and not group["dampening"]
            for part in parts:
                gradient = part.parameter.grad
                if gradient is None:
                    continue
                if type(gradient) is not Tensor:
                    gradient = gradient._local_tensor if isinstance(gradient, DTensor) else local_part(gradient)
                part.local.grad = gradient
                plain.append(part.local)
                if part.outer is not None:
                    for name, value in part.outer.items():
                        part.inner[name] = value._local_tensor if isinstance(value, DTensor) else value
                if begins and part.inner.get("momentum_buffer") is None:
                    part.inner["momentum_buffer"] = torch.zeros_like(gradient)
            found.append(plain)
        return found

    def leave(self) -> None:
        """Gives the parameters the states that the step has made or replaced."""
        is_new = False
        for parts in self.parts:
            for part in parts:
                part.local.grad = None
                outer = part.outer
                if outer is None:
                    if not part.inner:
                        continue
                    outer, is_new = self.states[part.parameter], True
                    part.outer = outer
                for name, value in part.inner.items():
                    known = outer.get(name)
                    if known is not value and not (isinstance(known, DTensor) and known._local_tensor is value):
                        outer[name] = _as_parameter(value, part.parameter, part.local)
        if is_new:
            self.values = list(self.states.values())


@contextmanager
def _plain_tensors(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Inside, groups hold what this rank holds of the parameters that have gradients, with these and their states."""
    states, groups = optimizer.state, optimizer.param_groups
    given: list[Any] = [group["params"] for group in groups]
    parts: _Parts | None = optimizer.__dict__.get(_PARTS)
    if parts is None or not parts.fits(optimizer):
        parts = optimizer.__dict__[_PARTS] = _Parts(optimizer)
    for group, plain in zip(groups, parts.enter(groups), strict=True):
        group["params"] = plain
    optimizer.state = parts.inner
    try:
        yield
    finally:
        for group, parameters in zip(groups, given, strict=True):
            group["params"] = parameters
        optimizer.state = states
        parts.leave()


def _source_of(parameter: Any) -> Tensor:
    source: Tensor = parameter._local_tensor if isinstance(parameter, DTensor) else parameter
    return source


def _as_parameter(value: Any, parameter: Tensor, local: Tensor) -> Any:
    """A state of the form of its parameter: a `DTensor` where it is one."""
    is_alike = isinstance(value, Tensor) and value.ndim > 0 and value.shape == local.shape
    if not (is_alike and isinstance(parameter, DTensor)):
        return value
    # `DTensor.from_local` would move what is offloaded to the mesh's device.
    meta = TensorMeta(parameter.shape, parameter.stride(), value.dtype)
    spec = DTensorSpec(parameter.device_mesh, parameter.placements, tensor_meta=meta)
    return DTensor(value, spec, requires_grad=False)


def with_fused(
    optimizer_class: type[torch.optim.Optimizer], options: Mapping[str, Any], parameters: Sequence[Tensor]
) -> dict[str, Any]:
    """`options`, with torch's fused form, which makes no temporary tensors, where there is one for these parameters.

    On CPUs it rounds the last few elements of a tensor differently from the others. So parameters of which several tp
    ranks hold the same elements, perhaps in other places of their parts, have another there: copies stay equal.
    """
    asked = any(name in options for name in _HOW) or isinstance(options.get("lr"), Tensor)
    if asked or not parameters or optimizer_class not in _FUSED:
        return dict(options)
    is_on_host = any(parameter.device.type == "cpu" for parameter in parameters)
    if is_on_host and any(entry.holders for entry in map(entry_of, parameters) if entry is not None):
        return dict(options)
    fused = {**options, "fused": True}
    kinds = {(parameter.device, parameter.dtype) for parameter in parameters}
    try:
        for device, dtype in kinds:
            # SGD's with dampening fails where one of the parameters has its first gradient after the others.
            tried = [nn.Parameter(torch.ones(2, device=device, dtype=dtype)) for _ in range(2)]
            optimizer = _stepping(optimizer_class)(tried, **fused)
            for each in tried:
                each.grad = torch.ones_like(each)
                optimizer.step()
    except Exception:  # noqa: BLE001 - whatever it says, it is asked again without
        return dict(options)
    return fused
