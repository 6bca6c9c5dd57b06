"""Data parallelism, alone and with tensor and sequence parallelism, trains exactly what one process would."""

from __future__ import annotations

import copy
import functools
import itertools
import math

import pytest
import torch

import shardwise
from shardwise.comm.count import CommunicationCount
from shardwise.errors import BatchError
from shardwise.plan.options import FsdpPolicy, Recompute
from shardwise.proof.parity import measure
from shardwise.ranks.spawn import spawn
from shardwise.tiny.inputs import loss_or_surrogate
from tests.families import FULL_PRODUCT, num_steps, rows_of, tiny_batch, tiny_model

pytestmark = pytest.mark.spawn

FAMILIES = ("llama", "qwen3", "gpt2", "gemma3_text", "mixtral", "bert")
LAYOUTS = ("fsdp2", "ddp2", "ddp2.fsdp2", "fsdp2.tp2", "ddp2.tp2", "fsdp2.tp2+sp")
STAGES = (3, 1, 2)
ACCUMULATION = (1, 3)
RECOMPUTED = ("none", "full", "selective")
ROWS = 12
LONG = {"ddp2.tp2": "gpt2", "fsdp2.tp2+sp": "llama"}
"""Which family trains long under layouts in which each axis, and sp, has copies that could drift apart."""

CELLS = (
    ("qwen3", "fsdp2", 2, 1, "selective"),
    ("gemma3_text", "fsdp2", 1, 3, "full"),
    ("bert", "fsdp2", 2, 3, "none"),
    ("gpt2", "fsdp2", 3, 1, "full"),
    ("mixtral", "ddp2", 1, 3, "selective"),
    ("llama", "ddp2.fsdp2", 3, 3, "none"),
    ("mixtral", "fsdp2.tp2", 3, 3, "selective"),
    ("gpt2", "ddp2.tp2", 2, 1, "full"),
    ("llama", "fsdp2.tp2+sp", 1, 1, "none"),
)
"""Cells of the product in which every family and layout is, every pair of ways to step meets, and each way meets every
axis; the whole product is proved in `make coverage`.
"""


def axes_of(layout):
    return set(layout.removesuffix("+sp").split("."))


def test_every_pair_of_choices_meets():
    choices = (FAMILIES, LAYOUTS, STAGES, ACCUMULATION, RECOMPUTED)
    for (a, first), (b, second) in itertools.combinations(enumerate(choices[2:], 2), 2):
        assert {(cell[a], cell[b]) for cell in CELLS} == set(itertools.product(first, second))
    for number in (2, 3, 4):
        for axis in ("ddp2", "fsdp2", "tp2"):
            assert {cell[number] for cell in CELLS if axis in axes_of(cell[1])} == set(choices[number]), axis
    sharded = [cell for cell in CELLS if "fsdp2" in axes_of(cell[1])]  # elsewhere stages are all alike
    assert {cell[2:4] for cell in sharded} == set(itertools.product(STAGES, ACCUMULATION))
    assert {cell[4] for cell in sharded if cell[2] == 3} == set(RECOMPUTED), "blocks that are freed are gathered again"
    assert any("ddp2" in axes_of(cell[1]) and min(cell[2:4]) > 1 for cell in sharded), "over ddp it sums once a step"
    assert {cell[0] for cell in CELLS} == set(FAMILIES)
    assert {cell[1] for cell in CELLS} == set(LAYOUTS)
    assert {(family, layout) for layout, family in LONG.items()} <= {cell[:2] for cell in CELLS}


def loss_of_parts(model, batch, *, num_parts):
    """The mean over all targets, with a balance of experts that is computed for each part."""
    rows = ROWS // num_parts
    parts = [{name: value[at : at + rows] for name, value in batch.items()} for at in range(0, ROWS, rows)]
    counts = [int((part["labels"][:, 1:] != -100).sum()) for part in parts]
    losses = [loss_or_surrogate(model(**part)) * count / sum(counts) for part, count in zip(parts, counts, strict=True)]
    return torch.stack(losses).sum()


def train(mesh, family, layout, stage, accumulation, recomputed):
    whole = tiny_model(family, tied=family == "gpt2")
    parts = functools.partial(loss_of_parts, num_parts=mesh.data_size * accumulation)
    return measure(
        whole,
        tiny_batch(whole, rows=ROWS),
        mesh,
        split=functools.partial(
            shardwise.parallelize,
            sequence_parallel=layout.endswith("+sp"),
            fsdp=FsdpPolicy(zero_stage=stage),
            recompute=Recompute(mode=recomputed),
        ),
        step=lambda model, mesh, batch: (
            shardwise.TrainStep(model, mesh, num_microbatches=accumulation)(rows_of(batch, mesh)).loss
        ),
        reference_loss=parts if family == "mixtral" else None,
        num_steps=num_steps(family, is_long=family == LONG.get(layout)),
    )


@pytest.mark.parametrize(
    ("family", "layout", "stage", "accumulation", "recomputed"),
    sorted(
        itertools.product(FAMILIES, LAYOUTS, STAGES, ACCUMULATION, RECOMPUTED) if FULL_PRODUCT else CELLS,
        key=lambda cell: LAYOUTS.index(cell[1]),
    ),
)
def test_data_parallel_layouts_train_as_one_process(on_ranks, family, layout, stage, accumulation, recomputed):
    for found in on_ranks(train, layout=layout.removesuffix("+sp")):
        assert found.passed, found


def clip_everywhere(mesh):
    whole = tiny_model("llama", num_key_value_heads=1)
    batch = tiny_batch(whole, rows=ROWS)
    whole(**batch).loss.backward()
    expected = {}
    gradients = {name: p.grad.clone() for name, p in whole.named_parameters()}
    model = shardwise.parallelize(tiny_model("llama", num_key_value_heads=1), mesh)
    for norm_type in (1.0, 2.0, math.inf):
        for name, parameter in whole.named_parameters():
            parameter.grad = gradients[name].clone()
        norm = torch.nn.utils.clip_grad_norm_(whole.parameters(), 0.5, norm_type)
        model.zero_grad()
        shardwise.TrainStep(model, mesh)(rows_of(batch, mesh))
        parameters = model if norm_type == 2.0 else list(model.parameters())
        found = shardwise.clip_grad_norm_(parameters, 0.5, norm_type)
        assert found.dtype == torch.float32
        clipped = shardwise.full_gradients(model)
        worst = max(float((clipped[name] - p.grad).abs().max()) for name, p in whole.named_parameters())
        expected[norm_type] = float(norm), float(found), worst
    return expected


@pytest.mark.parametrize("layout", ["ddp2.fsdp2", "fsdp2.tp2", "ddp2.tp2"])  # every axis with every other
def test_norms_and_clipping_are_those_of_the_whole_model(on_ranks, layout):
    for rank in on_ranks(clip_everywhere):
        for norm, found, worst in rank.values():
            assert found == pytest.approx(norm, rel=1e-5)
            assert worst < 1e-6


def train_on_odd_batches():
    """Losses and worst gradient differences of batches whose ranks have unequal rows and targets."""
    with shardwise.Mesh.open("fsdp2") as mesh:
        found = {}
        for name in ("unequal targets", "one rank without", "odd rows", "no targets"):
            whole = tiny_model("llama")
            batch = tiny_batch(whole, rows=3 if name == "odd rows" else 4)
            cut = 2
            if name != "odd rows":
                batch["labels"][:2] = batch["labels"][:2] if name != "no targets" else -100
                batch["labels"][2:, :9] = -100
            if name in ("one rank without", "no targets"):
                batch["labels"][2:] = -100
            mine = {key: value[:cut] if mesh.data_rank == 0 else value[cut:] for key, value in batch.items()}
            model = shardwise.parallelize(copy.deepcopy(whole), mesh)
            result = shardwise.TrainStep(model, mesh)(mine)
            gradients = shardwise.full_gradients(model)
            if name == "no targets":
                found[name] = 0.0, float(result.loss), len(gradients), result.num_tokens, 0  # none, rather than zeros
                continue
            loss = whole(**batch).loss
            loss.backward()
            worst = max(float((gradients[key] - p.grad).abs().max()) for key, p in whole.named_parameters())
            targets = int((batch["labels"][:, 1:] != -100).sum())
            found[name] = float(loss.detach()), float(result.loss), worst, result.num_tokens, targets
        return found


def test_unequal_ranks_count_by_their_targets():
    for rank in spawn(train_on_odd_batches, 2):
        for name, (loss, found, worst, num_tokens, targets) in rank.items():
            assert found == pytest.approx(loss, abs=1e-5), name
            assert worst < 1e-6, name
            assert num_tokens == targets, name


def feed_one_rank_nonsense():
    with shardwise.Mesh.open("fsdp2", timeout_seconds=20) as mesh:
        model = shardwise.parallelize(tiny_model("llama"), mesh)
        batch = tiny_batch(model)
        if mesh.rank == 1:
            del batch["labels"]
        with pytest.raises(BatchError, match="no labels"):
            shardwise.TrainStep(model, mesh)(batch)
        batch = tiny_batch(model)
        return float(shardwise.TrainStep(model, mesh)(batch).loss)


def test_a_bad_batch_on_one_rank_is_an_error_on_all_and_training_can_go_on():
    first, second = spawn(feed_one_rank_nonsense, 2)
    assert first == second > 0


LAYERS = 3


def count_step(mesh, stage, accumulation):
    model = tiny_model("llama", num_hidden_layers=LAYERS)
    model = shardwise.parallelize(model, mesh, fsdp=FsdpPolicy(zero_stage=stage))
    step = shardwise.TrainStep(model, mesh, num_microbatches=accumulation)
    batch = rows_of(tiny_batch(model, rows=ROWS), mesh)
    step(batch)
    model.zero_grad()
    with CommunicationCount() as count:
        step(batch)
    sizes = {}
    for name, parameter in model.named_parameters():
        unit = name.split(".")[2] if "layers" in name else name.split(".")[0 if "head" in name else 1]
        sizes[unit] = sizes.get(unit, 0) + parameter.numel()
    calls = {name: count.num_calls(name) for name in ("all_gather", "reduce_scatter", "all_reduce")}
    return calls, dict(count.bytes), sizes


@pytest.mark.parametrize("accumulation", ACCUMULATION)
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("layout", ["fsdp2"])
def test_each_stage_communicates_what_it_must(on_ranks, layout, stage, accumulation):
    """Units: each block, the embedding, the head, and the final norm with the model itself."""
    for calls, nbytes, sizes in on_ranks(count_step):
        everything = sum(sizes.values()) * 4
        units = LAYERS + 3
        again = sum(sizes[str(block)] for block in range(LAYERS - 1)) * 4  # the last block and the head are kept
        gathers = {1: units, 2: units, 3: (units + LAYERS - 1) * accumulation}[stage]
        scatters = units * (accumulation if stage > 1 else 1)
        agreement = 2 * 40  # targets, operations, a flag and how ranks call, of both ranks
        parameters = {1: everything, 2: everything, 3: (everything + again) * accumulation}[stage]
        assert calls == {"all_gather": gathers + 1, "reduce_scatter": scatters, "all_reduce": 1}
        assert nbytes["all_gather"] == parameters + agreement
        assert nbytes["reduce_scatter"] == everything * (accumulation if stage > 1 else 1)
        assert nbytes["all_reduce"] == 4, "the loss"
