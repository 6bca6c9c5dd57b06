"""`save_checkpoint` and `load_checkpoint`, on top of ours: from any degrees to any."""

import os
import pathlib
from typing import Any

import torch
from torch import nn

from shardwise.api import checkpoints
from shardwise.checkpoint.background import finish_all_saves as finalize_checkpoint
from shardwise.checkpoint.store import find_tag, find_tags, root_of
from shardwise.compat.layers.by_hand import adopt_model
from shardwise.compat.neuronx_distributed.parallel_layers.checkpointing import load, save
from shardwise.compat.neuronx_distributed.parallel_layers.parallel_state import current_mesh
from shardwise.compat.neuronx_distributed.trainer.model import unwrapped
from shardwise.compat.neuronx_distributed.trainer.optimizer import NxDOptimizer
from shardwise.compat.warned import warn_idle
from shardwise.errors import ConfigError
from shardwise.optim.optimizer import model_under

__all__ = ["finalize_checkpoint", "has_checkpoint", "load_checkpoint", "save_checkpoint"]

Path = str | os.PathLike[str]
_DICTIONARY = "optimizer_by_rank"
_STREAMED = "a rank has one tensor at a time on the host"


def save_checkpoint(
    path: Path,
    tag: str = "",
    model: nn.Module | None = None,
    optimizer: torch.optim.Optimizer | dict[str, Any] | None = None,
    scheduler: Any = None,
    user_content: Any = None,
    num_workers: int = 8,
    use_xser: bool = False,
    num_kept_ckpts: int | None = None,
    async_save: bool = False,
    zero1_optimizer: bool = False,
    nxd_config: Any = None,
) -> None:
    """Saves a checkpoint that any degrees can load; see `shardwise.save_checkpoint`.

    Args:
        tag: name of the checkpoint; default: a counter.
        model: None saves the optimizer's model with it, or no model.
        optimizer: optimizer over the model's parameters; or a dictionary, such as a `state_dict()`, which each rank
            writes to its own file, for the same degrees.
        user_content: JSON values, tuples, sets and tensors, the same on every rank.
        num_kept_ckpts: keep this many of the newest checkpoints, including this one; None or -1 keeps all.
        async_save: write in the background; each call decides anew.
        zero1_optimizer: every data rank writes its dictionary; else only data rank 0 does.
        num_workers, use_xser: no effect: each rank writes tensor after tensor.

    Raises:
        ConfigError: `num_kept_ckpts` is 0, or something cannot be saved.
        LoadError: the checkpoint cannot be written, or the previous asynchronous save failed.

    Communicates: like `shardwise.save_checkpoint`; for a dictionary, one gather of a small object over all ranks.
    """
    warn_idle("save_checkpoint", _STREAMED, num_workers=num_workers != 8, use_xser=use_xser)
    if all(each is None for each in (model, optimizer, scheduler, user_content)):
        raise ConfigError("save_checkpoint has nothing to save", fix="pass model=, optimizer=, user_content=, ...")
    if num_kept_ckpts is not None and num_kept_ckpts < 1 and num_kept_ckpts != -1:
        raise ConfigError(f"num_kept_ckpts is {num_kept_ckpts}", fix="use a positive number, or -1 to keep all")
    num_kept = None if num_kept_ckpts == -1 else num_kept_ckpts
    model = vars(model).get("model", model) if model is not None else None  # of a NeuronLTModule
    split = _model_of(model, _own(optimizer))
    lora = getattr(split, "lora_config", None)
    extra = user_content if lora is None else lora.packed(user_content)
    states = optimizer if isinstance(optimizer, dict) else None  # written before the save returns

    def write_states(directory: pathlib.Path) -> None:
        save(states or {}, directory / _DICTIONARY, False, master_dp_only=not zero1_optimizer)

    pending = checkpoints.save_with(
        lambda: checkpoints.save_request(
            path, str(tag) or None, extra, num_kept, async_save=async_save and states is None
        ),
        model=split,
        optimizer=_own(optimizer),
        scheduler=scheduler,
        extra=extra,
        add_files=None if states is None else write_states,
    )
    if lora is not None:
        lora.export(split, path, pending.wait())


def load_checkpoint(
    path: Path,
    tag: str | None = None,
    model: nn.Module | None = None,
    optimizer: torch.optim.Optimizer | dict[str, Any] | None = None,
    scheduler: Any = None,
    num_workers: int = 8,
    strict: bool = True,
) -> Any:
    """Loads a checkpoint that was saved with any parallel sizes, model before optimizer; returns its `user_content`.

    Args:
        tag: name of the checkpoint; default: the newest complete one.
        optimizer: may be a dictionary, which receives the entries that this rank saved.
        strict: whether names that only the model or only the checkpoint has are an error.
        num_workers: no effect: each rank reads its own parts, one after the other.

    Raises:
        LoadError: no checkpoint exists, it is damaged, or of another model; the same on every rank; nothing is changed.
    """
    warn_idle("load_checkpoint", _STREAMED, num_workers=num_workers != 8)
    chosen = str(tag or "") or None
    content = checkpoints.load_checkpoint(
        path, chosen, model=unwrapped(model), optimizer=_own(optimizer), scheduler=scheduler, strict=strict
    )
    if isinstance(optimizer, dict):
        place = find_tag(root_of(path), chosen) / _DICTIONARY
        found = load(place, master_dp_only=not any(place.glob("*_dp_rank_*")))
        optimizer.clear()
        optimizer.update(found)
    is_packed = isinstance(content, dict) and content.keys() == {"user_content", "lora_config"}
    return content["user_content"] if is_packed else content


def _model_of(model: Any, optimizer: Any) -> nn.Module:
    """Returns the model to save; an empty one if there is none, so that the rest can still be saved."""
    if model is not None:
        return unwrapped(model)
    if optimizer is not None:
        found = model_under(optimizer)
        if found is None:
            what = "save_checkpoint of an optimizer whose model is not known"
            raise ConfigError(what, fix="pass model=, or its state_dict()")
        return found
    empty = nn.Module()
    adopt_model(empty, current_mesh())
    return empty


def has_checkpoint(path: Path) -> bool:
    """Returns whether the directory has a complete checkpoint."""
    return root_of(path).is_dir() and bool(find_tags(root_of(path)))


def _own(optimizer: torch.optim.Optimizer | dict[str, Any] | None) -> torch.optim.Optimizer | None:
    """Returns the optimizer without NxD's wrapper; None for a dictionary."""
    if isinstance(optimizer, dict):
        return None
    return optimizer.optimizer if isinstance(optimizer, NxDOptimizer) else optimizer
