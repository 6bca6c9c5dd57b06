"""Runs a model's stages in the order of a schedule, forward and backward."""

import copy
import itertools
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import schedules as torch_schedules

from shardwise.comm.collectives import all_gather_objects
from shardwise.errors import LayoutError, RankError
from shardwise.parameters.registry import Registry, registry_of
from shardwise.pipeline.stage import Microbatch, PipelineStage, ScheduleRun
from shardwise.plan.pipeline_plan import PipelinePlan
from shardwise.runtime.modes import with_attributes
from shardwise.runtime.same_batch import compared_already
from shardwise.schedule.schedule import Schedule, build_in_order, build_schedule
from shardwise.schedule.timeline import Span, Timeline
from shardwise.stages.model import Stages

_ATTRIBUTE = "_shardwise_pipeline"


@dataclass(eq=False)
class _P2PGroup:
    """The group on which the stages of a model, and of its copies, send each other tensors.

    Attributes:
        broken: reason why it is no longer used.
    """

    group: dist.ProcessGroup | None
    broken: str | None = None
    users: "weakref.WeakSet[PipelineRunner]" = field(default_factory=weakref.WeakSet)

    def abort(self, why: str) -> None:
        """Closes the connections (see [Note: a group for stages])."""
        self.broken = why
        for user in self.users:
            user.forget_stages()
        if self.group is not None:
            dist.distributed_c10d._abort_process_group(self.group)
            self.group = None


_NUMBERS = itertools.count(1)


class PipelineRunner:
    """Runs the stages of one model; kept on the model. Every rank of the mesh must create it at the same point.

    # [Note: a group for stages]
    Stages send tensors on a group that nothing else uses. If a stage raises, this rank releases that group. Its
    connections close, and ranks that wait for the stage fail within a second, even while this rank lives on in an
    exception handler or a debugger. gloo closes connections only when nothing refers to a group.

    Communicates: creates that group.

    Attributes:
        is_first, is_last: whether this rank holds the first or the last stage.
        times_next: whether the next run records the time of each action, for `timeline`.
        num_microbatches: number of microbatches of a forward with gradients; None: as many as fill the pipeline.
        asked_outputs: intermediate outputs that the model's config asked for when it was cut.
    """

    asked_outputs: frozenset[str] = frozenset()
    num_microbatches: int | None = None

    def __init__(self, model: nn.Module, registry: Registry, plan: PipelinePlan, stages: Stages) -> None:
        mesh = registry.mesh
        group = mesh.group("pp")
        if group is None:
            raise LayoutError(f"a pipeline of {plan.num_stages} stages on one rank", fix="use pp_size 2 or more")
        self.plan, self.stages = plan, stages
        self.is_first, self.is_last = 0 in stages.own, plan.num_stages - 1 in stages.own
        self.last_rank = plan.rank_of[-1]
        self.group = group
        self._model, self._registry = model, registry
        self._kept: dict[tuple[str, int], tuple[Any, list[PipelineStage]]] = {}
        self._p2p = _P2PGroup(mesh.new_group("pp"))
        self._p2p.users.add(self)
        self.name = str(next(_NUMBERS))
        self.last_run = ScheduleRun(parts=())
        self.last_schedule: Schedule | None = None
        self.times_next = False
        model.__dict__[_ATTRIBUTE] = self  # for `runner_of`

    def __deepcopy__(self, memo: dict[int, Any]) -> "PipelineRunner":
        # A copied model runs on the same ranks, over the same line.
        copied = memo[id(self)] = copy.copy(self)
        copied._model, copied._registry, copied.stages = copy.deepcopy((self._model, self._registry, self.stages), memo)
        copied._kept, copied.last_run, copied.last_schedule = {}, ScheduleRun(parts=()), None
        copied.name = str(next(_NUMBERS))
        self._p2p.users.add(copied)
        return copied

    def schedule(self, num_microbatches: int) -> Schedule:
        """Returns the schedule for this number of microbatches."""
        return build_schedule(
            self.plan.schedule,
            pp_size=self.group.size(),
            num_microbatches=num_microbatches,
            num_stages_per_rank=len(self.stages.own),
        )

    def takes(self, num_microbatches: int) -> bool:
        """Returns whether the schedule supports this number of microbatches."""
        try:
            self.schedule(num_microbatches)
        except ValueError:
            return False
        return True

    def fitting(self, num_microbatches: int) -> Schedule:
        """Returns the schedule; if it does not support the number of microbatches, one stage after the other."""
        return self.schedule(num_microbatches) if self.takes(num_microbatches) else self.in_order(num_microbatches)

    def in_order(self, num_microbatches: int) -> Schedule:
        """Returns a schedule that runs one stage after the other, for evaluation and any number of microbatches."""
        return build_in_order(self.plan.rank_of, num_microbatches)

    @property
    def trains(self) -> bool:
        """Whether any stage had something to train in the last run."""
        return len(self._registry.idle_stages) < self.group.size()

    def run(
        self, parts: Sequence[Microbatch], schedule: Schedule, *, has_backward: bool = True, keeps_outputs: bool = False
    ) -> ScheduleRun:
        """Runs all stages of this rank on all microbatches. Every rank of the pipeline calls it with the same ones.

        Returns:
            Outputs of the last stage, on its rank, if they are kept.

        Communicates: what the stages do (see `PipelineStage`), and over the data axes, after the last backward, one
        reduction of each unit's gradients.
        """
        if self._p2p.broken is not None:
            raise RankError(
                "this pipeline has failed before",
                why=f"{self._p2p.broken}; messages of the failed run would be taken for the next step's",
                fix="start the job again",
            )
        runtime, stages = self._runtime(schedule, has_backward=has_backward)
        context = self._registry.context
        seed = context.draw_seed(self._model)
        current = ScheduleRun(
            parts=parts, seed=seed, has_backward=has_backward, keeps_outputs=keeps_outputs, is_timed=self.times_next
        )
        self.times_next = False
        for stage in stages:
            stage.round, stage.has_backward = current, has_backward
            stage.clear_runtime_states()
        try:
            # After a failed stage torch would log the whole schedule.
            quiet = with_attributes(torch_schedules.logger, disabled=True)
            with quiet, compared_already(context), torch.set_grad_enabled(has_backward):
                runtime._step_microbatches(target_mbs=[None] * len(parts), losses=None, return_outputs=False)
        except BaseException as error:  # the ranks that wait for this one fail too, and none goes on with half a step
            self._p2p.abort(f"{type(error).__name__}: {error}".splitlines()[0])
            raise
        for stage in stages:
            stage.clear_runtime_states()
            stage.round = ScheduleRun(parts=())
        self.last_run, self.last_schedule = current, schedule
        return current

    def _runtime(self, schedule: Schedule, *, has_backward: bool) -> tuple[Any, list[PipelineStage]]:
        """Returns torch's runtime for a schedule, and its stages; created once per schedule."""
        key = schedule.name, schedule.num_microbatches
        if key not in self._kept:
            stages = [self._stage(number, splits=schedule.splits_backward) for number in self.stages.own]
            runtime = torch_schedules._PipelineScheduleRuntime(
                stages, schedule.num_microbatches, loss_fn=lambda output, target: output, scale_grads=False
            )
            order = {
                rank: [torch_schedules._Action.from_str(str(step)) for step in steps]
                for rank, steps in enumerate(schedule.order)
            }
            runtime._prepare_schedule_with_comms(order)
            self._kept[key] = runtime, stages
        runtime, stages = self._kept[key]
        runtime._has_backward = has_backward
        return runtime, stages

    def _stage(self, number: int, *, splits: bool) -> PipelineStage:
        assert self._p2p.group is not None
        root = self._registry.stage_roots.get(number, self._model)
        return PipelineStage(
            self.stages,
            number,
            rank_of=self.plan.rank_of,
            root=root,
            context=self._registry.context,
            group=self._p2p.group,
            splits=splits,
            enters_root=number in self._registry.stage_roots,
        )

    def forget_stages(self) -> None:
        """Drops the stages of all schedules, which hold references to the group."""
        for _, stages in self._kept.values():
            for stage in stages:
                stage.group = None
        self._kept.clear()

    def timeline(self) -> Timeline | None:
        """Returns the timeline of the last timed run on all ranks; None if there was none.

        Communicates: over pp, a gather of the times.
        """
        if self.last_schedule is None or not self.last_run.is_timed:
            return None
        rows: list[list[Span]] = all_gather_objects(self.last_run.spans, self.group)
        start = min(span.start for row in rows for span in row)  # ranks of one machine share a clock
        moved = (tuple(Span(each.action, each.start - start, each.end - start) for each in row) for row in rows)
        return Timeline(self.last_schedule, tuple(moved))


def runner_of(model: nn.Module) -> PipelineRunner | None:
    """Returns the runner of a split model, which may be wrapped; None without pp."""
    root = registry_of(model).model()
    return None if root is None else root.__dict__.get(_ATTRIBUTE)
