"""Bytes that a rank holds in training, from layouts alone; and descriptions of pipeline ranks."""

import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

from shardwise.errors import counted
from shardwise.estimate.cuts import schedule_for
from shardwise.plan.decision import SplitPlan
from shardwise.plan.options import Pipeline
from shardwise.schedule.schedule import Schedule
from shardwise.schedule.timeline import timeline
from shardwise.sharding.boxes import shape_of
from shardwise.sharding.layout import Layout


@dataclass(frozen=True, kw_only=True)
class StateBytes:
    """Bytes that one rank keeps between steps."""

    parameters: int
    gradients: int
    optimizer: int

    @property
    def total(self) -> int:
        """Sum of all bytes."""
        return self.parameters + self.gradients + self.optimizer


@dataclass(frozen=True, kw_only=True)
class ActivationBytes:
    """Bytes that one rank keeps besides stored parameters, gradients and optimizer states.

    Attributes:
        activations: tensors saved by autograd and kept by selective recomputation.
        gathered: parameters that stay gathered, or cast, until backward.
    """

    activations: int
    gathered: int

    @property
    def total(self) -> int:
        """Sum of all bytes."""
        return self.activations + self.gathered


def state_bytes(
    layouts: Iterable[Layout], coords: Mapping[str, int], *, itemsize: int = 4, frozen: Iterable[Layout] = ()
) -> StateBytes:
    """Computes the bytes that the rank at `coords` keeps between steps with Adam, which has two states per trained
    element.

    Args:
        layouts: layouts of the trained parameters, tied ones once.
        itemsize: bytes per element of parameters, gradients and states.
        frozen: layouts of the frozen parameters, which have neither gradients nor states.
    """

    def held(given: Iterable[Layout]) -> int:
        return sum(math.prod(shape_of(piece.local)) for layout in given for piece in layout.pieces(coords)) * itemsize

    trained = held(layouts)
    return StateBytes(parameters=trained + held(frozen), gradients=trained, optimizer=2 * trained)


def mib(nbytes: int) -> str:
    """Returns a number of bytes in words."""
    return f"{nbytes / 2**20:,.1f} MiB"


def schedule_of(plan: SplitPlan, num_microbatches: int | None = None) -> Schedule:
    """Returns the schedule of a decided model's stages for this number of microbatches; default: its minimum."""
    assert plan.pipeline is not None
    number = plan.pipeline.num_stages // plan.shape.pp_size
    options = Pipeline(schedule=plan.pipeline.schedule, num_stages_per_rank=number)
    return schedule_for(options, plan.shape, num_microbatches)


def describe_stages(
    plan: SplitPlan,
    schedule: Schedule,
    *,
    itemsize: int,
    frozen: Collection[str] = (),
    activations: Mapping[int, int] | None = None,
) -> tuple[str, ...]:
    """Returns the descriptions of the stages, one line per pp rank.

    Args:
        activations: for each stage, the bytes that a microbatch keeps between forward and backward.
    """
    assert plan.pipeline is not None
    waits = timeline(schedule).bubble
    lines = [f"{schedule.title}; if they cost alike, ranks wait {waits:.0%} of the time"]
    trained = [planned.layout for name, planned in plan.parameters.items() if name not in frozen]
    kept_frozen = [planned.layout for name, planned in plan.parameters.items() if name in frozen]
    held = schedule.most_held(activations or {})
    for coord, count in enumerate(schedule.in_flight):
        stages = plan.pipeline.stages_on(coord)
        coords = plan.shape.coords(0) | {"pp": coord}
        kept = state_bytes(trained, coords, itemsize=itemsize, frozen=kept_frozen).total
        size = sum(math.prod(each.shape) for each in plan.parameters.values() if coord in each.stages)
        line = f"pp {coord}: {'; '.join(_layers(plan, stages))}; {size:,} parameters, {mib(kept)} at rest; "
        line += f"holds activations of up to {counted(count, 'microbatch')}"
        lines.append(f"{line}: {mib(held[coord])} in total" if activations else line)
    return tuple(lines)


def _layers(plan: SplitPlan, stages: tuple[int, ...]) -> Iterator[str]:
    assert plan.pipeline is not None
    for stage in stages:
        calls = plan.pipeline.order.calls
        segments = plan.pipeline.segments(stage)
        first, last = calls[segments[0]], calls[segments[-1]]
        named = first if len(segments) == 1 else f"{first} to {last}"
        yield f"stage {stage}: {counted(len(segments), 'layer')}, {named}"
