"""`make drill`: pipelines on eight ranks, with tensor and data parallelism below each stage. No part of `make test`."""

from __future__ import annotations

import pytest

from shardwise.plan.options import FsdpPolicy
from shardwise.schedule.schedule import SCHEDULES
from tests.pipeline.test_step import FAMILIES, train

pytestmark = [pytest.mark.spawn, pytest.mark.timeout(1800)]

CELLS = [
    (name, FAMILIES[number % len(FAMILIES)], bool(number % 2), 1 + number % 3, bool(number // 2 % 2))
    for number, name in enumerate((*SCHEDULES, *reversed(SCHEDULES)))
]


def train_eight(mesh, name, family, tied, zero_stage, sp):
    return train(mesh, family, name, 4, tied, sp, fsdp=FsdpPolicy(zero_stage=zero_stage))


@pytest.mark.parametrize(("name", "family", "tied", "zero_stage", "sp"), CELLS)
@pytest.mark.parametrize("layout", ["pp2.fsdp2.tp2"])
def test_steps_on_eight_ranks_are_those_of_the_unsplit_model(on_ranks, layout, name, family, tied, zero_stage, sp):
    for problems in on_ranks(train_eight, timeout=1500.0):
        assert not problems, problems
