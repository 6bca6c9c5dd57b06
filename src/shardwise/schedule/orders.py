"""Order of one rank's computations in each schedule; equal to torch's own, which `tests/schedule` checks."""

import itertools
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from shardwise.schedule.schedule import Action, Kind, Overlap, Step


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
    """All forwards, then all backwards. Source: GPipe, arXiv 1811.06965."""
    for kind in (Kind.FORWARD, Kind.BACKWARD):
        for microbatch in range(at.num_microbatches):
            yield Action(at.stages[0], kind, microbatch)


def looped_bfs(at: Rank) -> Iterator[Step]:
    """All microbatches through one stage, then all through the rank's next one, and backward in reverse.

    Source: Breadth-First Pipeline Parallelism, arXiv 2211.05953.
    """
    forwards = [Action(stage, Kind.FORWARD, i) for stage in at.stages for i in range(at.num_microbatches)]
    yield from forwards
    yield from (Action(forward.stage, Kind.BACKWARD, forward.microbatch) for forward in reversed(forwards))


def one_f_one_b(at: Rank) -> Iterator[Step]:
    """As many forwards as there are ranks after it, then alternating forwards and backwards.

    Source: PipeDream-Flush, in arXiv 2104.04473, section 2.2.
    """
    return _alternate(at, Kind.BACKWARD, num_ahead=at.num_after)


def interleaved_1f1b(at: Rank) -> Iterator[Step]:
    """1F1B with several stages per rank: a round of microbatches through one, then through the next.

    Source: arXiv 2104.04473, section 2.2; here a round may have more than `pp_size` microbatches.
    """
    return _alternate(at, Kind.BACKWARD, num_ahead=_num_before_last_stage(at) + 2 * at.num_after)


def interleaved_zero_bubble(at: Rank) -> Iterator[Step]:
    """Interleaved 1F1B with a split backward: the gradients of weights are delayed by `at.rank` backwards.

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
    """Stages form a V. After the warm-up a rank never waits if F, I and W take equally long.

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
    """Stages form a V, and each forward in the middle is paired with a backward of the rank's other stage.

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
    """Number of rounds of interleaved schedules: rounds of `pp_size` microbatches or more, or a single one."""
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
