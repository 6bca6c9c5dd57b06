"""`save_checkpoint` and `load_checkpoint`, over ours: any degrees to any."""

from __future__ import annotations

import argparse
import datetime
import decimal
import io
import os
import pathlib
import types
from typing import Any

import numpy
import torch
import torch.distributed as dist
from torch import nn

from shardwise.api import checkpoints
from shardwise.checkpoint.background import finish_all_saves as finalize_checkpoint
from shardwise.checkpoint.store import find_tag, find_tags, prune, root_of
from shardwise.checkpoint.tree import encode_tree
from shardwise.comm.agree import gather_from_all
from shardwise.compat.layers.by_hand import adopt_model
from shardwise.compat.layers.transparent import seen_through
from shardwise.compat.neuronx_distributed.parallel_layers.parallel_state import current_mesh
from shardwise.compat.neuronx_distributed.trainer.optimizer import NxDOptimizer
from shardwise.compat.rank_files import load_by_rank, write_by_rank
from shardwise.compat.spelling import also_spelled
from shardwise.compat.warned import warn_once
from shardwise.errors import ConfigError, LoadError, one_line
from shardwise.optim.optimizer import model_under

__all__ = ["finalize_checkpoint", "has_checkpoint", "load_checkpoint", "save_checkpoint"]

Path = str | os.PathLike[str]
_DICTIONARY = "optimizer_by_rank"
_PICKLED = "$torch.save"
_ARRAYS: Any = getattr(numpy, "_core", None) or numpy.core
_PLAIN: tuple[Any, ...] = (
    argparse.Namespace, types.SimpleNamespace, datetime.datetime, datetime.date, datetime.time, datetime.timedelta,
    decimal.Decimal, pathlib.PosixPath, pathlib.PurePosixPath, range, slice, complex, bytearray,
    _ARRAYS.multiarray._reconstruct, _ARRAYS.multiarray.scalar, numpy.ndarray, numpy.dtype,
    *{type(numpy.dtype(code)) for code in "?bBhHiIlLqQefd"},
)  # fmt: skip
"""Classes whose objects run nothing when they are read."""


@also_spelled(checkpoint_dir_str="path")
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
    use_zero1_dcp: bool = False,
    avoid_saving_lower_precision_weights: bool = False,
) -> None:
    """Saves a checkpoint that any degrees can load; see `shardwise.save_checkpoint`.

    Args:
        tag: its name; by default one that counts.
        model: None saves the optimizer's model with it, or no model.
        optimizer: over parameters of the model; or a dictionary of what this rank holds, such as a `state_dict()`,
            which each rank writes to a file of its own, for the same degrees.
        user_content: JSON values, tensors, arrays, dates, paths, argparse's namespaces, and objects of classes that
            `torch.serialization.add_safe_globals` was given.
        num_kept_ckpts: delete all but so many of the newest, this one always kept; None or -1 keeps all.
        async_save: write while training goes on, decided again by every call.
        zero1_optimizer: whether every data rank writes its dictionary; else data rank 0 does.
        num_workers, use_xser, use_zero1_dcp, avoid_saving_lower_precision_weights: change nothing: each rank writes one
            tensor after the other, and holds no more than that one on the host.

    Raises:
        ConfigError: `num_kept_ckpts` is 0, or something cannot be saved.
        LoadError: it cannot be written, or the asynchronous save before failed.

    Communicates: as `shardwise.save_checkpoint`; for a dictionary, one gather of a small object over all ranks.
    """
    _check_workers("save_checkpoint", num_workers)
    if use_xser or use_zero1_dcp or avoid_saving_lower_precision_weights:
        warn_once("save_checkpoint: use_xser, use_zero1_dcp and avoid_saving_lower_precision_weights change nothing")
    if all(each is None for each in (model, optimizer, scheduler, user_content)):
        raise ConfigError("save_checkpoint has nothing to save", fix="pass model=, optimizer=, user_content=, ...")
    model = vars(model).get("model", model) if model is not None else None  # of a NeuronLTModule
    entries = optimizer if isinstance(optimizer, dict) else None
    own = None if isinstance(optimizer, dict) else optimizer
    if entries is not None and num_kept_ckpts is not None and num_kept_ckpts < 1 and num_kept_ckpts != -1:
        raise ConfigError(f"num_kept_ckpts is {num_kept_ckpts}", fix="use a positive number, or -1 to keep all")
    lora = getattr(model, "lora_config", None)
    content = _packed(user_content if lora is None else lora.packed(user_content))
    try:
        pending = checkpoints.save_checkpoint(
            path,
            model=_model_of(model, own),
            optimizer=_optimizer(own),
            scheduler=scheduler,
            extra=content,
            tag=None if tag is None else str(tag) or None,
            async_save=async_save,
            keep_last=None if num_kept_ckpts == -1 or entries is not None else num_kept_ckpts,
        )
    except ConfigError as error:
        said = error.summary.replace("keep_last", "num_kept_ckpts")
        raise ConfigError(said, at=error.at, why=error.why, fix=error.fix) from error
    if entries is not None:
        place = root_of(path) / pending.wait() / _DICTIONARY
        write_by_rank(entries, place, current_mesh(), by_data_rank=zero1_optimizer)
        if num_kept_ckpts not in (None, -1) and current_mesh().rank == 0:  # not before this one is complete
            prune(root_of(path), keep_last=num_kept_ckpts)
    if lora is not None and model is not None:
        lora.export(seen_through(model), path, pending.wait())


def load_checkpoint(
    path: Path,
    tag: str | None = None,
    model: nn.Module | None = None,
    optimizer: torch.optim.Optimizer | dict[str, Any] | None = None,
    scheduler: Any = None,
    num_workers: int = 8,
    strict: bool = True,
    use_zero1_dcp: bool = False,
) -> Any:
    """Loads a checkpoint of any degrees, model before optimizer; returns its `user_content`.

    Args:
        tag: by default the newest complete one.
        optimizer: also a dictionary, whose entries become those that this rank saved.
        strict: whether names that only the model or only the checkpoint has are an error.
        num_workers, use_zero1_dcp: change nothing: each rank reads its own parts, one after the other.

    Raises:
        LoadError: there is none, or it is damaged or of another model; the same on every rank, nothing is changed.
    """
    _check_workers("load_checkpoint", num_workers)
    chosen = None if tag is None else str(tag) or None
    content = checkpoints.load_checkpoint(
        path,
        chosen,
        model=None if model is None else seen_through(model),
        optimizer=None if isinstance(optimizer, dict) else _optimizer(optimizer),
        scheduler=scheduler,
        strict=strict,
    )
    if isinstance(optimizer, dict):
        place = find_tag(root_of(path), chosen) / _DICTIONARY
        by_data_rank = any(place.glob("*_dp_rank_*"))
        found = load_by_rank(place, current_mesh(), by_data_rank=by_data_rank)
        optimizer.clear()
        optimizer.update(found)
    content = _unpacked(content)
    is_packed = isinstance(content, dict) and content.keys() == {"user_content", "lora_config"}
    return content["user_content"] if is_packed else content


def _check_workers(name: str, num_workers: int) -> None:
    if type(num_workers) is not int or not 1 <= num_workers <= 32:
        raise ConfigError(f"num_workers is {num_workers!r}", fix="use a number from 1 to 32")
    if num_workers != 8:
        warn_once(f"{name}: num_workers changes nothing: a rank has one tensor at a time on the host")


def _packed(content: Any) -> Any:
    """What a checkpoint takes: JSON values and tensors as they are, anything else as bytes of rank 0 that `torch.load`
    reads without running code.

    Raises:
        ConfigError: the content of some rank cannot be read without running code, or rank 0 has JSON values and another
            rank something else. The same on every rank.

    Communicates: one gather of a small object over all ranks.
    """

    def pack() -> bytes | None:
        try:
            encode_tree(content, "user_content", {})
            return None
        except ConfigError:
            file = io.BytesIO()
        try:
            torch.save(content, file)
            _read(file.getvalue())
        except Exception as error:
            raise ConfigError(
                f"user_content holds what cannot be read without running code: {one_line(error, limit=200)}",
                fix="save its state_dict() or numbers, or allow its class by torch.serialization.add_safe_globals",
            ) from error
        return file.getvalue()

    group = dist.group.WORLD if dist.is_initialized() else None  # the model may be split by Shardwise's own functions
    packed = gather_from_all(group, "packing user_content", pack)
    if all(each is None for each in packed):
        return content
    data = packed[0]  # a set has another order on each rank
    if data is None:
        raise ConfigError("ranks pass different kinds of user_content", fix="pass the same on every rank")
    return {_PICKLED: torch.frombuffer(bytearray(data), dtype=torch.uint8)}


def _read(data: bytes) -> Any:
    with torch.serialization.safe_globals([*_PLAIN]):
        return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)


def _unpacked(content: Any) -> Any:
    if not isinstance(content, dict) or content.keys() != {_PICKLED}:
        return content
    try:
        return _read(content[_PICKLED].numpy().tobytes())
    except Exception as error:
        raise LoadError(
            f"cannot read user_content: {one_line(error, limit=200)}",
            fix="allow its class by torch.serialization.add_safe_globals, as where it was saved",
        ) from error


def _model_of(model: Any, optimizer: Any) -> nn.Module:
    """The model that is saved: an empty one where there is none, so that the rest is a checkpoint too."""
    if model is not None:
        return seen_through(model)
    if optimizer is not None and (found := model_under(optimizer)) is not None:
        return found
    if optimizer is not None:
        raise ConfigError(
            "save_checkpoint of an optimizer whose model is not known", fix="pass model=, or its state_dict()"
        )
    empty = nn.Module()
    adopt_model(empty, current_mesh())
    return empty


def has_checkpoint(path: Path) -> bool:
    """Whether there is a complete checkpoint in the directory."""
    return root_of(path).is_dir() and bool(find_tags(root_of(path)))


def _optimizer(optimizer: torch.optim.Optimizer | None) -> torch.optim.Optimizer | None:
    return optimizer.optimizer if isinstance(optimizer, NxDOptimizer) else optimizer
