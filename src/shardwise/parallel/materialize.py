"""From the meta device to real values: random initialisation that is the same for every layout.

transformers initialises in one stream of random numbers, and all weights at once. Here the tensors that a module owns
have a stream of their own, seeded by the module's name, and are made unsplit, one module's at a time, before each rank
keeps its part (see [Note: recorded construction]). So the values depend on the seed alone.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from shardwise.errors import UnsupportedError
from shardwise.parallel.construction import Construction
from shardwise.runtime.canonical import local_tensor
from shardwise.runtime.registry import Registry, attach_entry

__all__ = ["initialize_missing", "put_tensor"]


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
        attach_entry(model.get_submodule(owner), name, entry)


def initialize_missing(
    model: nn.Module, registry: Registry, *, build: Callable[[], PreTrainedModel], seed: int
) -> None:
    """Gives every tensor that is still on the meta device its initial value, on the mesh's device.

    Args:
        build: makes the unsplit model on the meta device once more.

    Raises:
        UnsupportedError: neither the model's constructor nor its `_init_weights` gives a parameter a value.

    Communicates: nothing.
    """
    missing: dict[str, list[str]] = {}
    state = itertools.chain(model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False))
    for fqn, value in state:
        if value.is_meta and fqn not in registry.tied:
            missing.setdefault(fqn.rpartition(".")[0], []).append(fqn)
    if not missing:
        return
    with Construction() as construction:
        unsplit = build()
        wanted = {owner: [unsplit.get_parameter_or_buffer(fqn) for fqn in fqns] for owner, fqns in missing.items()}
        needed = {id(tensor) for tensors in wanted.values() for tensor in tensors}
        for tensor in (*unsplit.parameters(), *unsplit.buffers()):
            tensor._is_hf_initialized = id(tensor) not in needed  # transformers leaves those alone
        unsplit.initialize_weights()
    for owner, tensors in wanted.items():
        for fqn, value in zip(missing[owner], _drawn(construction, tensors, f"{seed}/{owner}"), strict=True):
            _check_initialized(fqn, value)
            entry = registry.entries.get(fqn)
            own = value if entry is None else local_tensor(value, entry.layout, registry.mesh.coords)
            put_tensor(model, registry, fqn, own.to(registry.home(fqn)))


def _drawn(construction: Construction, tensors: list[Tensor], stream: str) -> list[Tensor]:
    """The tensors' values, what is random in them from a stream of that name."""
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
