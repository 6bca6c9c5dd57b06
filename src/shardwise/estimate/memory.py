"""Bytes that a rank holds in training, from layouts alone; and descriptions of pipeline ranks."""

import itertools
import math
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from shardwise.errors import counted, sized
from shardwise.estimate.cuts import schedule_for
from shardwise.plan.decision import ParameterPlan, SplitPlan
from shardwise.plan.options import Pipeline, Precision
from shardwise.schedule.schedule import Schedule
from shardwise.schedule.timeline import timeline
from shardwise.sharding.boxes import shape_of
from shardwise.sharding.layout import Layout
from shardwise.topology.shape import DATA_AXES


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


@dataclass(frozen=True)
class Card:
    """The memory of a device. `name`: the device, in words."""

    name: str
    num_bytes: int


def states_of(plan: SplitPlan, *, itemsize: int, frozen: Collection[str] = (), coord: int = 0) -> StateBytes:
    """Returns what the first rank at pp coordinate `coord`, which holds most, keeps between steps.

    Args:
        frozen: names of the frozen parameters.
    """
    trained = [planned.layout for name, planned in plan.parameters.items() if name not in frozen]
    kept = [planned.layout for name, planned in plan.parameters.items() if name in frozen]
    return state_bytes(trained, plan.shape.coords(0) | {"pp": coord}, itemsize=itemsize, frozen=kept)


def schedule_of(plan: SplitPlan, num_microbatches: int | None = None) -> Schedule:
    """Returns the schedule of a decided model's stages for this number of microbatches; default: its minimum."""
    assert plan.pipeline is not None
    number = plan.pipeline.num_stages // plan.shape.pp_size
    options = Pipeline(schedule=plan.pipeline.schedule, num_stages_per_rank=number)
    return schedule_for(options, plan.shape, num_microbatches)


def stage_parts(
    plan: SplitPlan, schedule: Schedule, held: Mapping[int, int], *, precision: Precision, frozen: Collection[str] = ()
) -> list[dict[str, int]]:
    """Returns the parts of the bytes that the first rank of every pp coordinate needs in a step, by name.

    Over data axes FSDP2 keeps parameters and gradients of a stage unsharded until the last microbatch.

    Args:
        held: for each stage, the bytes that a microbatch keeps between forward and backward.
    """
    sizes = [_ITEMSIZE[each] for each in (precision.params, precision.compute, precision.reduce)]
    whole = replace(plan, parameters={name: _unsharded(planned) for name, planned in plan.parameters.items()})
    parts = []
    for coord, activations in enumerate(schedule.most_held(held)):
        kept = states_of(plan, itemsize=sizes[0], frozen=frozen, coord=coord)
        found = {"parameters": kept.parameters, "gradients": kept.gradients, "AdamW": kept.optimizer}
        if plan.shape.data_size > 1:
            del found["gradients"]
            found["unsharded parameters"] = states_of(whole, itemsize=sizes[1], frozen=frozen, coord=coord).parameters
            found["unsharded gradients"] = states_of(whole, itemsize=sizes[2], frozen=frozen, coord=coord).gradients
        parts.append(found | {f"activations of {counted(schedule.in_flight[coord], 'microbatch')}": activations})
    return parts


_ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2, "float64": 8}


def _unsharded(planned: ParameterPlan) -> ParameterPlan:
    layout = planned.layout
    steps = tuple(step for step in layout.steps if not set(step.axes) & set(DATA_AXES))
    return replace(planned, layout=replace(layout, steps=steps))


def alike(found: Mapping[int, Hashable]) -> Iterator[tuple[int, int]]:
    """Yields the first and the last number of every run of neighbours whose values are equal."""
    for _, run in itertools.groupby(found.items(), key=lambda item: item[1]):
        numbers = [number for number, _ in run]
        yield numbers[0], numbers[-1]


def stages_named(first: int, last: int) -> str:
    """Returns `"stage 3"` or `"stages 3-7, each:"`."""
    return f"stage {first}" if first == last else f"stages {first}-{last}, each:"


def describe_stages(
    plan: SplitPlan,
    schedule: Schedule,
    *,
    itemsize: int,
    frozen: Collection[str] = (),
    activations: Mapping[int, int] | None = None,
) -> tuple[str, ...]:
    """Returns the descriptions of the stages: one line per pp rank, and one for neighbours that differ in nothing but
    in the microbatches that they hold.

    Args:
        activations: for each stage, the bytes that a microbatch keeps between forward and backward.
    """
    assert plan.pipeline is not None
    waits = timeline(schedule).bubble
    lines = [f"{schedule.title}; if they cost alike, ranks wait {waits:.0%} of the time"]
    sizes = activations or {}
    held, found = schedule.most_held(sizes), {}
    for coord in range(plan.shape.pp_size):
        stages = plan.pipeline.stages_on(coord)
        kept = states_of(plan, itemsize=itemsize, frozen=frozen, coord=coord).total
        size = sum(math.prod(each.shape) for each in plan.parameters.values() if coord in each.stages)
        costs = tuple((len(plan.pipeline.segments(stage)), sizes.get(stage)) for stage in stages)
        found[coord] = f"{size:,} parameters, {sized(kept)} at rest", costs
    for first, last in alike(found):
        counts, totals = (sorted(set(each[first : last + 1])) for each in (schedule.in_flight, held))
        line = f"pp {first}: " if first == last else f"pp {first}-{last}: "
        line += f"{'; '.join(_layers(plan, first, last))}; {found[first][0]}; holds activations of up to "
        line += " to ".join([*map(str, counts[:-1][:1]), counted(counts[-1], "microbatch")])
        lines.append(
            f"{line}: {' to '.join(sized(each) for each in totals[:: max(1, len(totals) - 1)])} in total"
            if activations
            else line
        )
    return tuple(lines)


def _layers(plan: SplitPlan, first: int, last: int) -> Iterator[str]:
    """Yields the stages of the pp coordinates `first` to `last`, each with its number of layers."""
    assert plan.pipeline is not None
    calls = plan.pipeline.order.calls
    for stages in zip(*map(plan.pipeline.stages_on, range(first, last + 1)), strict=True):
        segments = [segment for stage in sorted(stages) for segment in plan.pipeline.segments(stage)]
        number = len(segments) // len(stages)
        named = " to ".join(dict.fromkeys((calls[segments[0]], calls[segments[-1]])))
        yield f"{stages_named(min(stages), max(stages)).removesuffix(':')}: {counted(number, 'layer')}, {named}"
