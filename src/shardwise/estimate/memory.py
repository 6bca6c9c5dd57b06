"""Bytes that a rank holds in training, from layouts alone; and descriptions of pipeline ranks."""

import itertools
import math
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from shardwise.errors import counted, sized
from shardwise.estimate.cuts import schedule_for
from shardwise.plan.decision import SplitPlan
from shardwise.plan.options import Pipeline
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


def states_of(
    plan: SplitPlan, coord: int, frozen: Collection[str], *, itemsize: int, is_sharded: bool = True
) -> StateBytes:
    """Returns what the first rank at a pp coordinate keeps between steps; or would if the data axes sharded nothing."""
    layouts: dict[bool, list[Layout]] = {True: [], False: []}
    for name, planned in plan.parameters.items():
        steps = [each for each in planned.layout.steps if is_sharded or not {*each.axes} & {*DATA_AXES}]
        layouts[name in frozen].append(Layout(planned.shape, tuple(steps)))
    return state_bytes(layouts[False], plan.shape.coords(0) | {"pp": coord}, itemsize=itemsize, frozen=layouts[True])


def schedule_of(plan: SplitPlan, num_microbatches: int | None = None) -> Schedule:
    """Returns the schedule of a decided model's stages for this number of microbatches; default: its minimum."""
    assert plan.pipeline is not None
    number = plan.pipeline.num_stages // plan.shape.pp_size
    options = Pipeline(schedule=plan.pipeline.schedule, num_stages_per_rank=number)
    return schedule_for(options, plan.shape, num_microbatches)


def alike(keys: Mapping[int, Hashable]) -> Iterator[tuple[str, int]]:
    """Yields `"stage 3"` or `"stages 3-7, each:"` and the first number for every run of stages whose keys are equal."""
    for _, run in itertools.groupby(keys, key=keys.__getitem__):
        numbers = [*run]
        yield _named("stage", numbers), numbers[0]


def _named(noun: str, numbers: Sequence[int]) -> str:
    return f"{noun} {numbers[0]}" if len(numbers) == 1 else f"{noun}s {min(numbers)}-{max(numbers)}, each:"


def describe_stages(
    plan: SplitPlan, schedule: Schedule, kept: Sequence[StateBytes], activations: Mapping[int, int]
) -> tuple[str, ...]:
    """Returns the descriptions of the stages: one line per pp rank, and one for neighbours that differ in nothing but
    in the microbatches that they hold.

    Args:
        kept: for each pp coordinate, what its first rank keeps between steps.
        activations: for each stage, the bytes that a microbatch keeps between forward and backward; may be empty.
    """
    assert plan.pipeline is not None
    waits, held = timeline(schedule).bubble, schedule.most_held(activations)
    lines = [f"{schedule.title}; if they cost alike, ranks wait {waits:.0%} of the time"]

    def facts(coord: int) -> tuple[str, object]:
        size = sum(math.prod(each.shape) for each in plan.parameters.values() if coord in each.stages)
        stages = schedule.stages[coord]
        costs = [(len(plan.pipeline.segments(stage)), activations.get(stage)) for stage in stages]  # type: ignore[union-attr]
        return f"{size:,} parameters, {sized(kept[coord].total)} at rest", costs

    for (size, _), run in itertools.groupby(range(plan.shape.pp_size), key=facts):
        coords = [*run]
        counts, totals = (sorted({each[coord] for coord in coords}) for each in (schedule.in_flight, held))
        line = f"pp {'-'.join(map(str, dict.fromkeys((coords[0], coords[-1]))))}: {'; '.join(_layers(plan, coords))}; "
        least = f"{counts[0]}-" if len(counts) > 1 else ""
        line += f"{size}; holds activations of up to {least}{counted(counts[-1], 'microbatch')}"
        if activations:
            line += f": {' to '.join(dict.fromkeys(map(sized, (totals[0], totals[-1]))))} in total"
        lines.append(line)
    return tuple(lines)


def _layers(plan: SplitPlan, coords: Sequence[int]) -> Iterator[str]:
    """Yields the stages of these pp coordinates, each with its number of layers."""
    assert plan.pipeline is not None
    calls = plan.pipeline.order.calls
    for stages in zip(*map(plan.pipeline.stages_on, coords), strict=True):
        segments = [segment for stage in sorted(stages) for segment in plan.pipeline.segments(stage)]
        named = " to ".join(dict.fromkeys((calls[segments[0]], calls[segments[-1]])))
        number = counted(len(segments) // len(stages), "layer")
        yield f"{_named('stage', stages).removesuffix(':')}: {number}, {named}"
