"""`build_schedule`: schedules by name, and the sizes that each of them supports."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from shardwise.errors import ConfigError, did_you_mean
from shardwise.schedule import orders
from shardwise.schedule.schedule import Schedule, Step


@dataclass(frozen=True, kw_only=True)
class _Family:
    """The schedules of one name, and the sizes they support.

    Attributes:
        fewest_stages: minimum stages per rank.
        most_stages: maximum stages per rank; None: no limit.
        is_v: whether stages return in reverse rank order; else they start again at the first rank.
        needs_full: whether there must be at least one microbatch per stage.
        needs_rounds: whether the microbatches must form rounds of equal size.
    """

    order: Callable[[orders.Rank], Iterable[Step]]
    fewest_stages: int = 1
    most_stages: int | None = None
    is_v: bool = False
    needs_full: bool = False
    needs_rounds: bool = False


_FAMILIES = {
    "gpipe": _Family(order=orders.gpipe, most_stages=1),
    "1f1b": _Family(order=orders.one_f_one_b, most_stages=1, needs_full=True),
    "interleaved_1f1b": _Family(order=orders.interleaved_1f1b, fewest_stages=2, needs_rounds=True),
    "looped_bfs": _Family(order=orders.looped_bfs, fewest_stages=2),
    "interleaved_zero_bubble": _Family(order=orders.interleaved_zero_bubble, needs_rounds=True),
    "zbv": _Family(order=orders.zbv, fewest_stages=2, most_stages=2, is_v=True),
    "dualpipev": _Family(order=orders.dualpipev, fewest_stages=2, most_stages=2, is_v=True, needs_full=True),
}

SCHEDULES = tuple(_FAMILIES)
"""The names of all schedules."""


def build_schedule(
    name: str, *, pp_size: int, num_microbatches: int, num_stages_per_rank: int | None = None
) -> Schedule:
    """The schedule called `name`.

    Args:
        num_stages_per_rank: default: the minimum of the schedule.

    Raises:
        ConfigError: there is no such schedule, or it does not support these sizes. Reports all problems at once.
    """
    family = _FAMILIES.get(name)
    if family is None:
        guess = did_you_mean(name, SCHEDULES)
        raise ConfigError(f"unknown pipeline schedule {name!r}{guess}", fix=f"use one of {', '.join(SCHEDULES)}")
    num_stages = family.fewest_stages if num_stages_per_rank is None else num_stages_per_rank
    if problems := list(_problems(family, pp_size, num_microbatches, num_stages)):
        why, fix = ("\n".join(lines) for lines in zip(*problems, strict=True))
        asked = f"pp_size={pp_size}, num_microbatches={num_microbatches}, num_stages_per_rank={num_stages}"
        raise ConfigError(f"there is no {name} schedule for {asked}", why=why, fix=fix)

    def steps(rank: int) -> tuple[Step, ...]:
        stages = (rank, 2 * pp_size - 1 - rank) if family.is_v else tuple(range(rank, pp_size * num_stages, pp_size))
        return tuple(family.order(orders.Rank(rank, pp_size, num_microbatches, stages)))

    return Schedule(name, tuple(map(steps, range(pp_size))))


def build_in_order(rank_of: Sequence[int], num_microbatches: int) -> Schedule:
    """Builds a schedule that sends all microbatches through one stage, then through the next, and backward in reverse.

    It takes any number of microbatches and any placement of stages. Forwards alone need no better order.
    """
    pp_size = max(rank_of) + 1

    def steps(rank: int) -> tuple[Step, ...]:
        stages = tuple(stage for stage, holder in enumerate(rank_of) if holder == rank)
        return tuple(orders.looped_bfs(orders.Rank(rank, pp_size, num_microbatches, stages)))

    return Schedule("in_order", tuple(map(steps, range(pp_size))))


def _problems(family: _Family, pp_size: int, num_microbatches: int, num_stages: int) -> Iterator[tuple[str, str]]:
    """Yields the reasons why there is no such schedule, each with its remedy."""
    sizes = {"pp_size": pp_size, "num_microbatches": num_microbatches, "num_stages_per_rank": num_stages}
    if wrong := [size for size, count in sizes.items() if type(count) is not int or count < 1]:
        yield f"no positive integer: {', '.join(wrong)}", "give counts of at least 1"
        return
    taken = max(family.fewest_stages, min(num_stages, family.most_stages or num_stages))
    if num_stages != taken:
        exactly = "exactly" if family.most_stages else "at least"
        yield f"stages on every rank: {exactly} {taken}, not {num_stages}", f"use num_stages_per_rank={taken}"
    if family.needs_full and num_microbatches < pp_size * taken:
        fewest = f"{pp_size} x {taken} = {pp_size * taken}"
        yield f"it needs a microbatch for each of {fewest} stages", f"use num_microbatches={pp_size * taken} or more"
    if family.needs_rounds and num_microbatches % orders.num_rounds(pp_size, num_microbatches):
        rounds = orders.num_rounds(pp_size, num_microbatches)
        around = (num_microbatches // pp_size * pp_size, -(-num_microbatches // pp_size) * pp_size)
        yield (
            f"its microbatches go in {rounds} rounds, into which {num_microbatches} cannot be divided",
            f"use num_microbatches={around[0]} or {around[1]}, multiples of pp_size",
        )
