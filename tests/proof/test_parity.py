"""Every family x layout trains as the unsplit model does: loss, logits, gradients, three AdamW steps, replicas."""

from __future__ import annotations

import functools
import itertools

import pytest

import shardwise
from shardwise.plan.families import CORRECTIONS
from shardwise.proof.parity import measure
from tests.families import FAMILIES, FULL_PRODUCT, MECHANISMS, num_steps, tiny_batch, tiny_model

pytestmark = pytest.mark.spawn

LAYOUTS = ("tp2", "tp4")
SWITCHES = (False, True)


OWN = [family for family in FAMILIES if family in MECHANISMS or family in CORRECTIONS]
"""Families with a mechanism of their own, or rules of ours; the others are made of their parts."""


def cells():
    """For every family with something of its own a cell of the product over four ranks; for the others one over two.
    Neighbours take the other ways.
    """
    for kind in (OWN, [family for family in FAMILIES if family not in OWN]):
        for number, family in enumerate(kind):
            for (i, layout), tied, sequence_parallel in itertools.product(enumerate(LAYOUTS), SWITCHES, SWITCHES):
                is_there = (layout == "tp4") == (family in OWN)
                is_one = ((tied + i) % 2, (sequence_parallel + i) % 2) == (number % 2, number // 2 % 2)
                if FULL_PRODUCT or (is_there and is_one):
                    yield layout, family, tied, sequence_parallel


def test_every_choice_is_there():
    found = list(cells())
    assert {cell[1] for cell in found} == set(FAMILIES)
    assert {cell[:1] + cell[2:] for cell in found} == set(itertools.product(LAYOUTS, SWITCHES, SWITCHES))


def train(mesh, family, tied, sequence_parallel):
    whole = tiny_model(family, tied=tied)
    return measure(
        whole,
        tiny_batch(whole),
        mesh,
        split=functools.partial(shardwise.parallelize, sequence_parallel=sequence_parallel),
        step=lambda model, mesh, batch: shardwise.TrainStep(model, mesh)(batch).loss,
        num_steps=num_steps(family, is_long=mesh.size("tp") == 4),  # where most is held by several ranks
    )


@pytest.mark.parametrize(
    ("layout", "family", "tied", "sequence_parallel"),
    sorted(cells(), key=lambda cell: LAYOUTS.index(cell[0])),
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_a_split_model_trains_as_the_whole_one(on_ranks, family, layout, tied, sequence_parallel):
    for found in on_ranks(train):
        assert found.passed, found
        assert found.share_split > 0.5, found
