"""What each rank of a pipeline holds: its stages' layers and parameters, bytes at rest, activations in flight."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping

from shardwise.errors import counted
from shardwise.estimate.cuts import schedule_for
from shardwise.estimate.memory import mib, state_bytes
from shardwise.plan.decision import SplitPlan
from shardwise.plan.options import Pipeline
from shardwise.schedule.schedule import Schedule
from shardwise.schedule.timeline import timeline

__all__ = ["describe_stages", "schedule_of"]


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
        stages = plan.pipeline.stages_of(coord)
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
