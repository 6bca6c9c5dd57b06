"""Mixed precision where FSDP2 does not provide it: parameters are cast where they are used.

A unit's forward runs with its parameters cast; autograd takes the gradients back to the parameters at rest. The casts
live as long as backward needs them, as FSDP2's gathered parameters do between forward and backward at ZeRO stage 2.
In a pipeline the microbatches of a step share them: there are as many between forward and backward as there are stages.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.plan.options import Precision
from shardwise.runtime.linear import apply_mixin
from shardwise.runtime.registry import Registry

__all__ = ["apply_precision"]


class Cast:
    """Mixin: computes in another dtype than its parameters have."""

    _cast_to: torch.dtype
    _cast_parameters: list[tuple[nn.Module, str]]
    _cast_registry: Registry

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As the module's own, with parameters and floating-point inputs cast."""
        own: Callable[..., Any] = super().forward  # type: ignore[misc]
        at_rest = [(module, name, module._parameters[name]) for module, name in self._cast_parameters]
        for module, name, parameter in at_rest:
            module._parameters[name] = self._cast_once(parameter)
        try:
            return own(*_cast(args, self._cast_to), **_cast(kwargs, self._cast_to))
        finally:
            for module, name, parameter in at_rest:
                module._parameters[name] = parameter

    def _cast_once(self, parameter: Any) -> Any:
        """The parameter cast, or what has been cast of it in this step of a pipeline."""
        shared = self._cast_registry.casts
        if shared is None or not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return _cast(parameter, self._cast_to)
        if id(parameter) not in shared:
            shared[id(parameter)] = _cast(parameter, self._cast_to)
        return shared[id(parameter)]


def apply_precision(model: nn.Module, registry: Registry, precision: Precision | None) -> None:
    """Makes a split model compute in the dtype that `precision` says, in place. Communicates nothing.

    Over the data axes FSDP2 does it (see `apply_data_parallelism`), as the registry says, for what it holds.
    """
    registry.precision = precision
    if precision is None:
        return
    if precision.params == precision.compute == "bfloat16":
        warnings.warn(
            f"parameters are kept in {precision.params}: updates smaller than 1/256 of a weight are lost to rounding, "
            "which Adam's usually are; Precision() keeps them in float32 and computes in bfloat16",
            stacklevel=3,
        )
    if precision.compute == precision.params:
        return
    dtype = getattr(torch, precision.compute)
    if registry.mesh.data_size > 1:
        _cast_what_is_kept_in_full(model, registry, dtype)
        return
    taken: set[int] = set()
    for module in (*(model.get_submodule(each) for unit in registry.plan.units for each in unit), model):
        owners = [(owner, name) for owner in module.modules() if id(owner) not in taken for name in _floats(owner)]
        taken |= {id(owner) for owner in module.modules()}
        apply_mixin(module, Cast, _cast_to=dtype, _cast_parameters=owners, _cast_registry=registry)


def _cast_what_is_kept_in_full(model: nn.Module, registry: Registry, dtype: torch.dtype) -> None:
    """Casts the parameters that every data rank holds all of, but scalars, which change no other tensor's dtype."""
    for name, module in model.named_modules():
        fqns = {own: f"{name}.{own}" if name else own for own in _floats(module)}
        kept = [own for own, fqn in fqns.items() if registry.entry(fqn).data == "reduced"]
        if kept := [own for own in kept if registry.entry(fqns[own]).layout.shape]:
            parameters = [(module, own) for own in kept]
            apply_mixin(module, Cast, _cast_to=dtype, _cast_parameters=parameters, _cast_registry=registry)


def _cast(value: Any, dtype: torch.dtype) -> Any:
    """`value` with its floating-point tensors cast, also those in plain containers; caches and the like stay."""
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if type(value) in (tuple, list):
        return type(value)(_cast(each, dtype) for each in value)
    if type(value) is dict:
        return {name: _cast(each, dtype) for name, each in value.items()}
    return value


def _floats(module: nn.Module) -> list[str]:
    return [name for name, value in module._parameters.items() if value is not None and value.is_floating_point()]
