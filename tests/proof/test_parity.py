"""Every family x layout trains as the whole model does: loss, logits, gradients, three AdamW steps, replicas."""

from __future__ import annotations

import functools
import itertools

import pytest

import shardwise
from shardwise.proof.parity import measure
from shardwise.testing.spawn import spawn
from tests.families import FAMILIES, FEW_STEPS, FULL, MANY_STEPS, tiny_batch, tiny_model

pytestmark = pytest.mark.spawn

# Families whose config decides nothing about tying: MLA and Gemma-like ones tie or do not tie by the same switch.
TIED = (False, True)
SEQUENCE_PARALLEL = (False, True)
LAYOUTS = ("tp2", "tp4")
CHOICES = ((False, False), (False, True), (True, True), (True, False))
"""Of tied and sequence parallel, neighbours differing in one."""


def num_steps(family, layout, choice):
    """Each family goes on at each layout with one of the choices, at tp4 with the opposite of the one at tp2."""
    turn = list(FAMILIES).index(family) + 2 * LAYOUTS.index(layout)
    return MANY_STEPS if FULL or CHOICES[turn % len(CHOICES)] == choice else FEW_STEPS


def test_any_two_choices_meet_in_a_long_run():
    cells = itertools.product(FAMILIES, LAYOUTS, CHOICES)
    found = [
        (family, layout, *choice) for family, layout, choice in cells if num_steps(family, layout, choice) > FEW_STEPS
    ]
    values = (FAMILIES, LAYOUTS, TIED, SEQUENCE_PARALLEL)
    for (a, first), (b, second) in itertools.combinations(enumerate(values), 2):
        assert {(cell[a], cell[b]) for cell in found} == set(itertools.product(first, second))


def measure_family(family, layout):
    with shardwise.Mesh.open(layout) as mesh:
        found = {}
        for tied in TIED:
            whole = tiny_model(family, tied=tied)
            batch = tiny_batch(whole)
            for sequence_parallel in SEQUENCE_PARALLEL:
                found[tied, sequence_parallel] = measure(
                    whole,
                    batch,
                    mesh,
                    split=functools.partial(shardwise.parallelize, sequence_parallel=sequence_parallel),
                    step=lambda model, mesh, batch: shardwise.TrainStep(model, mesh)(batch).loss,
                    num_steps=num_steps(family, layout, (tied, sequence_parallel)),
                )
        return found


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_split_model_trains_as_the_whole_one(family, layout):
    for rank in spawn(measure_family, int(layout[2:]), family, layout, timeout=110):
        for (tied, sequence_parallel), found in rank.items():
            case = f"{family} {layout} tied={tied} sp={sequence_parallel}: {found}"
            assert found.passed, case
            assert found.share_split > 0.5, case
