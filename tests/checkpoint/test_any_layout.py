"""A checkpoint of any layout is, bit for bit, what any other layout loads, and training goes on as if nothing was."""

from __future__ import annotations

import itertools
import os

import pytest
import torch

import shardwise
from shardwise.plan.options import FsdpPolicy, Precision
from shardwise.ranks.spawn import spawn
from shardwise.topology.shape import MeshShape
from tests.checkpoint.training import FAMILIES, VARIANTS, Training, differing
from tests.families import FULL_PRODUCT

pytestmark = pytest.mark.spawn

LAYOUTS = ("tp2", "tp2+sp", "fsdp2", "pp2", "ddp2", "tp4", "fsdp4", "fsdp2.tp2", "ddp2.fsdp2", "pp2.tp2", "pp2.fsdp2")
ALL = ("tp1", *LAYOUTS)
OPTIMIZERS = ("adamw", "sgd", "adagrad", "amsgrad")
STAGES = (3, 1, 2)
OFFLOADED = ("phi3", "qwen3")
DRILL = "SHARDWISE_DRILL" in os.environ
NEXT = 5 if DRILL else 3  # steps that are compared after a checkpoint was loaded


CHOSEN = {
    "tp2": "phi3",
    "tp2+sp": "llama",
    "fsdp2": "gpt2",
    "pp2": "t5",
    "ddp2": "bert",
    "tp4": "llama-1kv",
    "fsdp2.tp2": "qwen3",
    "ddp2.fsdp2": "llama",
    "pp2.tp2": "phi3",
    "pp2.fsdp2": "mixtral",
}
"""With these, every layout (fsdp4 is fsdp2's kind) has a family, and each family, optimizer, and ZeRO stage has a
layout; those whose plans are derived are where none is needed."""


def cases():
    """Every layout with some families, optimizers and ZeRO stages; with every family in `make drill`."""
    for (i, layout), (j, family) in itertools.product(enumerate(LAYOUTS), enumerate(FAMILIES)):
        if DRILL or family == CHOSEN.get(layout):
            yield layout, family, OPTIMIZERS[(i + j) % len(OPTIMIZERS)], STAGES[(i + j) % 3]


def in_one_process(family, optimizer, *, lost=False):
    return Training(shardwise.Mesh.open("tp1"), family, optimizer, lost=lost)


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """Trained in one process and saved: what was saved, and the losses of the next steps."""
    found = {}

    def get(family, optimizer):
        key = f"{family}-{optimizer}"
        if key not in found:
            directory = tmp_path_factory.getbasetemp() / "reference" / key
            training = in_one_process(family, optimizer)
            training.steps(3)
            training.save(directory, extra={"step": 3, "note": (1, "two")})
            found[key] = training.whole(), training.steps(NEXT)
        return found[key]

    return get


def options_of(mesh, layout, stage, family):
    fsdp = FsdpPolicy(zero_stage=stage, cpu_offload=family in OFFLOADED) if mesh.data_size > 1 else None
    return {"sequence_parallel": layout.endswith("+sp"), "fsdp": fsdp}


def go_on(mesh, layout, family, optimizer, stage, base):
    """Loads what one process saved, trains, and saves again: everything that was seen."""
    options = options_of(mesh, layout, stage, family)
    training = Training(mesh, family, optimizer, lost=True, **options)
    extra = training.load(f"{base}/reference/{family}-{optimizer}")
    loaded = training.whole()
    losses = training.steps(NEXT)
    training.save(f"{base}/{layout}/{family}", extra={"step": 8})
    return extra, loaded, losses, training.whole(), training.steps(2)


@pytest.mark.parametrize(("layout", "family", "optimizer", "stage"), sorted(cases(), key=lambda each: each[0]))
def test_every_layout_loads_and_saves(on_ranks, reference, tmp_path_factory, layout, family, optimizer, stage):
    base = tmp_path_factory.getbasetemp()
    for each in cases():
        if each[0] == layout:
            reference(each[1], each[2])  # before the ranks that all of them share
    saved, next_losses = reference(family, optimizer)
    ranks = on_ranks(go_on, layout=layout.removesuffix("+sp"), base=str(base))
    for extra, loaded, losses, _, _ in ranks:
        assert extra == {"step": 3, "note": (1, "two")}
        assert not differing(loaded, saved)
        assert losses == pytest.approx(next_losses, abs=1e-5)
    _, _, _, later, last_losses = ranks[0]
    back = in_one_process(family, optimizer, lost=True)
    back.load(base / layout / family)
    assert not differing(back.whole(), later)
    assert back.steps(2) == pytest.approx(last_losses, abs=1e-5)


def resume(layout, other, directory):
    """Losses of two steps after a save, and of the same steps after loading it, with dropout and float16; and whether
    another layout loads the same.
    """
    precision = Precision(compute="float16", params="float32", nonfinite="skip")
    options = {"precision": precision, "model": {"attention_dropout": 0.3}}
    with shardwise.Mesh.open(layout) as mesh:
        torch.manual_seed(mesh.data_rank)
        training = Training(mesh, "llama", **options)
        training.model.train()
        training.steps(2)
        training.save(directory)
        saved, scale, losses = training.whole(), training.loss_scale(), training.steps(3)
        training.steps(1)
        training.load(directory)
        same = not differing(training.whole(), saved)
        again = training.steps(3)
        fresh = Training(mesh, "llama", lost=True, **options)
        fresh.model.train()
        fresh.load(directory, verify=False)
        fresh_losses = fresh.steps(3)
    with shardwise.Mesh.open(other) as mesh:
        elsewhere = Training(mesh, "llama", lost=True, **options)
        elsewhere.load(directory)
        is_same_there = not differing(elsewhere.whole(), saved) and elsewhere.loss_scale() == scale
    return same and is_same_there, losses, again, fresh_losses


@pytest.mark.parametrize(("layout", "other"), [("fsdp2", "pp2"), *[("tp2", "fsdp2")] * FULL_PRODUCT])
def test_the_same_layout_goes_on_bit_for_bit(tmp_path, layout, other):
    for same, losses, again, fresh in spawn(resume, 2, layout, other, tmp_path):
        assert same
        assert len(set(losses)) == 3
        assert losses == again == fresh


def split_again(mesh, layout, number, family):
    options = options_of(mesh, layout, STAGES[number % 3], family)
    return Training(mesh, family, OPTIMIZERS[number % len(OPTIMIZERS)], lost=True, **options)


def save_again(layout, base, number, family):
    """Loads what one process saved, and saves it as these ranks hold it."""
    with shardwise.Mesh.open(layout.removesuffix("+sp")) as mesh:
        training = split_again(mesh, layout, number, family)
        training.load(f"{base}/reference/{family}-{OPTIMIZERS[number % len(OPTIMIZERS)]}")
        training.save(f"{base}/pairs/{layout}/{family}", tag="a", extra={"step": 3})


def load_each(layout, base, number, family, expected):
    """Loads what each layout has saved. Returns where it is not what was saved, and where the next steps differ."""
    found = []
    with shardwise.Mesh.open(layout.removesuffix("+sp")) as mesh:
        training = split_again(mesh, layout, number, family)
        saved, losses = expected
        for at, other in enumerate(ALL):
            training.load(f"{base}/pairs/{other}/{family}")
            if names := differing(training.whole(), saved):
                found.append((other, names[:3]))
            elif at % len(FAMILIES) == number % len(FAMILIES) and training.steps(NEXT) != pytest.approx(
                losses, abs=1e-5
            ):
                found.append((other, "the next steps"))
    return found


@pytest.mark.skipif(not DRILL, reason="every pair of layouts, every family: make drill")
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("family", [*FAMILIES, *VARIANTS])
def test_all_pairs(tmp_path_factory, reference, family):
    base, number = str(tmp_path_factory.getbasetemp()), [*FAMILIES, *VARIANTS].index(family)
    expected = reference(family, OPTIMIZERS[number % len(OPTIMIZERS)])
    for layout in ALL:
        size = MeshShape.parse(layout.removesuffix("+sp")).world_size
        spawn(save_again, size, layout, base, number, family, timeout=600.0)
    for layout in ALL:
        size = MeshShape.parse(layout.removesuffix("+sp")).world_size
        for rank in spawn(load_each, size, layout, base, number, family, expected, timeout=1200.0):
            assert rank == [], layout
