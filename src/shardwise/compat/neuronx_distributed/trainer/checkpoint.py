"""`save_checkpoint` and `load_checkpoint`, over ours: any degrees to any."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import nn

from shardwise.api import checkpoints
from shardwise.checkpoint.background import finish_all_saves as finalize_checkpoint
from shardwise.checkpoint.store import find_tags, root_of
from shardwise.compat.layers.transparent import seen_through
from shardwise.compat.optimizers.wrapped import CompletingOptimizer
from shardwise.compat.spelling import also_spelled
from shardwise.compat.warned import warn_once
from shardwise.errors import ConfigError

__all__ = ["finalize_checkpoint", "has_checkpoint", "load_checkpoint", "save_checkpoint"]

Path = str | os.PathLike[str]


@also_spelled(checkpoint_dir_str="path")
def save_checkpoint(
    path: Path,
    tag: str = "",
    model: nn.Module | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    scheduler: Any = None,
    user_content: Any = None,
    num_workers: int = 8,
    use_xser: bool = False,
    num_kept_ckpts: int | None = None,
    async_save: bool = False,
    zero1_optimizer: bool = False,
    nxd_config: Any = None,
    use_zero1_dcp: bool = False,
    avoid_saving_lower_precision_weights: bool = False,
) -> None:
    """Saves a checkpoint that any degrees can load; see `shardwise.save_checkpoint`. What is not listed means nothing.

    Args:
        tag: its name; by default one that counts.
        num_workers: files that a rank writes at the same time.
        num_kept_ckpts: delete all but so many of the newest, this one always kept; None or -1 keeps all.
        async_save: write while training goes on, decided again by every call.

    Raises:
        ConfigError: there is no model, or `num_kept_ckpts` is 0.
        LoadError: it cannot be written, or the asynchronous save before failed.
    """
    if model is None:
        raise ConfigError("save_checkpoint without a model", fix="pass model=: a checkpoint says whose state it is")
    if use_xser or use_zero1_dcp:
        warn_once("save_checkpoint: use_xser and use_zero1_dcp change nothing: tensors are streamed in one format")
    model = vars(model).get("model", model)  # of a NeuronLTModule
    lora = getattr(model, "lora_config", None)
    try:
        pending = checkpoints.save_checkpoint(
            path,
            model=seen_through(model),
            optimizer=_optimizer(optimizer),
            scheduler=scheduler,
            extra=user_content if lora is None else lora.packed(user_content),
            tag=None if tag is None else str(tag) or None,
            async_save=async_save,
            keep_last=None if num_kept_ckpts == -1 else num_kept_ckpts,
            num_writers=num_workers,
        )
    except ConfigError as error:
        said = error.summary.replace("keep_last", "num_kept_ckpts").replace("num_writers", "num_workers")
        raise ConfigError(said, at=error.at, why=error.why, fix=error.fix) from error
    if lora is not None:
        lora.export(seen_through(model), path, pending.wait())


def load_checkpoint(
    path: Path,
    tag: str | None = None,
    model: nn.Module | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    scheduler: Any = None,
    num_workers: int = 8,
    strict: bool = True,
    use_zero1_dcp: bool = False,
) -> Any:
    """Loads a checkpoint of any degrees, model before optimizer; returns its `user_content`.

    Args:
        tag: by default the newest complete one.
        strict: whether names that only the model or only the checkpoint has are an error.

    Raises:
        LoadError: there is none, or it is damaged or of another model; the same on every rank, nothing is changed.
    """
    content = checkpoints.load_checkpoint(
        path,
        None if tag is None else str(tag) or None,
        model=None if model is None else seen_through(model),
        optimizer=_optimizer(optimizer),
        scheduler=scheduler,
        strict=strict,
    )
    is_packed = isinstance(content, dict) and content.keys() == {"user_content", "lora_config"}
    return content["user_content"] if is_packed else content


def has_checkpoint(path: Path) -> bool:
    """Whether there is a complete checkpoint in the directory."""
    return root_of(path).is_dir() and bool(find_tags(root_of(path)))


def _optimizer(optimizer: torch.optim.Optimizer | None) -> torch.optim.Optimizer | None:
    return optimizer.optimizer if isinstance(optimizer, CompletingOptimizer) else optimizer
