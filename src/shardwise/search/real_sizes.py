"""A plan held against the sizes of the model that it is for: few of its layers, on tensors without values.

What passes on a tiny model may not fit other sizes: heads of which a rank's share makes no complete groups, sections
of unequal length, counts that do not divide. Shapes alone show most of it, so a rank's part of the model is run forward
and backward on fake tensors before the plan is used.
"""

from __future__ import annotations

import copy
import logging
from dataclasses import replace

import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from transformers import PreTrainedModel

from shardwise.comm.simulated import LoneGroup
from shardwise.errors import ShardwiseError
from shardwise.parallel.apply import apply_plan
from shardwise.parallel.decide import decide_split
from shardwise.parallel.facts import read_facts
from shardwise.parallel.fake import AsOnDevices, fake_tensors, materialize_fake
from shardwise.plan.decision import SplitPlan
from shardwise.plan.options import ParallelSpec
from shardwise.plan.spec import Plan
from shardwise.search.generalize import generalize
from shardwise.search.trial import Verdict, failed
from shardwise.sharding.placement import Split
from shardwise.tiny.models import make_batch
from shardwise.tiny.objective import objective_of
from shardwise.tiny.shrink import keep_layers
from shardwise.tiny.simulate import SimulatedMesh
from shardwise.topology.shape import MeshShape

__all__ = ["RealSizes"]

logger = logging.getLogger("shardwise.plan")


class RealSizes:
    """Few layers of a model, of every kind, at its own sizes.

    Attributes:
        model: on the meta device, unsplit.
        runs: whether it runs on tensors without values; what depends on values is not known.
    """

    def __init__(self, model: PreTrainedModel, *, tp_size: int) -> None:
        self._tp_size = tp_size
        self.runs = False
        try:
            with torch.device("meta"):
                self.model = type(model)(keep_layers(model.config)).train(model.training)
        except Exception as error:  # noqa: BLE001 - the model's own code fails in any way where layers are left out
            unsplit = failed(error)
        else:
            unsplit = self._verdict(None)
            self.runs = unsplit.passed
        if not self.runs:
            logger.info("%s cannot be tried at its own sizes without values: %s", type(model).__name__, unsplit.reason)

    def run(self, plan: Plan, *, tiny: nn.Module, sequence_parallel: bool = False) -> Verdict:
        """Whether each rank's part runs, split by a plan that was found on `tiny`; passed where that cannot be told."""
        if not self.runs:
            return Verdict(passed=True)
        try:
            own, facts = generalize(plan, tiny, self.model), read_facts(self.model)
            spec = ParallelSpec(sequence_parallel=sequence_parallel)
            decided = decide_split(own, self.model, facts, MeshShape(tp_size=self._tp_size), spec)
        except ShardwiseError as error:
            return failed(error)
        return self._verdict(decided)

    def _verdict(self, decided: SplitPlan | None) -> Verdict:
        """Runs the ranks that hold most and least, one after another; the unsplit model where nothing is decided."""
        for rank in (0, self._tp_size - 1) if decided is not None and _is_uneven(decided) else (0,):
            model, mesh = copy.deepcopy(self.model), SimulatedMesh(LoneGroup(rank, self._tp_size))
            try:
                with fake_tensors(), AsOnDevices():
                    materialize_fake(model)
                    if decided is not None:
                        apply_plan(model, mesh, decided, ParallelSpec())
                    batch = make_batch(model, seed=0)
                    batch.pop("attention_mask", None)  # full rows need none, but only values could tell that they are
                    objective_of(model(**batch)).backward()
            except (DataDependentOutputException, DynamicOutputShapeException) as error:
                return replace(failed(error), passed=decided is not None)  # only a split needs values: none can tell
            except Exception as error:  # noqa: BLE001 - the model's own code fails in any way on a wrong split
                return failed(error)
        return Verdict(passed=True)


def _is_uneven(decided: SplitPlan) -> bool:
    """Whether ranks hold different numbers of elements."""
    placements = [each.placement for each in decided.parameters.values()]
    splits = [each for each in placements if isinstance(each, Split)]
    return any(len(set(each.local_sizes)) > 1 for each in splits)
