"""Mixed precision without FSDP2; see [Note: cast where it is read] in `shardwise.runtime.casting`."""

import warnings

import torch
from torch import nn

from shardwise.parameters.registry import DataHandling, Registry
from shardwise.plan.options import Precision
from shardwise.runtime.casting import Casting
from shardwise.runtime.reading import cast_in_forward, read_through


def apply_precision(model: nn.Module, registry: Registry, precision: Precision | None) -> None:
    """Makes a split model compute in the dtype of `precision`, in place. Communicates nothing.

    FSDP2 casts the parameters that it shards (see `apply_data_parallelism`).
    """
    registry.precision = precision
    if precision is None:
        return
    _narrow_frozen(model, registry, getattr(torch, precision.compute))
    if precision.params == precision.compute == "bfloat16":
        warnings.warn(
            f"parameters are kept in {precision.params}: updates smaller than 1/256 of a weight are lost to rounding, "
            "which Adam's usually are; Precision() keeps them in float32 and computes in bfloat16",
            stacklevel=3,
        )
    if precision.compute == precision.params:
        return
    dtype = getattr(torch, precision.compute)
    registry.casting = casting = Casting(dtype)
    if registry.mesh.data_size > 1:
        _cast_what_is_kept_in_full(model, registry, casting)
        return
    for owner in model.modules():
        for name in _floats(owner):
            read_through(owner, name, casting)
    for module in (*(model.get_submodule(each) for unit in registry.plan.units for each in unit), model):
        cast_in_forward(module, casting)


def _narrow_frozen(model: nn.Module, registry: Registry, compute: torch.dtype) -> None:
    """Stores frozen parameters in the dtype of computation, because they are never updated."""
    for name, parameter in model.named_parameters():
        is_wider = parameter.is_floating_point() and parameter.dtype.itemsize > compute.itemsize
        if is_wider and not parameter.requires_grad:
            registry.frozen[name] = compute
            parameter.data = parameter.data.to(compute)


def _cast_what_is_kept_in_full(model: nn.Module, registry: Registry, casting: Casting) -> None:
    """Casts the parameters that every data rank holds in full.

    Scalars stay: they do not change the dtype of results.
    """
    for name, module in model.named_modules():
        fqns = {own: f"{name}.{own}" if name else own for own in _floats(module)}
        kept = [own for own, fqn in fqns.items() if registry.entry(fqn).data is DataHandling.ALL_REDUCE]
        if kept := [own for own in kept if registry.entry(fqns[own]).layout.shape]:
            for own in kept:
                read_through(module, own, casting)
            cast_in_forward(module, casting)


def _floats(module: nn.Module) -> list[str]:
    return [name for name, value in module._parameters.items() if value is not None and value.is_floating_point()]
