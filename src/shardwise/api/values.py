"""Values that a model has not when it is split: read by each rank for its part, drawn, or those of a checkpoint."""

from __future__ import annotations

import functools
import os
import platform
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from shardwise.api.checkpoints import fill_model, holds_all
from shardwise.api.filling import Filling, filling_for
from shardwise.api.lazily import FILLING
from shardwise.api.prepare import prepare
from shardwise.checkpoint.background import join_saves
from shardwise.checkpoint.load import open_on_all_ranks
from shardwise.comm.agree import agree_on, raise_on_all_ranks
from shardwise.comm.operations import all_gather_objects
from shardwise.errors import UnsupportedError
from shardwise.mesh import Mesh
from shardwise.parameters.registry import Registry, find_parameters
from shardwise.plan.options import ParallelSpec
from shardwise.runtime.adapters import find_model, has_adapters

__all__ = ["Values", "split_lazily"]

Place = str | os.PathLike[str]


class Values:
    """Where the values of a model come from that is about to be split, the same way on every rank. A context manager.

    Args:
        model: real, or on the meta device in part or in full; with PEFT's around it or in it.
        checkpoint: a sharded checkpoint, which is loaded instead.
        ranks_at_a_time: how many ranks of a machine read or draw at the same time; all where None or not positive.

    Attributes:
        filling: what the tensors on the meta device will be; None where there are none.

    Raises:
        LoadError: there is no such checkpoint.
        UnsupportedError: nothing says what they will be.

    Communicates: two gathers of small objects over all ranks.
    """

    def __init__(
        self, model: nn.Module, mesh: Mesh, *, checkpoint: Place | None = None, ranks_at_a_time: int | None = None
    ) -> None:
        self._model, self._group = model, mesh.group()
        join_saves(mesh)
        self._checkpoint = None if checkpoint is None else open_on_all_ranks(checkpoint, None, mesh)
        self._inner: Any = find_model(model)
        self.filling, self._reads = agree_on(
            self._group,
            self._look,
            doing="looking for its weights",
            what="the ranks load different models",
            fix="load the same files on every rank: from a directory that all machines share, or a pinned revision",
        )
        everyone = all_gather_objects((torch.initial_seed(), platform.node()), self._group)
        nodes, own = [node for _, node in everyone], 0 if self._group is None else self._group.rank()
        most = max(map(nodes.count, nodes))
        at_a_time = ranks_at_a_time if ranks_at_a_time is not None and ranks_at_a_time > 0 else most
        self._seed = everyone[0][0]
        self._turn, self._num_turns = nodes[:own].count(nodes[own]) // at_a_time, -(-most // at_a_time)

    def _look(self) -> tuple[tuple[Filling | None, bool], dict[str, str]]:
        filling, reads = _filling_of(self._inner), self._checkpoint is None or not holds_all(self._checkpoint)
        return (filling, reads), filling.describe() if filling is not None and reads else {}

    def put(self, registry: Registry) -> None:
        """Puts them into the model, which has been split.

        Raises:
            LoadError: weights cannot be read, or the checkpoint does not fit; on every rank.

        Communicates: one gather of a small object over all ranks for every turn; as `load_checkpoint`.
        """
        fill_model(self._model, self._checkpoint, functools.partial(self._fill, registry))
        list(find_parameters(self._model))  # FSDP2 made parameters anew, which are to know their entries

    def _fill(self, registry: Registry) -> None:
        for turn in range(self._num_turns):
            with raise_on_all_ranks(self._group, "loading"):
                if self.filling is not None and turn == self._turn:
                    self.filling.fill(self._inner, registry, seed=self._seed, reads=self._reads)
                    self._inner.to(registry.mesh.device)  # what was real before

    def __enter__(self) -> Values:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if kind is None:  # else the model may be split another way
            if self.filling is not None:
                self.filling.__exit__(kind, *error)
            self._inner.__dict__.pop(FILLING, None)


def split_lazily(
    model: nn.Module,
    mesh: Mesh,
    spec: ParallelSpec,
    *,
    checkpoint: Place | None = None,
    ranks_at_a_time: int | None = None,
) -> Registry:
    """Splits a model, and gives what of it is on the meta device its values: those that `from_pretrained` would have
    read, or those that the model starts with, drawn from rank 0's `torch.initial_seed()`.

    Args:
        model, checkpoint, ranks_at_a_time: as of `Values`.

    Raises:
        PlanError, RankError, UnsupportedError: as `shardwise.parallelize`.
        LoadError: weights cannot be read, or the checkpoint does not fit.

    Communicates: as `shardwise.parallelize` and `Values`.
    """
    with Values(model, mesh, checkpoint=checkpoint, ranks_at_a_time=ranks_at_a_time) as values:
        registry = prepare(model, mesh, spec)
        values.put(registry)
    return registry


def _filling_of(model: Any) -> Filling | None:
    """What fills what of the model is on the meta device; None where nothing is."""
    values = (*model.parameters(), *model.buffers())
    own: Filling | None = model.__dict__.get(FILLING)
    if not any(value.is_meta for value in values):
        return None
    parts = [name for name, module in model.named_modules() if module is not model and FILLING in module.__dict__]
    if parts or not isinstance(model, PreTrainedModel):
        raise UnsupportedError(
            f"{type(model).__name__}, " + (f"of which {parts[0]} was loaded lazily" if parts else "on the meta device"),
            why="nothing says what its other tensors are",
            fix="load all of it by from_pretrained of its own class, or nothing of it lazily",
        )
    if own is None:
        return filling_for(model)
    return own.with_adapters_of(model) if has_adapters(model) else own
