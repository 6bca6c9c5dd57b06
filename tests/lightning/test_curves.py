"""A LightningModule trains under every layout as the unsplit model does in a plain loop."""

from __future__ import annotations

from itertools import product

import pytest

import shardwise
from shardwise.comm.collectives import all_gather_objects
from shardwise.parameters.replicas import find_unequal_replicas
from shardwise.topology.shape import DATA_AXES
from tests.families import FULL_PRODUCT
from tests.lightning.modules import CLIP, NUM_ROWS, Automatic, Manual, loader, trainer, unsplit_curve
from tests.oracle import differing

pytestmark = pytest.mark.spawn

NUM_BATCHES = 12  # two epochs: twelve steps, or four that accumulate
LOSS = 1e-4
A, B, C, D, E = (
    ("automatic", 1, "norm"),
    ("automatic", 3, "value"),
    ("automatic", 3, None),
    ("manual", 3, "norm"),
    ("manual", 1, "value"),
)
CASES = {
    ("tp1", False): (E,),
    ("tp2", False): (B,),
    ("tp2", True): (D,),
    ("fsdp2", False): (A, D),
    ("ddp2", False): (C, E),
    ("fsdp2.tp2", False): (B,),
    ("pp2", False): (A, D),
    ("pp2.ddp2", False): (C,),
}
"""By the layout, and whether activations are split along the sequence, too. Every axis meets both ways to optimize, and
stages and data ranks steps with every batch and every third.
"""
if FULL_PRODUCT:  # make coverage
    CASES = dict.fromkeys(CASES, tuple(product(("automatic", "manual"), (1, 3), ("norm", "value", None))))


def num_steps(accumulate, layout):
    """Layouts of two axes take those of one epoch."""
    return 20 if FULL_PRODUCT else NUM_BATCHES // accumulate // (1 + ("." in layout))


def curve(mesh, layout, is_split, mode, accumulate, clip):
    """Losses, full parameters, replicas that differ, and the rows of the first epoch by data rank."""
    if mode == "manual":
        module, options = Manual(accumulate, clip), {}
    else:
        module, options = Automatic(), {"accumulate_grad_batches": accumulate}
        if clip:
            options |= {"gradient_clip_val": CLIP[clip], "gradient_clip_algorithm": clip}
    at = f"{layout}+sp" if is_split else layout
    trainer(at, max_steps=num_steps(accumulate, layout), **options).fit(module, loader(mesh.data_size))
    read = all_gather_objects(module.rows[: NUM_ROWS // mesh.data_size], mesh.group(*DATA_AXES))
    state = shardwise.full_state_dict(module.model, rank0_only=True)
    return module.losses, state, find_unequal_replicas(module.model), read


@pytest.mark.parametrize(
    ("layout", "is_split", "mode", "accumulate", "clip"), [(*at, *case) for at in CASES for case in CASES[at]]
)
def test_curves_are_those_of_the_unsplit_model(on_ranks, layout, is_split, mode, accumulate, clip):
    wanted, parameters = unsplit_curve(mode, accumulate, clip, num_steps(accumulate, layout))
    for losses, state, unequal, read in on_ranks(curve):
        assert losses == pytest.approx(wanted, abs=LOSS)
        assert not [problem for name in state for problem in differing(name, state[name], parameters[name], 2e-5)]
        assert not unequal
        assert sorted(row for rows in read for row in rows) == list(range(NUM_ROWS))
