"""Every family x layout trains as the whole model does: loss, logits, gradients, three AdamW steps, replicas."""

from __future__ import annotations

import functools

import pytest

import shardwise
from shardwise.proof.parity import measure
from shardwise.testing.spawn import spawn
from tests.families import FAMILIES, tiny_batch, tiny_model

pytestmark = pytest.mark.spawn

# Families whose config decides nothing about tying: MLA and Gemma-like ones tie or do not tie by the same switch.
TIED = (False, True)


def measure_family(family, layout, *, num_steps=20):
    with shardwise.Mesh.open(layout) as mesh:
        found = {}
        for tied in TIED:
            whole = tiny_model(family, tied=tied)
            batch = tiny_batch(whole)
            for sequence_parallel in (False, True):
                found[tied, sequence_parallel] = measure(
                    whole,
                    batch,
                    mesh,
                    split=functools.partial(shardwise.parallelize, sequence_parallel=sequence_parallel),
                    step=lambda model, mesh, batch: shardwise.TrainStep(model, mesh)(batch).loss,
                    num_steps=num_steps,
                )
        return found


@pytest.mark.parametrize("layout", ["tp2", "tp4"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_split_model_trains_as_the_whole_one(family, layout):
    for rank in spawn(measure_family, int(layout[2:]), family, layout, timeout=110):
        for (tied, sequence_parallel), found in rank.items():
            case = f"{family} {layout} tied={tied} sp={sequence_parallel}: {found}"
            assert found.passed, case
            assert found.share_split > 0.5, case
