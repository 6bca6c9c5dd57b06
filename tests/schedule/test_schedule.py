"""Schedules as values: what they contain, how they print, what they hold, which numbers they take."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.errors import ConfigError
from shardwise.schedule.schedule import SCHEDULES, Action, Kind, Overlap, build_schedule
from tests.schedule.strategies import schedules

pytestmark = pytest.mark.pure


def test_steps_are_written_as_torch_writes_them():
    kinds = {"2F0": Kind.FORWARD, "2B0": Kind.BACKWARD, "2I0": Kind.BACKWARD_INPUT, "2W0": Kind.BACKWARD_WEIGHT}
    assert [str(Action(2, kind, 0)) for kind in kinds.values()] == list(kinds)
    pair = Overlap(Action(0, Kind.FORWARD, 5), Action(3, Kind.BACKWARD, 2))
    assert str(pair) == "(0F5;3B2)OVERLAP_F_B"


def test_a_schedule_in_print():
    schedule = build_schedule("1f1b", pp_size=2, num_microbatches=3)
    assert str(schedule) == "1f1b\n0F0 0F1 0B0 0F2 0B1 0B2\n1F0 1B0 1F1 1B1 1F2 1B2"
    assert schedule.title == "1f1b: 3 microbatches through 2 stages on 2 ranks"


@given(schedules())
def test_every_microbatch_goes_once_through_every_stage_and_once_back(schedule):
    found = Counter(action for actions in schedule.actions for action in actions)
    assert set(found.values()) == {1}
    for stage in range(schedule.pp_size * len(schedule.stages[0])):
        for microbatch in range(schedule.num_microbatches):
            kinds = "".join(kind.value for kind in Kind if Action(stage, kind, microbatch) in found)
            assert kinds in ("FB", "FIW")
            assert schedule.splits_backward or kinds == "FB"


@given(schedules())
def test_stages_loop_over_the_ranks_or_lie_on_a_v(schedule):
    size, num_stages = schedule.pp_size, len(schedule.rank_of)
    is_v = schedule.name in ("zbv", "dualpipev")
    ranks = [*range(size), *reversed(range(size))] if is_v else [stage % size for stage in range(num_stages)]
    assert schedule.rank_of == dict(enumerate(ranks))
    assert all(schedule.rank_of[stage] == rank for rank, stages in enumerate(schedule.stages) for stage in stages)


@given(schedules())
def test_in_flight_is_what_was_computed_forward_and_not_yet_back(schedule):
    for rank, actions in enumerate(schedule.actions):
        forward, back = set(), set()
        held = []
        for action in actions:
            if action.kind is Kind.FORWARD:
                forward.add((action.stage, action.microbatch))
            elif action.kind is not Kind.BACKWARD_INPUT:
                back.add((action.stage, action.microbatch))
            held.append(len(forward - back))
        assert schedule.in_flight[rank] == max(held)
        assert held[-1] == 0


@given(st.integers(1, 6), st.integers(0, 16))
def test_in_flight_by_the_book(pp_size, more):
    """1F1B holds what is on its way to the last rank and back; with V's, every rank what the first one of 1F1B does."""

    def in_flight(name, num_microbatches):
        return build_schedule(name, pp_size=pp_size, num_microbatches=num_microbatches).in_flight

    count = pp_size + more
    assert in_flight("gpipe", count) == (count,) * pp_size
    assert in_flight("1f1b", count) == tuple(min(count, pp_size - rank) for rank in range(pp_size))
    assert in_flight("looped_bfs", count) == (2 * count,) * pp_size
    assert in_flight("interleaved_zero_bubble", pp_size * (1 + more)) == (pp_size,) * pp_size
    assert in_flight("zbv", pp_size + count - 1) == (2 * pp_size,) * pp_size, "of half as large stages"
    assert in_flight("dualpipev", pp_size + count) == (2 * pp_size + 1,) * pp_size, "of half as large stages"


@pytest.mark.parametrize(
    ("name", "sizes", "says"),
    [
        ("1f1b", (4, 3, 1), ["a microbatch for each of 4 x 1 = 4 stages", "num_microbatches=4 or more"]),
        ("gpipe", (4, 8, 2), ["stages on every rank: exactly 1, not 2", "use num_stages_per_rank=1"]),
        ("interleaved_1f1b", (4, 8, 1), ["stages on every rank: at least 2, not 1", "use num_stages_per_rank=2"]),
        ("interleaved_1f1b", (4, 9, 2), ["in 2 rounds, into which 9 cannot be divided", "num_microbatches=8 or 12"]),
        ("interleaved_zero_bubble", (3, 7, 2), ["in 2 rounds, into which 7 cannot", "num_microbatches=6 or 9"]),
        ("zbv", (4, 8, 3), ["stages on every rank: exactly 2, not 3", "use num_stages_per_rank=2"]),
        ("dualpipev", (4, 7, 1), ["exactly 2, not 1", "each of 4 x 2 = 8 stages", "num_microbatches=8 or more"]),
        ("gpipe", (0, 8, 1), ["no positive integer: pp_size"]),
        ("gpipe", (2, 0, True), ["no positive integer: num_microbatches, num_stages_per_rank"]),
        ("1f1b", ("2", 2.0, 1), ["no positive integer: pp_size, num_microbatches"]),
    ],
)
def test_numbers_that_a_schedule_does_not_take(name, sizes, says):
    pp_size, num_microbatches, num_stages = sizes
    with pytest.raises(ConfigError, match=f"there is no {name} schedule for pp_size=") as caught:
        build_schedule(name, pp_size=pp_size, num_microbatches=num_microbatches, num_stages_per_rank=num_stages)
    assert all(part in str(caught.value) for part in says), caught.value


@given(st.sampled_from(SCHEDULES), st.integers(1, 6), st.integers(1, 20), st.integers(1, 4))
def test_the_numbers_named_do_work(name, pp_size, num_microbatches, num_stages):
    sizes = {"pp_size": pp_size, "num_microbatches": num_microbatches, "num_stages_per_rank": num_stages}
    try:
        build_schedule(name, **sizes)
    except ConfigError as error:
        for line in error.fix.splitlines():
            size, count = line.removeprefix("use ").split(" or ")[0].split(",")[0].split("=")
            sizes[size] = int(count)
    assert build_schedule(name, **sizes).num_microbatches == sizes["num_microbatches"]


def test_a_schedule_that_nobody_knows():
    with pytest.raises(ConfigError, match=r"unknown pipeline schedule '1f1B' \(did you mean '1f1b'\?\)") as caught:
        build_schedule("1f1B", pp_size=2, num_microbatches=2)
    assert all(name in caught.value.fix for name in SCHEDULES)
