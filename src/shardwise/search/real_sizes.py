"""Checks a plan at the real model's sizes: a few layers on fake tensors.

A plan that passes on a tiny model may not fit other sizes: a rank's share of heads that makes no complete groups,
sections of unequal length, counts that do not divide. Shapes alone show most of it. So a rank's part of the model runs
forward and backward on fake tensors before the plan is used.
"""

import copy
import logging

import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from transformers import PreTrainedModel

from shardwise.comm.simulated import LoneGroup
from shardwise.errors import ShardwiseError
from shardwise.parallel.activation_memory import FakeTensorCorrections, fake_tensors, materialize_fake
from shardwise.parallel.apply import apply_plan
from shardwise.parallel.facts import decide_split, read_facts
from shardwise.plan.decision import SplitPlan
from shardwise.plan.options import ParallelSpec
from shardwise.plan.spec import Plan
from shardwise.probe.trial import SimulatedMesh, Verdict, smallest_with_all_layer_kinds, verdict_of_exception
from shardwise.search.generalize import generalize
from shardwise.sharding.placement import Split
from shardwise.tiny.models import make_batch
from shardwise.tiny.objective import loss_or_surrogate
from shardwise.tiny.shrink import keep_layers
from shardwise.topology.shape import MeshShape

logger = logging.getLogger("shardwise.plan")


class RealSizes:
    """A few layers of every kind of a model, at its own sizes; all layers if none can be removed."""

    def __init__(self, model: PreTrainedModel, *, num_parts: int) -> None:
        self._num_parts, self.model = num_parts, model
        unsplit: Verdict | None
        try:
            with torch.device("meta"):
                self.model = smallest_with_all_layer_kinds(
                    lambda number: type(model)(keep_layers(model.config, num_layers=number)).train(model.training),
                    model,
                )
        except Exception as error:  # noqa: BLE001 - the model's own code fails in any way where layers are left out
            unsplit = verdict_of_exception(error)
        else:
            unsplit = self._verdict(None)
        self.runs = unsplit is not None and unsplit.passed
        if not self.runs:
            why = unsplit.reason if unsplit is not None else "its code asks for values"
            logger.info("%s cannot be tried at its own sizes without values: %s", type(model).__name__, why)

    def run(self, plan: Plan, *, tiny: nn.Module, sequence_parallel: bool = False) -> Verdict:
        """Whether each rank's part runs, split by a plan that was found on `tiny`.

        If that cannot be determined, the plan passes if ranks hold equal parts of every layer. With unequal parts,
        heads and features may disagree.
        """
        try:
            own, facts = generalize(plan, tiny, self.model), read_facts(self.model)
            spec = ParallelSpec(sequence_parallel=sequence_parallel)
            decided = decide_split(own, self.model, facts, MeshShape(tp_size=self._num_parts), spec)
        except ShardwiseError as error:
            return verdict_of_exception(error)
        found = self._verdict(decided) if self.runs else None
        if found is not None:
            return found
        alone = {each.fqn for each in decided.regions if each.edge == "gather"}  # whose outputs are full again
        uneven = next(
            (fqn for fqn in _uneven(decided) if facts.layer_of(fqn) and fqn.rpartition(".")[0] not in alone), None
        )
        reason = f"ranks hold unequal parts of {uneven}; only values would show whether they fit, and none can be tried"
        return Verdict(passed=True) if uneven is None else Verdict(passed=False, reason=reason)

    def _verdict(self, decided: SplitPlan | None) -> Verdict | None:
        """Runs the ranks that hold most and least, one after another; the unsplit model if `decided` is None. Returns
        None if the result depends on values.
        """
        for rank in (0, self._num_parts - 1) if decided is not None and _uneven(decided) else (0,):
            model, mesh = _copied(self.model), SimulatedMesh(LoneGroup(rank, self._num_parts))
            try:
                with fake_tensors(), FakeTensorCorrections():
                    materialize_fake(model)
                    if decided is not None:
                        apply_plan(model, mesh, decided, ParallelSpec())
                    for parameter in filter(lambda each: each.requires_grad, model.parameters()):
                        parameter.register_post_accumulate_grad_hook(lambda each: setattr(each, "grad", None))
                    batch = make_batch(model, seed=0)
                    batch.pop("attention_mask", None)  # full rows need none, but only values could tell that they are
                    loss_or_surrogate(model(**batch)).backward()
            except (DataDependentOutputException, DynamicOutputShapeException):
                return None
            except Exception as error:  # noqa: BLE001 - the model's own code fails in any way on a wrong split
                return verdict_of_exception(error)
        return Verdict(passed=True)


def _copied(model: PreTrainedModel) -> PreTrainedModel:
    """Copy whose parameters share the model's memory; nothing writes to them."""
    shared = {id(each): nn.Parameter(each.detach(), each.requires_grad) for each in model.parameters()}
    return copy.deepcopy(model, shared)


def _uneven(decided: SplitPlan) -> list[str]:
    """FQNs of parameters of which ranks hold different numbers of elements."""
    placements = {fqn: each.placement for fqn, each in decided.parameters.items()}
    return [fqn for fqn, each in placements.items() if isinstance(each, Split) and len(set(each.local_sizes)) > 1]
