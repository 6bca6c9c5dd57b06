"""Every family x layout trains as the unsplit model does: loss, logits, gradients, three AdamW steps, replicas."""

from __future__ import annotations

import functools
import itertools

import pytest

import shardwise
from shardwise.proof.parity import measure
from tests.families import FAMILIES, FULL_PRODUCT, num_steps, tiny_batch, tiny_model

pytestmark = pytest.mark.spawn

LAYOUTS = ("tp2", "tp4")
SWITCHES = (False, True)


def cells():
    """For every family two cells of the product, opposite in everything, so that every pair of choices meets; the next
    three families take the other six.
    """
    for number, family in enumerate(FAMILIES):
        for (i, layout), tied, sequence_parallel in itertools.product(enumerate(LAYOUTS), SWITCHES, SWITCHES):
            if FULL_PRODUCT or ((tied + i) % 2, (sequence_parallel + i) % 2) == (number % 2, number // 2 % 2):
                yield layout, family, tied, sequence_parallel


def test_every_pair_of_choices_meets():
    found = list(cells())
    choices = (LAYOUTS, tuple(FAMILIES), SWITCHES, SWITCHES)
    for (a, first), (b, second) in itertools.combinations(enumerate(choices), 2):
        assert {(cell[a], cell[b]) for cell in found} == set(itertools.product(first, second))
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
