"""Cuts a model into pipeline stages: as the user says, or into stages of equal cost.

# [Note: the cost of a stage]
A stage costs the parameters that it multiplies with, once per run of a layer (the time per token), plus the parameters
that it holds, each once (memory, and the optimizer's time). Of experts, a token is multiplied with those that its
router chooses, but all are held. So a head costs twice as much as the embedding, whose rows are looked up. All numbers
are integers, so every rank finds the same cuts.
"""

import contextlib
import functools
import itertools
import math
from collections.abc import Callable, Sequence

from shardwise.errors import ConfigError, counted
from shardwise.plan.options import Pipeline, Recompute
from shardwise.plan.pipeline_plan import LayerOrder, PipelinePlan
from shardwise.plan.structure import ModelFacts, parent_of, upwards
from shardwise.schedule.schedule import Schedule, build_schedule
from shardwise.topology.shape import MeshShape

Cost = Callable[[int, int], int]  # what a stage costs that begins with one segment and ends before another


def check_pipeline(pipeline: Pipeline, shape: MeshShape, recompute: Recompute) -> None:
    """Raises `ConfigError` if the options are invalid for every model on this shape."""
    if shape.pp_size == 1:
        build_schedule(pipeline.schedule, pp_size=1, num_microbatches=2)
        if pipeline.layers is not None or pipeline.num_stages_per_rank not in (None, 1):
            raise ConfigError(
                f"the layout {shape} has no pipeline to cut",
                why=f"pp_size is 1, and {pipeline} says where stages begin",
                fix='give the layout a pp axis, such as "pp2", or leave out layers and num_stages_per_rank',
            )
        return
    schedule = smallest_schedule(pipeline, shape.pp_size)
    if schedule.splits_backward and recompute.mode != "none":
        raise ConfigError(
            f"recomputation ({recompute.mode}) with the schedule {pipeline.schedule}",
            why="it splits the backward in two, and a block would be computed again for each of its weights",
            fix='use the schedule "1f1b" or "interleaved_1f1b", or Recompute(mode="none")',
        )


def smallest_schedule(pipeline: Pipeline, pp_size: int) -> Schedule:
    """Returns the schedule with its minimum number of microbatches, which does not change the ranks of stages."""
    number = pipeline.num_stages_per_rank
    if pipeline.layers is not None:
        wanted, num_stages = number, len(pipeline.layers)
        number = num_stages // pp_size
        if num_stages != pp_size * (wanted or number):
            raise ConfigError(
                f"Pipeline layers {pipeline.layers} makes {counted(num_stages, 'stage')}",
                why=f"each of {pp_size} ranks along pp holds {wanted or 'equally many'}",
                fix="give one number for each stage",
            )
    return build_schedule(
        pipeline.schedule, pp_size=pp_size, num_microbatches=2 * pp_size * (number or 2), num_stages_per_rank=number
    )


def fewest_microbatches(pipeline: Pipeline, shape: MeshShape) -> int:
    """Returns the schedule's minimum number of microbatches, at least one per pp rank; 1 without a pipeline."""
    if shape.pp_size == 1:
        return 1
    smallest_schedule(pipeline, shape.pp_size)  # raises where no number would do
    for count in itertools.count(shape.pp_size):
        with contextlib.suppress(ConfigError):
            schedule_for(pipeline, shape, count)
            break
    return count


def schedule_for(pipeline: Pipeline, shape: MeshShape, num_microbatches: int | None = None) -> Schedule:
    """Returns the schedule for this number of microbatches; default: its minimum."""
    return build_schedule(
        pipeline.schedule,
        pp_size=shape.pp_size,
        num_microbatches=fewest_microbatches(pipeline, shape) if num_microbatches is None else num_microbatches,
        num_stages_per_rank=len(smallest_schedule(pipeline, shape.pp_size).rank_of) // shape.pp_size,
    )


def check_layers(pipeline: Pipeline, num_segments: int, *, pp_size: int) -> None:
    """Raises `ConfigError` if a model with this many segments has too few for its stages, or `layers` does not fit."""
    num_stages = len(smallest_schedule(pipeline, pp_size).rank_of)
    if num_stages > num_segments:
        raise ConfigError(
            f"{num_stages} stages for a model that runs {counted(num_segments, 'layer')}",
            at="pipeline",
            why=f"{pp_size} ranks along pp with {num_stages // pp_size} stages each; every stage runs a layer or more",
            fix=f"use a pp_size of at most {num_segments * pp_size // num_stages}, or fewer stages a rank",
        )
    if pipeline.layers is not None:
        _given_starts(pipeline.layers, num_segments)


def cut(order: LayerOrder, facts: ModelFacts, pipeline: Pipeline, *, pp_size: int) -> PipelinePlan:
    """Cuts the model with these facts into stages."""
    rank_of = tuple(smallest_schedule(pipeline, pp_size).rank_of.values())
    num_stages, num_segments = len(rank_of), len(order.calls)
    check_layers(pipeline, num_segments, pp_size=pp_size)
    if pipeline.layers is None:
        starts = balance(_cost(order, facts), num_segments, num_stages)
    else:
        starts = _given_starts(pipeline.layers, num_segments)
    return PipelinePlan(order=order, schedule=pipeline.schedule, starts=starts, rank_of=rank_of)


def balance(cost: Cost, num_segments: int, num_stages: int) -> tuple[int, ...]:
    """Returns the first segments of the stages that minimize the cost of the most expensive stage.

    Among equal cuts it takes the one with fewest layers in front, where most microbatches are in flight.
    """

    @functools.cache
    def best(start: int, left: int) -> tuple[float, tuple[int, ...]]:
        """Returns the least cost of the most expensive of `left` stages from `start` on, and their first segments."""
        if left == 1:
            return cost(start, num_segments), (start,)
        cuts = ((end, *best(end, left - 1)) for end in range(start + 1, num_segments - left + 2))
        return min((max(cost(start, end), worst), (start, *starts)) for end, worst, starts in cuts)

    return best(0, num_stages)[1]


def _cost(order: LayerOrder, facts: ModelFacts) -> Cost:
    """See [Note: the cost of a stage]."""
    num_segments = len(order.calls)
    of_segment = [0] * num_segments
    users: dict[str, set[int]] = {}
    sizes: dict[str, int] = {}
    for fqn, module, _, shape in facts.parameters():
        name, size = facts.tied.get(fqn, fqn), math.prod(shape)
        sizes[name] = size
        num_chosen, num_experts = experts_of(facts, module, shape)
        for segment in order.uses.get(fqn, ()):
            users.setdefault(name, set()).add(segment)
            # A table of rows is looked up where the model begins, and may be what logits are made with where it ends.
            is_looked_up = facts.modules[module].kind == "embedding" and segment < max(1, num_segments - 1)
            of_segment[segment] += size * num_chosen // num_experts if len(shape) > 1 and not is_looked_up else 0
    shared = {name: segments for name, segments in users.items() if len(segments) > 1}
    for name in users.keys() - shared:
        of_segment[min(users[name])] += sizes[name]
    sums = list(itertools.accumulate(of_segment, initial=0))

    def cost(start: int, end: int) -> int:
        inside = range(start, end)
        held = (sizes[name] for name, segments in shared.items() if not segments.isdisjoint(inside))
        return sums[end] - sums[start] + sum(held)

    return cost


_CHOSEN = ("top_k", "num_experts_per_tok", "k")
"""Integers of a router or of the experts, or of their config, that count the experts of a token, as the field calls
them; values decide."""


def experts_of(facts: ModelFacts, module: str, shape: Sequence[int]) -> tuple[int, int]:
    """Returns the number of experts that process each token, and the number of all experts, for a parameter of experts.

    Returns (1, 1) for other parameters. Parameters may belong to one expert or stack all experts.
    """
    around = [name for name in upwards(module) if name in facts.modules]
    lists = [name for name in around if facts.modules[name].kind == "list"]
    if len(shape) == 3:  # all experts as one parameter
        number, near = shape[0], around[:2]
    elif lists:
        number, near = len(facts.children.get(lists[0], ())), [parent_of(lists[0])]
    else:
        return 1, 1
    for name in near:
        beside = [name, *facts.children.get(name, ())]  # a router, for one
        for each in beside if name in facts.modules else ():
            found = facts.modules[each].attributes
            for count in (found.get(key) or found.get(f"config.{key}") for key in _CHOSEN):
                if count is not None and count < number:
                    return count, number
    return 1, 1


def _given_starts(layers: tuple[int, ...], num_segments: int) -> tuple[int, ...]:
    """Returns the first segment of every stage, from the first layers or from the numbers of layers."""
    ends = (*layers[1:], num_segments)
    if layers[0] == 0:
        starts, why = layers, f"0 comes first, so these are first layers, ascending, of {num_segments}"
        is_wrong = any(after <= before for before, after in zip(layers, ends, strict=True))
    else:
        starts = (0, *itertools.accumulate(layers[:-1]))
        why = f"they do not begin with 0, so they are numbers of layers: {sum(layers)} together, of {num_segments}"
        is_wrong = 0 in layers or sum(layers) != num_segments
    if is_wrong:
        raise ConfigError(
            f"Pipeline layers {layers} do not fit a model that runs {counted(num_segments, 'layer')}",
            at="pipeline",
            why=why,
            fix="give the first layer of every stage, beginning with 0, or numbers of layers that add up",
        )
    return starts
