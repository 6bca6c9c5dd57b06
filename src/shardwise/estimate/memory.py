"""Bytes that a rank holds while it trains, from layouts alone; and what each rank of a pipeline holds, in words."""

from __future__ import annotations

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

__all__ = ["ActivationBytes", "StateBytes", "describe_stages", "mib", "schedule_of", "state_bytes"]


@dataclass(frozen=True, kw_only=True)
class StateBytes:
    """What one rank keeps from step to step, in bytes."""

    parameters: int
    gradients: int
    optimizer: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.parameters + self.gradients + self.optimizer


@dataclass(frozen=True, kw_only=True)
class ActivationBytes:
    """What one rank keeps besides parameters, gradients and optimizer states at rest.

    Attributes:
        activations: what autograd saved, and what selective recomputation keeps.
        gathered: parameters that stay gathered, or cast, until backward.
    """

    activations: int
    gathered: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.activations + self.gathered


def state_bytes(
    layouts: Iterable[Layout],
    coords: Mapping[str, int],
    *,
    itemsize: int = 4,
    frozen: Iterable[Layout] = (),
) -> StateBytes:
    """The bytes of the rank at `coords` under Adam, which keeps two numbers for each that it trains.

    Args:
        layouts: of every parameter that is trained, tied ones once.
        itemsize: bytes of an element of parameters, gradients and states.
        frozen: of the others, which have neither gradients nor states.
    """

    def held(given: Iterable[Layout]) -> int:
        return sum(math.prod(shape_of(piece.local)) for layout in given for piece in layout.pieces(coords)) * itemsize

    trained = held(layouts)
    return StateBytes(parameters=trained + held(frozen), gradients=trained, optimizer=2 * trained)


def mib(nbytes: int) -> str:
    """A number of bytes in words."""
    return f"{nbytes / 2**20:,.1f} MiB"


def schedule_of(plan: SplitPlan, num_microbatches: int | None = None) -> Schedule:
    """The schedule by which a decided model's stages train on so many microbatches, by default the fewest it takes.

    Raises:
        ConfigError: it does not take them.
    """
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
    """The stages in words, a line for each rank of pp.

    Args:
        frozen: names of the parameters that are not trained.
        itemsize: bytes of an element of parameters, gradients and AdamW's states.
        activations: of each stage, the bytes that a microbatch keeps between its forward and its backward.
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
