"""`save_checkpoint` and `load_checkpoint`: a session's state, out of any layout and into any other."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from shardwise.checkpoint.background import PendingSave, finish_all_saves, join_saves, writer_of
from shardwise.checkpoint.directory import check_tag, root_of
from shardwise.checkpoint.load import Session, load_into
from shardwise.checkpoint.save import prepare_save
from shardwise.checkpoint.save_job import SaveRequest
from shardwise.errors import ConfigError
from shardwise.lora.files import adapter_companions
from shardwise.optim.gradients import gradients_of
from shardwise.optim.nonfinite import check_steps
from shardwise.optim.optimizer import model_under
from shardwise.parallel.materialize import put_tensor
from shardwise.parameters.registry import registry_of

__all__ = ["load_checkpoint", "load_session", "save_checkpoint"]


@torch.inference_mode(mode=False)  # what is made here is used again outside of it
def save_checkpoint(  # noqa: PLR0913 - the public surface: each is a choice of the user's
    path: str | os.PathLike[str],
    *,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    scheduler: Any = None,
    extra: Any = None,
    tag: str | None = None,
    async_save: bool = False,
    keep_last: int | None = None,
    keep_every: int | None = None,
    num_writers: int = 1,
) -> PendingSave:
    """Saves a split model and what trains it as one checkpoint, which any other layout can load.

    It holds parameters and persistent buffers by their Hugging Face names (with adapters, and where most of the model
    is frozen, the trained ones, and what tells the frozen ones from others), the optimizer's states and options, the
    scheduler, the loss scale of float16 and the random states; no gradients: save after a step. Replicas share the
    writing. The checkpoint appears complete or not at all (docs/checkpoint-format.md).

    Args:
        path: a directory of checkpoints, which all ranks share. One job at a time may save there.
        model: split by Shardwise, or a wrapper around it.
        optimizer: over its parameters, from `build_optimizer` or torch.
        scheduler: anything with a `state_dict` of JSON values and tensors.
        extra: JSON values and tensors, the same on every rank, for `load_checkpoint` to return; "step" names the tag.
        tag: the checkpoint's name in `path`; by default `step-N`, or `save-N` where no step is known. One that is there
            is replaced when the new one is complete.
        async_save: return when everything has been copied to host memory, and write in the background. The next save
            waits for this one. An error is raised by the next save or load, or ends the process when it exits.
        keep_last: delete all but so many of the newest complete checkpoints, once this one is complete.
        keep_every: but never those whose step is a multiple of it.
        num_writers: files that each rank writes at the same time.

    Returns:
        The save, whose `wait()` returns the tag when the checkpoint is complete.

    Raises:
        ConfigError: something cannot be saved, or is not the same on every rank.
        GradientError: an earlier step was one, and the host did not know yet; the weights are those before it.
        LoadError: it cannot be written, or the save before has failed; the same on every rank.

    Communicates: one all-gather of 40 bytes over all ranks, or where they hold something else than at the last save a
        gather of a small object; five more over a process group of its own, in the background where that was asked for.
    """
    keep = {"keep_last": keep_last, "keep_every": keep_every, "num_writers": num_writers}
    writer = writer_of(registry_of(_module(model)).mesh)
    writer.join()
    (gradients := check_steps(model)).parameters()  # what came into the model later has an entry from here on
    job = prepare_save(
        lambda: _request(path, tag, extra, keep),
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        loss_scale=gradients.loss_scale.state_dict() if gradients.loss_scale is not None else None,
        extra=extra,
        companions=adapter_companions(registry_of(model).model() or model),
    )
    return writer.write_later(job) if async_save else writer.write(job)


def _module(model: Any) -> nn.Module:
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"the model is a {type(model).__name__}", fix="pass a torch.nn.Module that Shardwise has split"
        )
    return model


def _request(path: str | os.PathLike[str], tag: str | None, extra: Any, keep: Mapping[str, Any]) -> SaveRequest:
    for name, value in keep.items():
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            raise ConfigError(f"{name} is {value!r}", why="it counts, from 1")
    step = extra.get("step") if isinstance(extra, Mapping) else None
    is_step = isinstance(step, int) and not isinstance(step, bool) and 0 <= step < 2**62
    return SaveRequest(
        root=root_of(path), tag=None if tag is None else check_tag(tag), step=step if is_step else None, **keep
    )


def load_checkpoint(
    path: str | os.PathLike[str],
    tag: str | None = None,
    *,
    model: nn.Module | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    scheduler: Any = None,
    strict: bool = True,
    verify: bool = True,
) -> Any:
    """Loads a checkpoint into a split model and what trains it, in place; returns what was saved as `extra`.

    The layout may be another than the one that saved it, one process included: each rank reads only what it holds.
    Everything is found and checked on all ranks before anything is changed. Random states continue where they were if
    the number of data ranks is the same; otherwise each data rank begins a new stream that follows from them. Gradients
    that the model has are dropped.

    Args:
        path: a directory of checkpoints.
        tag: which of them; by default the newest complete one.
        model: split by Shardwise, also on the meta device; None reads `extra` alone.
        optimizer: over its parameters, of the class that was saved. Its options become those that were saved. Without
            the model, which stays as it is then, its state alone.
        scheduler: of the class that was saved.
        strict: whether names that only the model or only the checkpoint has, and frozen parameters of other values than
            were saved with, are an error; else they are a warning.
        verify: whether checksums of the parts that this rank reads are verified.

    Raises:
        LoadError: there is no such checkpoint; a file is missing, damaged, or not what the checkpoint says; names or
            shapes do not fit; or an optimizer's state cannot be divided. Names file and tensor. The same error on every
            rank; model and optimizer are as they were.
        ConfigError: the tag cannot be one, an optimizer is of no split model, or given on some ranks only.

    Communicates: a few gathers of small objects over all ranks.
    """
    session = Session(model=model, optimizer=optimizer, scheduler=scheduler, strict=strict, verifies=verify)
    return load_session(path, tag, session)


@torch.inference_mode(mode=False)
def load_session(path: str | os.PathLike[str], tag: str | None, session: Session) -> Any:
    """As `load_checkpoint`."""
    if session.model is None and session.optimizer is not None:
        session = replace(session, model=model_under(session.optimizer), fills_model=False)
    model: nn.Module | None = session.model
    put: Any = None
    if model is None:
        finish_all_saves()
    else:
        registry = registry_of(_module(model))
        join_saves(registry.mesh)
        gradients_of(model).parameters()
        put = functools.partial(put_tensor, registry.model() or model, registry)
    loaded = load_into(path, tag, session, put=put)
    loss_scale = gradients_of(model).loss_scale if model is not None else None
    if loss_scale is not None and loaded.loss_scale is not None:
        loss_scale.load_state_dict(loaded.loss_scale)
    return loaded.extra
