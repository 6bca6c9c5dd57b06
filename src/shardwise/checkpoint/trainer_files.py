"""Checkpoints of transformers' Trainer: optimizer, scheduler and step, opened as parts that any layout loads.

In one process and under DDP, Trainer writes `optimizer.pt`, with numbers in place of names. Under FSDP, accelerate
writes names: in `optimizer.bin` (FULL_STATE_DICT), or in the DCP directory `optimizer_0` (SHARDED_STATE_DICT).
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.checkpoint.collect import model_key, state_key
from shardwise.checkpoint.manifest import MANIFEST, Index, Manifest, StoredTensor
from shardwise.checkpoint.stored import StoredParts, encode_tree
from shardwise.errors import LoadError, as_error, counted
from shardwise.sharding.boxes import full_box, slices
from shardwise.sharding.layout import Copy, Layout, Piece
from shardwise.weights.foreign import Chunk, ChunkedIndex, ChunkedTensor, open_dcp

TRAINER_STATE = "trainer_state.json"
_STATES = "optimizer.state."  # as DCP's keys begin
_ADAMS = (torch.optim.Adam, torch.optim.AdamW)
_PEFT = "base_model.model."  # before the names of what is inside of PEFT's model


def is_trainer(directory: Path) -> bool:
    """Returns whether a directory is a checkpoint of Trainer, without ours in it or below."""
    is_ours = (directory / MANIFEST).exists() or any(directory.glob(f"*/{MANIFEST}"))
    return (directory / TRAINER_STATE).is_file() and not is_ours


def trained_names(model: nn.Module) -> tuple[list[str], list[str]]:
    """Returns the trained parameters of an unsplit model as Trainer's optimizer has them: decayed ones, and others."""
    from transformers import Trainer  # slow to import

    trained = [name for name, value in model.named_parameters() if value.requires_grad]
    decayed = {*Trainer.get_decay_parameter_names(None, model)}
    return [name for name in trained if name in decayed], [name for name in trained if name not in decayed]


def read_optimizer(directory: Path, model: nn.Module) -> ChunkedIndex:
    """Returns the states of Trainer's optimizer, by "optimizer.state.PARAMETER.STATE". Reads no tensor.

    Args:
        model: the unsplit model, on any device; the parameters that Trainer trained require gradients.
    """
    if (sharded := directory / "optimizer_0").is_dir():
        return open_dcp(sharded)
    path = directory / ("optimizer.bin" if (directory / "optimizer.bin").exists() else "optimizer.pt")
    try:
        found = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        names = [name for group in found["param_groups"] for name in group["params"]]
    except Exception as error:  # torch's reader fails in many ways
        raise LoadError(f"{path.name} cannot be read", at=str(path), why=str(error)[:300]) from error
    if not all(isinstance(name, str) for name in names):
        numbers, names = names, [name for group in trained_names(model) for name in group]
        if len(found["param_groups"]) == 1:  # an optimizer that Trainer was given
            names = [name for name, value in model.named_parameters() if value.requires_grad]
        if len(names) != len(numbers):
            raise LoadError(
                f"{path.name} is of {counted(len(numbers), 'parameter')}, and the model trains {len(names)}",
                at=str(path),
                why="Trainer numbers the parameters by their order in the model",
                fix="build the model that was trained, and freeze what was frozen",
            )
        found["state"] = {names[number]: state for number, state in found["state"].items()}
    tensors = {}
    for name, states in found["state"].items():
        for state, value in ((state, torch.as_tensor(value)) for state, value in states.items()):
            chunk = Chunk.of(value, full_box(value.shape), path)
            tensors[f"{_STATES}{name}.{state}"] = ChunkedTensor(value.dtype, tuple(value.shape), [chunk])
    return ChunkedIndex(tensors, str(path))


@dataclass
class _TrainerParts(StoredParts):
    """An open checkpoint of Trainer: tensors of another system, without checksums, and the names of keys there."""

    states: ChunkedIndex | None = None
    sources: dict[str, str] = field(default_factory=dict)

    def plan(self, key: str, wanted: Sequence[Piece]) -> tuple[Copy, ...]:
        return self.find_copies(key, wanted)

    def fill(self, out: Tensor, key: str, planned: Sequence[Copy]) -> None:
        assert self.states is not None
        for each in planned:
            self.states.node(self.sources[key]).fill(each.source_box, out[slices(each.target_box)])


def open_trainer(
    directory: Path, model: nn.Module | None, optimizer: torch.optim.Optimizer | None, scheduler: Any
) -> StoredParts:
    """Opens a checkpoint of Trainer, to load it into an optimizer and a scheduler.

    Args:
        model: the unsplit model; see `read_optimizer`. None opens no optimizer.
    """
    with as_error(LoadError, f"{TRAINER_STATE} cannot be read", OSError, ValueError, KeyError, at=str(directory)):
        known = json.loads((directory / TRAINER_STATE).read_text())
        values: dict[str, Any] = {"extra": {"step": known["global_step"], "epoch": known["epoch"]}}
    options: dict[str, Any] = {}
    if scheduler is not None:
        with as_error(LoadError, "scheduler.pt cannot be read", at=str(directory), fix="load without scheduler="):
            state = torch.load(directory / "scheduler.pt", map_location="cpu", weights_only=True)
        values["scheduler"] = encode_tree(state, "scheduler", {})
        values["scheduler_class"] = (
            "LambdaLR" if "lr_lambdas" in state else "ReduceLROnPlateau" if "patience" in state else None
        )
        rates = state.get("base_lrs", state.get("_last_lr"))  # ReduceLROnPlateau has none of its own
        if len({*rates}) > 1:
            raise LoadError(
                "Trainer's scheduler had other rates for some parameters", at=str(directory), fix="pass none"
            )
        options = {"lr": state["_last_lr"][0], "initial_lr": rates[0]}
    facts: dict[str, Any] = {"number": 0, "time": 0, "versions": {}, "files": {}, "content": "all", "model": ""}
    manifest = Manifest(**facts, tag=directory.name, step=known["global_step"], layout="tp1")
    tensors, optimizers = dict[str, StoredTensor](), dict[str, Any]()
    parts = _TrainerParts(directory, manifest, Index((), tensors, {}, optimizers, values))
    if model is None or optimizer is None:
        return parts
    parts.states = read_optimizer(directory, model)
    shapes = {name: tuple(value.shape) for name, value in model.named_parameters()}
    parameters: dict[str, Any] = {}
    for source, entry in parts.states.items():
        name, _, state = source.removeprefix(_STATES).removeprefix(_PEFT).rpartition(".")
        key, described = state_key(name, state), parameters.setdefault(name, {"group": 0, "states": {}})["states"]
        dtype = str(entry.dtype).removeprefix("torch.")
        if not entry.shape:
            described[state] = {"scalar": parts.states.map_tensor(source).item(), "dtype": dtype}
        elif entry.shape == shapes.get(name):
            described[state], box = {"like": dtype}, json.dumps([[0, 0, full_box(entry.shape)]]).encode()
            tensors[key] = tensors[model_key(name)] = StoredTensor(dtype, entry.shape, Layout(entry.shape), box)
            parts.sources[key] = source
        else:
            what = f"{state} of {name} has shape {entry.shape}, the parameter {shapes.get(name)}"
            raise LoadError(what, at=str(directory), fix="build the model and the optimizer that were saved")
    kind, is_adam = type(optimizer), any(key.endswith("/exp_avg_sq") for key in tensors)
    if (is_adam and "betas" not in optimizer.defaults) or (not is_adam and isinstance(optimizer, _ADAMS)):
        raise LoadError(f"Trainer's optimizer was no {kind.__name__}", at=str(directory))
    optimizers[""] = {"class": f"{kind.__module__}.{kind.__qualname__}", "groups": [options], "parameters": parameters}
    return parts
