"""When actions run: what must come first does, ranks wait as long as the papers say, and pictures show it."""

import json
from itertools import pairwise
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.errors import ConfigError
from shardwise.schedule.schedule import Action, Kind, build_schedule
from shardwise.schedule.timeline import chrome_trace, describe_schedule, draw_svg, draw_text, timeline
from tests.schedule.strategies import read_schedule, schedules

pytestmark = pytest.mark.pure

costs = st.floats(0.1, 10)


def lengths_of(schedule, forward, backward_input, backward_weight):
    """How long every action takes, by the costs of every stage."""
    costs = {Kind.FORWARD: forward, Kind.BACKWARD_INPUT: backward_input, Kind.BACKWARD_WEIGHT: backward_weight}
    costs[Kind.BACKWARD] = [sum(parts) for parts in zip(backward_input, backward_weight, strict=True)]
    return {action: costs[action.kind][action.stage] for row in schedule.actions for action in row}


@st.composite
def runs(draw):
    schedule = draw(schedules())
    of_stages = st.lists(costs, min_size=len(schedule.rank_of), max_size=len(schedule.rank_of))
    return timeline(schedule, lengths_of(schedule, *(draw(of_stages) for _ in range(3))))


@given(runs())
def test_a_run_comes_to_its_end_in_order(run):
    """No deadlock, no rank does two things at a time, and each takes its actions in the schedule's order."""
    for actions, row in zip(run.schedule.actions, run.spans, strict=True):
        assert [span.action for span in row] == list(actions)
        assert all(before.end <= after.start for before, after in pairwise(row))


@given(runs())
def test_an_action_runs_after_those_that_it_needs(run):
    spans = {span.action: span for row in run.spans for span in row}
    last_stage = max(run.schedule.rank_of)

    def back(stage, microbatch):
        return (
            spans.get(Action(stage, Kind.BACKWARD, microbatch)) or spans[Action(stage, Kind.BACKWARD_INPUT, microbatch)]
        )

    for action, span in spans.items():
        stage, microbatch = action.stage, action.microbatch
        if action.kind is Kind.FORWARD:
            needed = [spans[Action(stage - 1, Kind.FORWARD, microbatch)]] if stage else []
        elif action.kind is Kind.BACKWARD_WEIGHT:
            needed = [spans[Action(stage, Kind.BACKWARD_INPUT, microbatch)]]
        else:
            needed = [spans[Action(stage, Kind.FORWARD, microbatch)]]
            needed += [back(stage + 1, microbatch)] if stage < last_stage else []
        assert all(before.end <= span.start for before in needed)


@given(st.integers(1, 6), st.integers(0, 12), costs, costs, costs, st.sampled_from(["gpipe", "1f1b"]))
def test_the_bubble_of_one_stage_a_rank(pp_size, more, forward, backward_input, backward_weight, name):
    schedule = build_schedule(name, pp_size=pp_size, num_microbatches=pp_size + more)
    of_stages = ([cost] * pp_size for cost in (forward, backward_input, backward_weight))
    run = timeline(schedule, lengths_of(schedule, *of_stages))
    assert run.bubble == pytest.approx((pp_size - 1) / (pp_size + more + pp_size - 1))


@given(st.integers(1, 6), st.integers(1, 4), st.integers(2, 4), st.sampled_from(["looped_bfs", "interleaved_1f1b"]))
def test_the_bubble_shrinks_by_the_number_of_stages_a_rank(pp_size, rounds, num_stages, name):
    num_microbatches = pp_size * rounds
    schedule = build_schedule(name, pp_size=pp_size, num_microbatches=num_microbatches, num_stages_per_rank=num_stages)
    waits = (pp_size - 1) / num_stages  # in microbatches through all stages of a rank
    assert timeline(schedule).bubble == pytest.approx(waits / (num_microbatches + waits))


@given(st.integers(1, 6), st.integers(0, 8))
def test_zbv_waits_for_nothing_once_it_has_begun(pp_size, more):
    run = timeline(build_schedule("zbv", pp_size=pp_size, num_microbatches=2 * pp_size - 1 + more))
    for rank, row in enumerate(run.spans):
        assert row[0].start == rank
        assert all(before.end == after.start for before, after in pairwise(row))


def test_a_bubble_of_every_schedule():
    """4 ranks, 8 microbatches, F, I and W equally long: two stages a rank halve it, W in idle time takes the most."""
    found = {
        name: round(timeline(build_schedule(name, pp_size=4, num_microbatches=8, num_stages_per_rank=stages)).bubble, 3)
        for name, stages in {
            "gpipe": 1,
            "1f1b": 1,
            "looped_bfs": 2,
            "interleaved_1f1b": 2,
            "interleaved_zero_bubble": 2,
            "zbv": 2,
            "dualpipev": 2,
        }.items()
    }
    assert found == {
        "gpipe": 0.273,
        "1f1b": 0.273,
        "looped_bfs": 0.158,
        "interleaved_1f1b": 0.158,
        "interleaved_zero_bubble": 0.059,
        "zbv": 0.059,
        "dualpipev": 0.111,
    }


def test_a_pair_hands_on_what_it_made_at_its_end():
    ranks = ["0F0 0F1 0F2 0B0 0B1 0B2", "1F0 1B0 1F1 1B1 1F2 1B2"]
    alone = read_schedule("\n".join(["alone", *ranks]))
    alone = timeline(alone, lengths_of(alone, [1, 1], [5, 0], [1, 1]))
    ranks[0] = ranks[0].replace("0F2 0B0", "(0F2;0B0)OVERLAP_F_B")
    pair = read_schedule("\n".join(["pair", *ranks]))
    pair = timeline(pair, lengths_of(pair, [1, 1], [5, 0], [1, 1]))
    assert [(str(span.action), span.start, span.end) for span in pair.spans[0][2:4]] == [("0F2", 2, 3), ("0B0", 3, 9)]
    assert pair.spans[0][:4] == alone.spans[0][:4]
    assert [run.spans[1][4].start for run in (alone, pair)] == [5, 9]


def test_ranks_that_wait_for_each_other():
    schedule = read_schedule("stuck\n0F0 0B0 0F1 0B1\n1F1 1B1 1F0 1B0")
    with pytest.raises(ConfigError, match="the schedule stuck stops") as caught:
        timeline(schedule)
    assert caught.value.at == "rank 0 before 0B0, rank 1 before 1F1"


def test_a_schedule_described():
    assert describe_schedule(timeline(build_schedule("1f1b", pp_size=2, num_microbatches=3))) == "\n".join(
        [
            "1f1b: 3 microbatches through 2 stages on 2 ranks",
            "bubble: ranks wait 25.0% of the time",
            "in flight: ranks hold at most 2, 1 activations, each of one stage and microbatch",
            "",
            "rank 0  0F0 0F1 ·   ·   0B0──── 0F2 0B1──── ·   0B2────",
            "rank 1  ·   1F0 1B0──── 1F1 1B1──── 1F2 1B2──── ·   ·",
        ]
    )


@given(runs())
def test_a_grid_is_no_wider_than_a_page_and_names_every_rank(run):
    blocks = draw_text(run).split("\n\n")
    assert all(len(line) <= 120 for block in blocks for line in block.splitlines())
    assert all(len(block.splitlines()) == run.schedule.pp_size for block in blocks)


@given(runs())
def test_pictures_show_every_action(run):
    names = sorted(str(action) for actions in run.schedule.actions for action in actions)
    svg = ElementTree.fromstring(draw_svg(run))
    tips = [title.text for title in svg.iter("{http://www.w3.org/2000/svg}title") if title.text]
    assert sorted(tip.split(":")[0] for tip in tips) == names
    events = [each for each in json.loads(chrome_trace({"step": run}))["traceEvents"] if each["ph"] == "X"]
    assert sorted(event["name"] for event in events) == names
    assert max(event["ts"] + event["dur"] for event in events) == pytest.approx(1e6 * run.duration)
