"""Schedules of a pipeline: what every rank computes, in order, as a printable value, built by name."""

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from itertools import accumulate
from typing import TypeAlias

from shardwise.errors import ConfigError, counted, did_you_mean


class Kind(Enum):
    """Kind of computation. `B` computes `I` and `W` together. Computed separately, `W` can fill idle time."""

    FORWARD = "F"
    BACKWARD = "B"
    BACKWARD_INPUT = "I"
    BACKWARD_WEIGHT = "W"


@dataclass(frozen=True)
class Action:
    """One computation of a stage on a microbatch: `2F0` is the forward of stage 2 on microbatch 0."""

    stage: int
    kind: Kind
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind.value}{self.microbatch}"

    @property
    def parts(self) -> tuple["Action", ...]:
        """The action itself."""
        return (self,)


@dataclass(frozen=True)
class Overlap:
    """A forward and a backward that may overlap computation and communication: `(0F5;3B2)OVERLAP_F_B`.

    torch runs them one after the other, unless a function is registered that overlaps them.
    """

    forward: Action
    backward: Action

    def __str__(self) -> str:
        return f"({self.forward};{self.backward})OVERLAP_F_B"

    @property
    def parts(self) -> tuple[Action, ...]:
        """Both actions, in the order in which torch runs them."""
        return (self.forward, self.backward)


Step: TypeAlias = Action | Overlap


_HELD = {Kind.FORWARD: 1, Kind.BACKWARD: -1, Kind.BACKWARD_INPUT: 0, Kind.BACKWARD_WEIGHT: -1}


@dataclass(frozen=True)
class Schedule:
    """Computations of each rank of a pipeline, in order. A rank starts a step as soon as its input is there.

    `str` shows every rank's steps on a line, in torch's notation. 1F1B on 2 ranks:

        1f1b
        0F0 0F1 0B0 0F2 0B1 0B2
        1F0 1B0 1F1 1B1 1F2 1B2
    """

    name: str
    order: tuple[tuple[Step, ...], ...]

    def __str__(self) -> str:
        return "\n".join([self.name, *(" ".join(map(str, steps)) for steps in self.order)])

    @property
    def title(self) -> str:
        """Its name and sizes, in words."""
        stages = f"{len(self.rank_of)} stages on {self.pp_size} ranks"
        return f"{self.name}: {counted(self.num_microbatches, 'microbatch')} through {stages}"

    @cached_property
    def actions(self) -> tuple[tuple[Action, ...], ...]:
        """Actions of every rank; those of a pair one after the other."""
        return tuple(tuple(action for step in steps for action in step.parts) for steps in self.order)

    @property
    def pp_size(self) -> int:
        """Number of ranks."""
        return len(self.order)

    @property
    def num_microbatches(self) -> int:
        """Number of microbatches."""
        return 1 + max(action.microbatch for action in self.actions[0])

    @cached_property
    def stages(self) -> tuple[tuple[int, ...], ...]:
        """Stages of every rank, in the order in which a microbatch passes them."""
        return tuple(tuple(sorted({action.stage for action in actions})) for actions in self.actions)

    @property
    def rank_of(self) -> dict[int, int]:
        """Rank of each stage, first stage first."""
        return dict(sorted((stage, rank) for rank, stages in enumerate(self.stages) for stage in stages))

    @property
    def splits_backward(self) -> bool:
        """Whether gradients of weights are computed separately from those of inputs."""
        return any(action.kind is Kind.BACKWARD_WEIGHT for actions in self.actions for action in actions)

    @property
    def in_flight(self) -> tuple[int, ...]:
        """Maximum number of activations that every rank holds at once.

        An activation is what a stage keeps of a microbatch from its forward until its backward is complete; with a
        split backward, until the gradients of its weights are computed.
        """
        return self.most_held(dict.fromkeys(self.rank_of, 1))

    def most_held(self, sizes: Mapping[int, int]) -> tuple[int, ...]:
        """Returns the most memory that every rank holds at once, by each stage's size of an activation (default 0)."""
        return tuple(
            max(accumulate(_HELD[action.kind] * sizes.get(action.stage, 0) for action in actions))
            for actions in self.actions
        )


@dataclass(frozen=True)
class Rank:
    """One rank of a pipeline.

    Attributes:
        stages: its stages, in the order in which a microbatch passes them.
    """

    rank: int
    pp_size: int
    num_microbatches: int
    stages: tuple[int, ...]

    @property
    def num_after(self) -> int:
        """Number of ranks after it."""
        return self.pp_size - 1 - self.rank


def gpipe(at: Rank) -> Iterator[Step]:
    """Yields all forwards, then all backwards. Source: GPipe, arXiv 1811.06965."""
    for kind in (Kind.FORWARD, Kind.BACKWARD):
        for microbatch in range(at.num_microbatches):
            yield Action(at.stages[0], kind, microbatch)


def looped_bfs(at: Rank) -> Iterator[Step]:
    """Yields all microbatches through one stage of a rank, then all through its next; backward in reverse.

    Source: Breadth-First Pipeline Parallelism, arXiv 2211.05953.
    """
    forwards = [Action(stage, Kind.FORWARD, i) for stage in at.stages for i in range(at.num_microbatches)]
    yield from forwards
    yield from (Action(forward.stage, Kind.BACKWARD, forward.microbatch) for forward in reversed(forwards))


def one_f_one_b(at: Rank) -> Iterator[Step]:
    """Yields as many forwards as there are ranks after it, then alternating forwards and backwards.

    Source: PipeDream-Flush, in arXiv 2104.04473, section 2.2.
    """
    return _alternate(at, Kind.BACKWARD, num_ahead=at.num_after)


def interleaved_1f1b(at: Rank) -> Iterator[Step]:
    """Yields 1F1B with several stages per rank: a round of microbatches through one, then through the next.

    Source: arXiv 2104.04473, section 2.2; here a round may have more than `pp_size` microbatches.
    """
    return _alternate(at, Kind.BACKWARD, num_ahead=_num_before_last_stage(at) + 2 * at.num_after)


def interleaved_zero_bubble(at: Rank) -> Iterator[Step]:
    """Yields interleaved 1F1B with a split backward: the gradients of weights are delayed by `at.rank` backwards.

    Source: ZB-H1 in arXiv 2401.10241, with several stages per rank.
    """
    due: list[Action] = []
    for action in _alternate(at, Kind.BACKWARD_INPUT, num_ahead=_num_before_last_stage(at) + at.num_after):
        yield action
        if action.kind is Kind.BACKWARD_INPUT:
            due.append(Action(action.stage, Kind.BACKWARD_WEIGHT, action.microbatch))
            if len(due) > at.rank:
                yield due.pop(0)
    yield from due


def zbv(at: Rank) -> Iterator[Step]:
    """Yields ZBV: stages form a V, and after the warm-up a rank never waits if F, I and W take equally long.

    Source: ZB-V in arXiv 2401.10241, section 6.
    """
    rank, size, after = at.rank, at.pp_size, at.num_after
    num_planned = max(2 * size - 1, at.num_microbatches)  # as many as fill the pipeline; then the excess is left out
    program = (
        (2 * after + 1, "Fd"),
        (rank, "Fu Fd"),
        (after + 1, "Fu Iu Wu"),
        (num_planned - size - after, "Fd Id Wd Fu Iu Wu"),
        (after, "Id Wd Fu Iu Wu"),
        (rank, "Id Iu"),
        (after + 1, "Id Wd"),
        (rank, "Wu"),
        (rank, "Wd"),
    )
    return (step for step in _run(at, program) if step.parts[0].microbatch < at.num_microbatches)


def dualpipev(at: Rank) -> Iterator[Step]:
    """Yields DualPipeV: stages form a V, and each forward in the middle is paired with a backward of the rank's other
    stage.

    Source: DualPipe of DeepSeek-V3, arXiv 2412.19437, cut in half. DualPipe's ranks hold two copies of their stages and
    feed microbatches from both ends; one half works alone (Sea AI Lab, "Cut-in-half").
    """
    rank, after = at.rank, at.num_after
    half, odd = divmod(rank + 1, 2)
    alone = int(after == 0)  # the last rank's first two: as a pair they would only wait longer
    program = (
        (2 * after, "Fd"),
        (rank + 1, "Fd Fu"),
        (after, "Iu W Fu"),
        (alone, "Fd Bu Fu+Bd"),
        (at.num_microbatches - at.pp_size - after - alone, "Fd+Bu Fu+Bd"),
        (after, "Bu Fu+Bd"),
        (half, "Bu Bd"),
        (odd, "Bu Id"),
        (half, "Iu Id"),
        (after, "W Id"),
        (rank + 1, "W"),
    )
    return _run(at, program)


def num_rounds(pp_size: int, num_microbatches: int) -> int:
    """Returns the number of rounds of interleaved schedules: rounds of `pp_size` microbatches or more, or one."""
    return max(1, num_microbatches // pp_size)


def _num_before_last_stage(at: Rank) -> int:
    """Forwards of a rank before the first round reaches its last stage."""
    return (len(at.stages) - 1) * (at.num_microbatches // num_rounds(at.pp_size, at.num_microbatches))


def _alternate(at: Rank, backward: Kind, *, num_ahead: int) -> Iterator[Action]:
    """Yields `num_ahead` forwards, then alternating forwards and backwards, then the remaining backwards."""
    microbatches = range(at.num_microbatches)
    size = at.num_microbatches // num_rounds(at.pp_size, at.num_microbatches)
    rounds = [microbatches[first : first + size] for first in microbatches[::size]]
    forwards = [Action(stage, Kind.FORWARD, i) for members in rounds for stage in at.stages for i in members]
    backwards = (Action(stage, backward, i) for members in rounds for stage in reversed(at.stages) for i in members)
    yield from forwards[:num_ahead]
    for forward in forwards[num_ahead:]:
        yield forward
        yield next(backwards)
    yield from backwards


def _run(at: Rank, program: Sequence[tuple[int, str]]) -> Iterator[Step]:
    """Yields the steps of a program for a V: pairs of a count and an operation, each on the next microbatch.

    `Fd` is a forward of the stage on the way down, `Fu+Bd` a pair, `Wu` the oldest pending gradients of weights of the
    stage on the way up, `W` those of either stage.
    """
    stages = dict(zip("du", at.stages, strict=True))
    counts: defaultdict[tuple[str, bool], Iterator[int]] = defaultdict(itertools.count)
    due: list[Action] = []

    def take(word: str) -> Action:
        kind, leg = Kind(word[0]), word[1:]
        if kind is Kind.BACKWARD_WEIGHT:
            return due.pop(next(i for i, action in enumerate(due) if not leg or action.stage == stages[leg]))
        action = Action(stages[leg], kind, next(counts[leg, kind is Kind.FORWARD]))
        if kind is Kind.BACKWARD_INPUT:
            due.append(Action(action.stage, Kind.BACKWARD_WEIGHT, action.microbatch))
        return action

    for word in itertools.chain.from_iterable(times * words.split() for times, words in program):
        actions = [take(part) for part in word.split("+")]
        yield Overlap(*actions) if len(actions) == 2 else actions[0]


@dataclass(frozen=True, kw_only=True)
class _Family:
    """The schedules of one name, and the sizes they support.

    Attributes:
        most_stages: maximum stages per rank; None: no limit.
        is_v: whether stages return in reverse rank order; else they start again at the first rank.
        needs_full: whether there must be at least one microbatch per stage.
        needs_rounds: whether the microbatches must form rounds of equal size.
    """

    order: Callable[[Rank], Iterable[Step]]
    fewest_stages: int = 1
    most_stages: int | None = None
    is_v: bool = False
    needs_full: bool = False
    needs_rounds: bool = False


_FAMILIES = {
    "gpipe": _Family(order=gpipe, most_stages=1),
    "1f1b": _Family(order=one_f_one_b, most_stages=1, needs_full=True),
    "interleaved_1f1b": _Family(order=interleaved_1f1b, fewest_stages=2, needs_rounds=True),
    "looped_bfs": _Family(order=looped_bfs, fewest_stages=2),
    "interleaved_zero_bubble": _Family(order=interleaved_zero_bubble, needs_rounds=True),
    "zbv": _Family(order=zbv, fewest_stages=2, most_stages=2, is_v=True),
    "dualpipev": _Family(order=dualpipev, fewest_stages=2, most_stages=2, is_v=True, needs_full=True),
}

SCHEDULES = tuple(_FAMILIES)  # the names of all schedules


def build_schedule(
    name: str, *, pp_size: int, num_microbatches: int, num_stages_per_rank: int | None = None
) -> Schedule:
    """Returns the schedule called `name`.

    Args:
        num_stages_per_rank: default: the minimum of the schedule.
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
        return tuple(family.order(Rank(rank, pp_size, num_microbatches, stages)))

    return Schedule(name, tuple(map(steps, range(pp_size))))


def build_in_order(rank_of: Sequence[int], num_microbatches: int) -> Schedule:
    """Builds a schedule that sends all microbatches through one stage, then through the next, and backward in reverse.

    It takes any number of microbatches and any placement of stages. Forwards alone need no better order.
    """
    pp_size = max(rank_of) + 1

    def steps(rank: int) -> tuple[Step, ...]:
        stages = tuple(stage for stage, holder in enumerate(rank_of) if holder == rank)
        return tuple(looped_bfs(Rank(rank, pp_size, num_microbatches, stages)))

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
    if family.needs_rounds and num_microbatches % num_rounds(pp_size, num_microbatches):
        rounds = num_rounds(pp_size, num_microbatches)
        around = (num_microbatches // pp_size * pp_size, -(-num_microbatches // pp_size) * pp_size)
        yield (
            f"its microbatches go in {rounds} rounds, into which {num_microbatches} cannot be divided",
            f"use num_microbatches={around[0]} or {around[1]}, multiples of pp_size",
        )
