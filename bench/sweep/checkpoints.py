"""Whether what one layout saves of an architecture is, bit for bit, what others load, AdamW's states included."""

from __future__ import annotations

import tempfile
from typing import Any

import torch
from torch import Tensor, nn

import shardwise
from shardwise.mesh import Mesh
from shardwise.parameters.canonical import canonical_tensors
from shardwise.parameters.registry import find_parameters
from shardwise.ranks.spawn import spawn
from shardwise.tiny.inputs import loss_or_surrogate
from shardwise.tiny.models import build_tiny_model, make_batch, set_runnable_mode
from shardwise.topology.shape import MeshShape

__all__ = ["LOADED_AT", "reload_elsewhere"]

LOADED_AT = ("fsdp2", "tp1")
_NUM_STEPS = 2


def reload_elsewhere(model_class: Any, config: Any, layout: str, *, timeout: float) -> tuple[str, int]:
    """Saves at `layout` and loads in each of `LOADED_AT`; those of as many ranks on the ranks that saved. Returns what
    differs, if anything, and how many tensors were compared.
    """
    sizes = {other: MeshShape.parse(other).world_size for other in (layout, *LOADED_AT)}
    there = [other for other in LOADED_AT if sizes[other] == sizes[layout]]
    with tempfile.TemporaryDirectory(prefix="shardwise-sweep-") as directory:
        given = model_class, config, layout, there, directory
        saved, cause = spawn(_save_and_load, sizes[layout], *given, timeout=timeout)[0]
        for other in () if cause else LOADED_AT:
            if other not in there:
                loaded = spawn(_load, sizes[other], model_class, config, other, directory, timeout=timeout)[0]
                cause = cause or _difference(saved, loaded, f"{layout} to {other}")
    return cause, len(saved)


def _save_and_load(
    model_class: Any, config: Any, layout: str, others: list[str], directory: str
) -> tuple[dict[str, Tensor], str]:
    saved, cause = _save(model_class, config, layout, directory), ""
    for other in others:
        loaded = _load(model_class, config, other, directory)
        cause = cause or _difference(saved, loaded, f"{layout} to {other}")
    return saved, cause


def _difference(saved: dict[str, Tensor], loaded: dict[str, Tensor], where: str) -> str:
    names = sorted(saved.keys() ^ loaded.keys()) or [
        name for name, value in saved.items() if not torch.equal(value, loaded[name])
    ]
    return f"{where}: {len(names)} of {len(saved)} differ, such as {names[0]}" if names else ""


def _save(model_class: Any, config: Any, layout: str, directory: str) -> dict[str, Tensor]:
    with Mesh.open(layout) as mesh:
        model = build_tiny_model(config, model_class, seed=0)
        batch = make_batch(model, seed=0)
        set_runnable_mode(model, batch)
        shardwise.parallelize(model, mesh)
        optimizer = shardwise.build_optimizer(model, torch.optim.AdamW, lr=1e-3)
        for _ in range(_NUM_STEPS):
            loss_or_surrogate(model(**batch)).backward()
            optimizer.step()
            optimizer.zero_grad()
        shardwise.save_checkpoint(directory, model=model, optimizer=optimizer, extra={"step": _NUM_STEPS})
        return _whole(model, optimizer)


def _load(model_class: Any, config: Any, layout: str, directory: str) -> dict[str, Tensor]:
    with Mesh.open(layout) as mesh:
        model = shardwise.parallelize(build_tiny_model(config, model_class, seed=1), mesh)
        optimizer = shardwise.build_optimizer(model, torch.optim.AdamW, lr=1e-3)
        shardwise.load_checkpoint(directory, model=model, optimizer=optimizer)
        return _whole(model, optimizer)


def _whole(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Every full tensor of the model and of the optimizer's states."""
    found: dict[str, Tensor] = {f"model/{name}": each for name, each in shardwise.full_state_dict(model).items()}
    states: dict[str, dict[str, Tensor]] = {}
    for name, parameter, _ in find_parameters(model):
        for state, value in optimizer.state.get(parameter, {}).items():
            if value.ndim:
                states.setdefault(state, {})[name] = value
            else:
                found[f"{state}/{name}"] = value
    for state, values in sorted(states.items()):
        for name, value in canonical_tensors(model, values):
            if value is not None:
                found[f"{state}/{name}"] = value
    return found
