"""Finds out how a model can be cut into stages, and tries it.

A tiny model with as many layers as the model, of the same kinds, runs once and is watched. Then it runs stage by stage,
cut before every layer, and must compute the same loss and gradients. The result is cached on disk.
"""

import copy
import functools
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from shardwise.errors import PlanError, UnsupportedError
from shardwise.parallel.stages import build_local_stages
from shardwise.plan.pipeline_plan import LayerOrder, PipelinePlan, Returned
from shardwise.plan.structure import upwards
from shardwise.probe.disk_cache import cache_path, read, write
from shardwise.probe.trial import Verdict, build_tried_model, reraise_as, verdict_of_exception
from shardwise.probe.watch_order import watch_order
from shardwise.runtime.modes import has_dropout
from shardwise.sharding.json_form import from_json, to_json
from shardwise.stages.model import Stages
from shardwise.tiny.inputs import make_batch
from shardwise.tiny.models import set_runnable_mode
from shardwise.tiny.objective import clone_batch, loss_or_surrogate
from shardwise.tiny.random import fork_all_rng

logger = logging.getLogger("shardwise.plan")

_ALLOWED = 1e-3  # of the largest entry of a gradient


def find_layer_order(model: nn.Module) -> LayerOrder:
    """The layers of `model` in order of execution, the tensors between them, and the users of each parameter.
    Communicates nothing.

    Args:
        model: a transformers model, real or meta, unsplit.
    """
    name = type(model).__name__
    if not isinstance(model, PreTrainedModel):
        raise UnsupportedError(f"{name} is no transformers model", why="no tiny model of it can be built")
    path = cache_path(model, "layers", {})
    if (cached := read(path, functools.partial(from_json, LayerOrder))) is not None:
        return cached
    with reraise_as(no_stages_because(name)), fork_all_rng(), torch.enable_grad():
        order = _order_of(model)
    write(path, to_json(order))
    return order


def _order_of(model: PreTrainedModel) -> LayerOrder:
    tiny = build_tried_model(model, num_layers=None)  # as deep as the model
    batch = make_batch(tiny, seed=0)
    set_runnable_mode(tiny, batch)
    return tried_order(tiny, batch, drops=has_dropout(model))


def tried_order(tiny: nn.Module, batch: Mapping[str, Any], *, layers: Collection[str] = (), drops: bool) -> LayerOrder:
    """The layer order of a tiny model, if the model computes the same when it is cut accordingly."""
    order, returns = watch_order(tiny, batch, layers=layers, drops=drops)
    if len(order.calls) == 1:
        raise no_stages(type(tiny).__name__, f"of its layers only {order.calls[0]} runs", at="")
    while True:
        try:
            reason, at = _difference(tiny, batch, order), ""
            if not reason:
                _check_training(tiny, batch, order)
        except Exception as error:  # noqa: BLE001 - the model's own code fails in any way on a wrong cut
            verdict = verdict_of_exception(error)
            reason, at = verdict.reason, verdict.module
        more = _returns_around(tiny, at, order, returns)
        if not more:
            break
        order = replace(order, returns={**order.returns, **more})
    if reason:
        raise no_stages(type(tiny).__name__, reason, at=at)
    return order


def _check_training(tiny: PreTrainedModel, batch: Mapping[str, Any], order: LayerOrder) -> None:
    """Runs the code of other stages in training mode, and raises what a stage would raise. Does nothing if the model
    cannot be trained.
    """
    if tiny.training:
        return
    trained = copy.deepcopy(tiny).train()
    try:
        with torch.no_grad():
            copy.deepcopy(trained)(**clone_batch(batch))
    except Exception:  # noqa: BLE001 - it wants other inputs to train
        return
    _stages_of_one(trained, order).shapes(0, clone_batch(batch))


def _stages_of_one(model: nn.Module, order: LayerOrder) -> Stages:
    """All stages in one model, one per segment, in place."""
    starts = tuple(range(len(order.calls)))
    return build_local_stages(
        model, PipelinePlan(order=order, schedule="1f1b", starts=starts, rank_of=starts), own=starts
    )


def train_in_stages(stages: Sequence[Stages], batch: Mapping[str, Any]) -> tuple[Any, list[tuple[Tensor, ...]]]:
    """Forward and backward through all stages.

    Returns:
        The output of the last stage, and the tensors at every cut.
    """
    sent: list[tuple[Tensor, ...]] = []
    received: list[tuple[Tensor, ...]] = [()]
    output: Any = None
    for stage, each in enumerate(stages):
        output = each.run(stage, clone_batch(batch), received[-1])
        if stage < len(stages) - 1:
            expected, _ = stages[stage + 1].shapes(stage + 1, clone_batch(batch))
            sent.append(output)
            pairs = zip(output, expected, strict=True)
            received.append(tuple(value.detach().requires_grad_(known.needs_gradient) for value, known in pairs))
    loss_or_surrogate(output).backward()
    for values, copies in zip(reversed(sent), reversed(received), strict=False):
        given = [(x, y.grad) for x, y in zip(values, copies, strict=True) if x.requires_grad and y.grad is not None]
        torch.autograd.backward([x for x, _ in given], [gradient for _, gradient in given])
    return output, sent


def _returns_around(
    tiny: nn.Module, at: str, order: LayerOrder, returns: Mapping[str, Returned]
) -> dict[str, Returned]:
    """The module in `returns` whose code failed, or one around it, and all modules of that class."""
    for name in upwards(at):
        if name in order.returns:
            break
        if name in returns:
            same = type(tiny.get_submodule(name))
            return {other: each for other, each in returns.items() if type(tiny.get_submodule(other)) is same}
    return {}


def no_stages_because(name: str) -> Callable[[Verdict], PlanError]:
    return lambda verdict: no_stages(name, verdict.reason, at=verdict.module)


def no_stages(name: str, why: str, *, at: str, fix: str = "use pp1") -> PlanError:
    return PlanError(f"{name} cannot be cut into stages", at=at or None, why=why, fix=fix)


def _difference(tiny: nn.Module, batch: Mapping[str, Any], order: LayerOrder) -> str:
    """Difference of a tiny model's results when it is cut before every layer, in words."""
    unsplit, cut = copy.deepcopy(tiny), copy.deepcopy(tiny)
    own = list(cut.parameters())  # before they go
    loss = loss_or_surrogate(unsplit(**clone_batch(batch)))
    loss.backward()
    output, _ = train_in_stages([_stages_of_one(cut, order)] * len(order.calls), batch)
    found = loss_or_surrogate(output)
    if not abs(float(found.detach() - loss.detach())) <= _ALLOWED * max(1.0, abs(float(loss.detach()))):
        return f"cut before every layer, it computes a loss of {float(found):.6f} instead of {float(loss):.6f}"
    used = {id(each) for name, each in unsplit.named_parameters(remove_duplicate=False) if order.uses[name]}
    for (name, parameter), same in zip(unsplit.named_parameters(), own, strict=True):
        if not _equal(same.grad, parameter.grad):
            return f"cut before every layer, it computes another gradient of {name}"
        if id(parameter) not in used and parameter.grad is not None and bool(parameter.grad.any()):
            return f"nothing was seen to compute with {name}, but it has a gradient"
    return ""


def _equal(found: Tensor | None, expected: Tensor | None) -> bool:
    if found is None or expected is None:
        other = expected if found is None else found
        return other is None or not bool(other.any())
    return not found.numel() or bool((found - expected).abs().max() <= _ALLOWED * expected.abs().max() + 1e-6)
