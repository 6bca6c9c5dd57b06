"""From the meta device to real values: random initialisation that is the same for every layout.

transformers initialises module by module in one stream of random numbers, on whole weights. Here every unit (a layer,
or a module outside the layers) has a stream of its own, seeded by its name, and is initialised whole, by the model's
own `_init_weights`, before each rank keeps its part. So the values depend on the seed alone, and no more than one layer
is ever whole in memory.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, initialization

from shardwise.errors import UnsupportedError
from shardwise.layers.canonical import local_tensor
from shardwise.layers.registry import Registry, carry_entry

__all__ = ["initialize_missing", "put_tensor"]

_DONE = "_is_hf_initialized"


def put_tensor(model: nn.Module, registry: Registry, fqn: str, value: Tensor) -> None:
    """Makes `value` this rank's parameter or buffer `fqn`, under its tied names too."""
    owner, _, name = fqn.rpartition(".")
    module = model.get_submodule(owner)
    if name in module._buffers:
        module._buffers[name] = value
        return
    old = module._parameters[name]
    assert old is not None
    entry = registry.entry(fqn)
    new = nn.Parameter(entry.wrap(value), requires_grad=old.requires_grad and value.is_floating_point())
    names = [fqn, *(alias for alias, canonical in registry.tied.items() if canonical == fqn)]
    for each in names:
        owner, _, name = each.rpartition(".")
        model.get_submodule(owner)._parameters[name] = new
    carry_entry(new, entry)


def initialize_missing(model: nn.Module, registry: Registry, *, seed: int) -> None:
    """Gives every tensor that is still on the meta device its initial value, on the mesh's device.

    Raises:
        UnsupportedError: the model's `_init_weights` leaves a parameter as it is.

    Communicates: nothing.
    """
    for unit in _units(model, "", model):
        targets = [
            (fqn, module, own, own in module._buffers)
            for name, module, _ in unit.modules
            for own, tensor in (*module._parameters.items(), *module._buffers.items())
            if tensor is not None and tensor.is_meta and (fqn := f"{name}.{own}" if name else own) not in registry.tied
        ]
        if targets:
            for fqn, whole in _initial_values(unit, targets, registry, seed).items():
                value = (
                    local_tensor(whole, registry.entry(fqn).layout, registry.mesh.coords)
                    if fqn in registry.entries
                    else whole
                )
                put_tensor(model, registry, fqn, value.to(registry.home(fqn)))


@dataclass(frozen=True)
class _Unit:
    """What is initialised together: (FQN, module, submodel whose `_init_weights` serves it), children first."""

    name: str
    modules: list[tuple[str, nn.Module, nn.Module]]


def _units(model: nn.Module, name: str, owner: nn.Module) -> Iterator[_Unit]:
    """Every layer with all that is in it, and every module outside layers by itself."""
    module = model.get_submodule(name)
    owner = module if isinstance(module, PreTrainedModel) else owner
    for child, submodule in module.named_children():
        fqn = f"{name}.{child}" if name else child
        if isinstance(module, nn.ModuleList):
            yield _Unit(fqn, list(_post_order(fqn, submodule, owner)))
        else:
            yield from _units(model, fqn, owner)
    yield _Unit(name, [(name, module, owner)])


def _post_order(name: str, module: nn.Module, owner: nn.Module) -> Iterator[tuple[str, nn.Module, nn.Module]]:
    owner = module if isinstance(module, PreTrainedModel) else owner
    for child, submodule in module.named_children():
        yield from _post_order(f"{name}.{child}", submodule, owner)
    yield name, module, owner


def _initial_values(
    unit: _Unit, targets: Sequence[tuple[str, nn.Module, str, bool]], registry: Registry, seed: int
) -> dict[str, Tensor]:
    """The whole initial tensors of a unit by FQN, from the stream of random numbers that is the unit's own."""
    kept = [
        tensor for _, module, _ in unit.modules for tensor in (*module._parameters.values(), *module._buffers.values())
    ]
    for tensor in kept:
        if tensor is not None and not tensor.is_meta:
            setattr(tensor, _DONE, True)  # transformers' init functions leave these alone
    for fqn, module, own, is_buffer in targets:
        old = _get(module, own)
        shape = registry.entries[fqn].layout.shape if fqn in registry.entries else old.shape
        whole = torch.empty(shape, dtype=old.dtype)
        if whole.is_floating_point():
            whole.fill_(torch.nan)
        if is_buffer:
            module._buffers[own] = whole
        else:
            module._parameters[own] = nn.Parameter(whole, requires_grad=old.requires_grad)
    digest = hashlib.sha256(f"{seed}/{unit.name}".encode()).digest()
    with torch.random.fork_rng(devices=[]), initialization.guard_torch_init_functions(), torch.no_grad():
        torch.random.default_generator.manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        for _, module, owner in unit.modules:
            reset = getattr(module, "reset_parameters", None)
            if isinstance(owner, PreTrainedModel):
                owner._initialize_weights(module)
            elif callable(reset):
                reset()
    values = {fqn: _get(module, own).detach() for fqn, module, own, _ in targets}
    _check_initialized(values)
    return values


def _get(module: nn.Module, own: str) -> Tensor:
    value: Tensor | None = module._parameters.get(own)
    value = module._buffers.get(own) if value is None else value
    assert value is not None
    return value


def _check_initialized(values: dict[str, Tensor]) -> None:
    left = [fqn for fqn, value in values.items() if value.is_floating_point() and bool(value.isnan().any())]
    if left:
        raise UnsupportedError(
            f"{', '.join(left)} cannot be initialised",
            why="the model's _init_weights leaves them as they are, and they are in no checkpoint",
            fix="build the model on the CPU and pass it to shardwise.parallelize, or load a complete checkpoint",
        )
