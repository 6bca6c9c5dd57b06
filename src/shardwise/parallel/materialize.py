"""Initializes meta tensors with random values that are the same for every layout.

transformers draws all weights from one random stream. Here each module has its own stream, seeded by the module's name.
A module's tensors are made unsplit, one module at a time, before each rank keeps its part (see [Note: recorded
construction]). So the values depend only on the seed.
"""

import hashlib
from collections.abc import Collection, Iterator, Mapping

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from shardwise.errors import UnsupportedError
from shardwise.parallel.construction import Construction
from shardwise.parameters.assigned import take_assignments
from shardwise.parameters.canonical import local_tensor
from shardwise.parameters.registry import Registry, attach_entry
from shardwise.plan.structure import fqn_of
from shardwise.runtime.adapter_facts import Place, names_in_base, places_in


def put_tensor(model: nn.Module, registry: Registry, fqn: str, value: Tensor) -> None:
    """Sets parameter or buffer `fqn` of the model to `value`, under every name that this rank's stages use for it.

    Args:
        value: this rank's part, any dtype; cast to the dtype in which the model keeps it.
    """
    value = value.to(registry.frozen.get(fqn, value.dtype))
    owner, _, name = fqn.rpartition(".")
    module = model.get_submodule(owner)
    if name in module._buffers:
        module._buffers[name] = value
        return
    entry, new = registry.entry(fqn), None
    for owner, _, own in (each.rpartition(".") for each in registry.names_of(fqn)):
        module = model.get_submodule(owner)
        old = module._parameters.get(own)
        if old is None:
            continue
        if new is None:
            new = nn.Parameter(entry.wrap(value), requires_grad=old.requires_grad and value.is_floating_point())
            take_assignments(new)
        module._parameters[own] = new
        attach_entry(module, own, entry)


def record_missing(model: PreTrainedModel, construction: Construction, stored: Collection[str]) -> dict[str, Tensor]:
    """Makes an unsplit meta model initialize the tensors that are not in `stored`; returns them by name."""
    missing = {fqn: value for fqn, value in _named_tensors(model) if fqn not in stored}
    needed = set(map(id, missing.values()))
    for _, value in _named_tensors(model):
        value._is_hf_initialized = id(value) not in needed  # type: ignore[attr-defined]  # transformers leaves those
    if missing:
        with construction:
            model.initialize_weights()
    return {fqn: value.detach() for fqn, value in missing.items()}


def initialize_missing(
    model: nn.Module, registry: Registry, construction: Construction, unsplit: Mapping[str, Tensor], *, seed: int
) -> None:
    """Gives every tensor that is still on the meta device its initial value, on the mesh's device.

    Args:
        construction: recorded construction of the unsplit model.
        unsplit: result of `record_missing`.

    Communicates: nothing.
    """
    missing: dict[str, list[str]] = {}
    bases = names_in_base(model)  # adapters change no other value
    filled = {registry.tied.get(fqn, fqn) for fqn, value in _named_tensors(model) if not value.is_meta}
    for fqn in unsplit:
        if fqn not in filled and fqn not in registry.tied:
            missing.setdefault(fqn.rpartition(".")[0], []).append(fqn)
    for fqns in missing.values():
        if not any(map(registry.holds, fqns)):
            continue
        stream = bases.get(fqns[0], fqns[0]).rpartition(".")[0]
        drawn = draw_values(construction, [unsplit[fqn] for fqn in fqns], f"{seed}/{stream}")
        for fqn, value in zip(fqns, drawn, strict=True):
            _check_initialized(fqn, value)
            if not registry.holds(fqn):
                continue
            entry = registry.entries.get(fqn)
            own = value if entry is None else local_tensor(value, entry.layout, registry.mesh.coords)
            put_tensor(model, registry, fqn, own.to(registry.device_of(fqn)))


def attributes_of(model: nn.Module) -> dict[str, Tensor]:
    """Meta tensors that modules hold as plain attributes (neither parameters nor buffers), by FQN in the base."""
    return {fqn_of(place.base, own): value.detach() for place, own, value in _meta_attributes(model)}


def initialize_attributes(
    model: nn.Module, construction: Construction, unsplit: Mapping[str, Tensor], *, device: torch.device, seed: int
) -> None:
    """Computes the plain tensor attributes that are still on the meta device, such as tables of positions.

    Args:
        construction: recorded construction of the unsplit model.
        unsplit: result of `attributes_of`.

    Communicates: nothing.
    """
    for place, own, value in list(_meta_attributes(model)):
        fqn = fqn_of(place.base, own)
        recorded = unsplit.get(fqn, value)  # one that nobody recorded has no value
        drawn = draw_values(construction, [recorded], f"{seed}/{place.base}")[0]
        _check_initialized(fqn, drawn)
        setattr(place.module, own, drawn.to(device))


def _meta_attributes(model: nn.Module) -> Iterator[tuple[Place, str, Tensor]]:
    for place in places_in(model):
        for own, value in vars(place.module).items():
            if not place.is_wrapper and isinstance(value, Tensor) and value.is_meta:
                yield place, own, value


def _named_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def draw_values(construction: Construction, tensors: list[Tensor], stream: str) -> list[Tensor]:
    """Initial values of recorded tensors; random numbers come from the stream called `stream` ("SEED/MODULE")."""
    digest = hashlib.sha256(stream.encode()).digest()
    with torch.random.fork_rng(devices=[]):
        torch.random.default_generator.manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        return construction.values(tensors)


def _check_initialized(fqn: str, value: Tensor) -> None:
    if value.is_floating_point() and bool(value.isnan().any()):
        raise UnsupportedError(
            f"{fqn} cannot be initialised",
            why="neither the model's constructor nor its _init_weights gives it a value, and it is in no checkpoint",
            fix="build the model on the CPU and pass it to shardwise.parallelize, or load a complete checkpoint",
        )
