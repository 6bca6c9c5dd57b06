"""How a hand-written model can be cut into stages."""

from __future__ import annotations

import copy
from collections.abc import Collection

import torch
from torch import Tensor, nn

from shardwise.comm.agree import raise_on_all_ranks
from shardwise.compat.layers.grouped import note_heads
from shardwise.compat.layers.split_module import running_alone
from shardwise.mesh import Mesh
from shardwise.plan.pipeline_plan import LayerOrder
from shardwise.probe.layer_order import no_stages, no_stages_because, tried_order
from shardwise.probe.trial import reraise_as
from shardwise.probe.tried_model import on_cpu
from shardwise.runtime.modes import has_dropout
from shardwise.tiny.inputs import guess_batches
from shardwise.tiny.models import set_runnable_mode
from shardwise.tiny.objective import clone_batch
from shardwise.tiny.random import fork_all_rng

__all__ = ["layer_order_by_hand"]


def layer_order_by_hand(model: nn.Module, mesh: Mesh, *, layers: Collection[str] = ()) -> LayerOrder:
    """As `find_layer_order`, of a model that was written by hand: there is no tiny one, so copies of itself run, on the
    first of `guess_batches` that it takes.

    Args:
        model: real, the same on every rank; it may hold modules that are divided over tp of `mesh`.
        layers: the modules that are cut apart; by default the items of its outermost `nn.ModuleList`s.

    Raises:
        PlanError: it cannot be cut into stages, or does not run on this batch.

    Communicates: one gather of a small object over all ranks; before it as `note_heads`.
    """
    note_heads(model, mesh)
    name = type(model).__name__
    with (
        raise_on_all_ranks(mesh.group(), "finding the layers of the model"),
        running_alone(model, mesh),
        reraise_as(no_stages_because(name)),
        fork_all_rng(),
        torch.enable_grad(),
    ):
        own = on_cpu(copy.deepcopy(model))
        batch = _taken_batch(own)
        set_runnable_mode(own, batch)
        return tried_order(own, batch, layers=layers, drops=has_dropout(model))


def _taken_batch(model: nn.Module) -> dict[str, Tensor]:
    fault: Exception | None = None
    for batch in guess_batches(model):
        try:
            with torch.no_grad():
                copy.deepcopy(model)(**clone_batch(batch))
        except Exception as error:  # noqa: BLE001 - it takes other inputs
            fault = fault or error
        else:
            return batch
    raise no_stages(
        type(model).__name__,
        f"it takes none of the inputs that were tried, token ids and numbers: {fault}",
        at="",
        fix="let forward take token ids or numbers",
    )
