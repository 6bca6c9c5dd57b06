"""Where the bubble of a measured step comes from: parts with names, which add up."""

from __future__ import annotations

import dataclasses
import random

import pytest

from shardwise.schedule.action import Kind
from shardwise.schedule.build import SCHEDULES, build_schedule
from shardwise.schedule.timeline import Timeline, _replay, timeline

pytestmark = pytest.mark.pure


def measured(name, *, length, between=lambda action: 0.0, message=lambda action: 0.0, pp_size=4, count=8):
    """A step of a schedule as it is measured where actions, what lies between them and messages take so long."""
    schedule = build_schedule(name, pp_size=pp_size, num_microbatches=count)
    actions = [action for row in schedule.actions for action in row]
    rank_of = schedule.rank_of

    def is_sent(action):
        other = action.stage + (-1 if action.kind is Kind.FORWARD else 1)
        return (
            action.kind is not Kind.BACKWARD_WEIGHT
            and rank_of.get(other, rank_of[action.stage]) != rank_of[action.stage]
        )

    delays = {action: between(action) for action in actions}
    times = _replay(
        schedule,
        {action: length(action) for action in actions},
        delays,
        {action: message(action) for action in actions if is_sent(action)},
    )

    def asked(row):
        ends = [0.0, *(span.end for span in row)]
        for span, free in zip(row, ends, strict=False):
            yield dataclasses.replace(span, asked=free + delays[span.action]) if is_sent(span.action) else span

    return Timeline(schedule, tuple(tuple(asked(row)) for row in times.spans))


def even(action):
    return {Kind.FORWARD: 1.0, Kind.BACKWARD: 2.0}.get(action.kind, 1.0)


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_parts_add_up_to_the_measured_bubble(name):
    numbers = random.Random(name)
    seen = measured(
        name,
        length=lambda action: even(action) * numbers.uniform(0.8, 1.3),
        between=lambda action: numbers.uniform(0.0, 0.1),
        message=lambda action: numbers.uniform(0.0, 0.2),
    )
    found = seen.attribute()
    assert found.measured == pytest.approx(seen.bubble, abs=1e-12)
    assert found.theory == pytest.approx(seen.computed().bubble, abs=1e-12)
    assert found.messages > 0 and found.between > 0


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize(
    ("part", "delays"),
    [
        ("uneven", {"length": lambda action: even(action) * (1 + action.microbatch % 2)}),
        ("between", {"between": lambda action: 0.1}),
        ("messages", {"message": lambda action: 0.1}),
    ],
)
def test_each_cause_is_told_by_its_name(name, part, delays):
    found = measured(name, **{"length": even, **delays}).attribute()
    shares = {each: getattr(found, each) for each in ("uneven", "between", "messages")}
    assert shares.pop(part) > 1e-3 or part == "uneven"
    assert shares == pytest.approx(dict.fromkeys(shares, 0.0), abs=1e-12)


@pytest.mark.parametrize("name", SCHEDULES)
def test_without_delays_all_is_theory(name):
    seen = measured(name, length=even)
    schedule = build_schedule(name, pp_size=4, num_microbatches=8)
    assert seen.attribute().theory == pytest.approx(timeline(schedule).bubble)
    assert str(seen.attribute()).endswith("uneven times 0.0%, between actions 0.0%, messages 0.0%")
