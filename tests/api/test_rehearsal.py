"""A run rehearsed on fake tensors tells what real ranks hold, to the byte."""

from __future__ import annotations

import functools
import re
import time
from contextlib import nullcontext

import pytest
import torch
import transformers
from peft import LoraConfig

import shardwise
from shardwise import FsdpPolicy, Precision, Recompute
from shardwise.api import rehearsal
from shardwise.api.describing import describe
from shardwise.api.rehearsal import Rehearsal
from shardwise.comm.collectives import broadcast_object
from shardwise.comm.count import CommunicationCount
from shardwise.errors import MeshError, UnsupportedError
from shardwise.loss import cross_entropy
from shardwise.loss.logits import dropped_output
from shardwise.optim.gradients import gradients_of
from shardwise.parallel.activation_memory import MemoryCount, PeakCount
from shardwise.parameters.registry import registry_of
from shardwise.plan.options import ParallelSpec
from shardwise.ranks.spawn import spawn
from tests.families import FULL_PRODUCT, rows_of, tiny_batch, tiny_model
from tests.train.test_images import llava, llava_batch, qwen2_vl, qwen2_vl_batch

ROWS, LENGTH = 2, 32
CASES = {
    "tp2": ("tp2", ParallelSpec()),
    "tp2 sp": ("tp2", ParallelSpec(sequence_parallel=True)),
    "tp2 selective": ("tp2", ParallelSpec(recompute=Recompute(mode="selective"))),
    "tp2 full bfloat16": ("tp2", ParallelSpec(recompute=Recompute(mode="full"), precision=Precision())),
    "fsdp2": ("fsdp2", ParallelSpec()),
    "fsdp2 stage 2": ("fsdp2", ParallelSpec(fsdp=FsdpPolicy(zero_stage=2))),
    "fsdp2 full bfloat16": ("fsdp2", ParallelSpec(recompute=Recompute(mode="full"), precision=Precision())),
    "ddp2": ("ddp2", ParallelSpec()),
    "fsdp2.tp2 sp": ("fsdp2.tp2", ParallelSpec(sequence_parallel=True)),
}


def model_for(shape):
    """With a layer more where FSDP2 keeps the last one gathered, and frees the others."""
    return tiny_model("llama", num_hidden_layers=1 if shape.data_size == 1 else 2)


def hold(mesh, spec, peak_bytes):
    """What this rank really holds between forward and backward, and at the peak of a step.

    Args:
        peak_bytes: as rehearsed. Two steps that hold so many end the tries.
    """
    model, batch = build(mesh, spec)
    with MemoryCount(model) as count:
        loss = model(**batch).loss
        held = settled(count)
    loss.backward()
    found = []
    for _ in range(2 * mesh.shape.world_size + 1):  # for the same reason: the more ranks share the cores, the later
        found.append(peak(*build(mesh, spec)))
        if broadcast_object(found.count(peak_bytes) > 1, mesh.group()):
            break
    return held, min(found)


def settled(count):
    """What is held in the end: gloo's thread releases what it sent some time later, where the cores are busy."""
    held = count.total()
    for _ in range(5):
        time.sleep(0.1)
        held = min(held, count.total(), key=lambda each: each.total)
    return held


def build(mesh, spec):
    model = model_for(mesh.shape)
    batch = rows_of(tiny_batch(model, rows=ROWS * mesh.data_size, length=LENGTH), mesh)
    return shardwise.parallelize(model, mesh, **vars(spec)).train(), batch


def peak(model, batch):
    """Of a step of a model whose optimizer has its states."""
    optimizer = shardwise.build_optimizer(model, torch.optim.AdamW, lr=0.0)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)  # a backward would have FSDP2 make what a first step makes
    optimizer.step()
    optimizer.zero_grad()
    with PeakCount(model) as count, dropped_output(registry_of(model).context):
        model(**batch).loss.backward()
        shardwise.clip_grad_norm_(model, 1.0)
        optimizer.step()
    return count.peak_bytes


def rehearse(layout, spec):
    shape = shardwise.MeshShape.parse(layout)
    step = Rehearsal(source=model_for(shape).config, shape=shape, spec=spec)
    found = step.run_step(num_rows=ROWS, seq_length=LENGTH)
    return found.activations, found.peak_bytes


@functools.cache
def rehearsed(name):
    return rehearse(*CASES[name])


WITHOUT_LOGITS = ("tp2", "fsdp2")


def on_two_ranks(peaks):
    """What a rank finds in every case of two ranks, one after another: to start ranks costs more than a case."""
    held, without_logits = {}, {}
    for name, (layout, spec) in CASES.items():
        if shardwise.MeshShape.parse(layout).world_size == 2:
            with shardwise.Mesh.open(layout) as mesh:
                torch.manual_seed(0)
                held[name] = hold(mesh, spec, peaks[name])
    traffic = communicate(COUNTED), {name: encode_an_image(*each) for name, each in WITH_IMAGES.items()}
    for name in WITHOUT_LOGITS:  # last: it changes a constant
        layout, spec = CASES[name]
        with shardwise.Mesh.open(layout) as mesh:
            torch.manual_seed(0)
            without_logits[name] = hold_without_logits(mesh, spec)
    with shardwise.Mesh.open("tp2"), pytest.raises(MeshError, match="has a process group"):
        rehearse("tp2", ParallelSpec())
    return held, without_logits, traffic


@pytest.fixture(scope="module")
def found():
    """What two ranks found: held, held without logits, communicated."""
    return spawn(on_two_ranks, 2, {name: rehearsed(name)[1] for name in CASES})


@pytest.mark.spawn
@pytest.mark.parametrize("name", [name for name, (layout, _) in CASES.items() if "." not in layout])
def test_what_is_rehearsed_is_what_ranks_hold(found, name):
    assert found[0][0][name] == rehearsed(name)


@pytest.mark.spawn
@pytest.mark.parametrize(("layout", "spec"), [CASES["fsdp2.tp2 sp"]], ids=["fsdp2.tp2 sp"])
def test_what_is_rehearsed_is_what_four_ranks_hold(on_ranks, layout, spec):
    expected = rehearsed("fsdp2.tp2 sp")
    assert on_ranks(hold, peak_bytes=expected[1])[0] == expected


@pytest.mark.single
@pytest.mark.parametrize(
    ("spec", "attention"),
    [
        (ParallelSpec(), "eager"),
        (ParallelSpec(precision=Precision()), "sdpa"),
        (ParallelSpec(recompute=Recompute(mode="full")), "sdpa"),
    ],
    ids=["float32", "bfloat16", "full"],
)
def test_the_peak_of_a_step_is_rehearsed_to_the_byte(spec, attention):
    with shardwise.Mesh.open("tp1", device="cpu") as mesh:
        model, batch = build(mesh, spec)
        model.set_attn_implementation(attention)
        found = peak(model, batch)
    expected = Rehearsal(source=model.config, shape=shardwise.MeshShape(), spec=spec).run_step(
        num_rows=ROWS, seq_length=LENGTH
    )
    assert found == expected.peak_bytes
    gradients = sum(each.grad.nbytes for each in model.parameters())
    assert found > max(gradients, expected.activations.total)


def hold_without_logits(mesh, spec):
    """The same of a step that makes its logits some rows at a time."""
    cross_entropy.CHUNK_ELEMENTS = 96 * 4
    model = model_for(mesh.shape)
    batch = rows_of(tiny_batch(model, rows=ROWS * mesh.data_size, length=LENGTH), mesh)
    model = shardwise.parallelize(model, mesh, **vars(spec)).train()
    with MemoryCount(model) as count, dropped_output(registry_of(model).context):
        loss = model(**batch).loss
        held = settled(count)
    loss.backward()
    return held


@pytest.mark.spawn
@pytest.mark.parametrize("name", WITHOUT_LOGITS)
def test_logits_that_are_not_made_are_not_counted(monkeypatch, found, name):
    layout, spec = CASES[name]
    usual = rehearsed(name)[0].activations
    monkeypatch.setattr(cross_entropy, "CHUNK_ELEMENTS", 96 * 4)
    without = rehearse(layout, spec)[0]
    assert without == found[0][1][name] and without.activations < usual


@pytest.mark.single
def test_more_ranks_hold_less_each():
    on_four, _ = rehearse("tp4", ParallelSpec(sequence_parallel=True))
    assert on_four.activations < rehearsed("tp2 sp")[0].activations < rehearsed("tp2")[0].activations


@pytest.mark.single
def test_what_depends_on_values_is_said_to():
    config = transformers.XmodConfig(
        hidden_size=32, num_attention_heads=4, num_hidden_layers=2, intermediate_size=32, vocab_size=64, is_decoder=True
    )
    config.default_language = "en_XX"
    assert "is not known: DynamicOutputShape" in describe(config, "tp1", batch=(2, 16)).memory


@pytest.mark.single
def test_frozen_parameters_are_not_looked_at_over_fsdp():
    # On a GPU a look would wait for the device once a step; here there is nothing to look at.
    adapter = LoraConfig(target_modules=["q_proj"])
    found = describe(tiny_model("llama").config, "fsdp2", batch=(ROWS, LENGTH), adapter=adapter)
    assert "peak during a step: " in found.memory


def peak_of_stages(layout, sizes):
    """The peak of this rank in a step of a pipeline, and its pp coordinate."""
    with shardwise.Mesh.open(layout) as mesh:
        model = shardwise.load(transformers.LlamaConfig(**sizes), mesh).train()
        optimizer = shardwise.build_optimizer(model, torch.optim.AdamW, lr=1e-3)
        step, ids = shardwise.TrainStep(model, mesh, num_microbatches=4), torch.arange(8 * LENGTH).view(8, LENGTH)
        for count in (nullcontext(), PeakCount(model)):
            with count:
                step({"input_ids": ids, "labels": ids})
                optimizer.step()
                optimizer.zero_grad()
        kept = sum(each.to_local().nbytes for each in model.parameters())
        return 3 * kept + count.peak_bytes, mesh.coord("pp")


@pytest.mark.spawn
def test_a_step_of_a_pipeline_needs_about_what_is_said():
    sizes = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 6}
    sizes["num_attention_heads"] = 4
    fullest, coord = max(spawn(peak_of_stages, 4, "pp2.fsdp2", sizes))
    found = describe(transformers.LlamaConfig(**sizes), "pp2.fsdp2", batch=(2, LENGTH), num_microbatches=4).memory
    told, of = re.search(r"a step needs about ([\d.]+) MiB on the fullest rank, of pp (\d)", found).groups()
    assert int(of) == coord and float(told) * 2**20 == pytest.approx(fullest, rel=0.1)


@pytest.mark.single
@pytest.mark.parametrize(
    ("family", "lengths"), [*([("gemma2", [3, 5])] if FULL_PRODUCT else []), ("deepseek_v3", [2, 3])]
)
def test_layers_that_repeat_are_counted_and_not_run(monkeypatch, family, lengths):
    config = tiny_model(family).config
    config = type(config)(**{**config.to_dict(), "layer_types": None, "num_hidden_layers": 5 + 4 * FULL_PRODUCT})
    spec = ParallelSpec(sequence_parallel=family != "deepseek_v3")
    ran, real = [], rehearsal._run_step
    count = lambda model, batch: ran.append(model.config.num_hidden_layers) or real(model, batch)  # noqa: E731
    monkeypatch.setattr(rehearsal, "_run_step", count)
    short = str(describe(config, "fsdp2.tp2", **vars(spec)))
    monkeypatch.setattr(rehearsal, "repeating_lengths", lambda kinds: None)
    assert short == str(describe(config, "fsdp2.tp2", **vars(spec)))
    assert ran == [*lengths, config.num_hidden_layers] and "over tp, a microbatch of 1 x 16 tokens: " in short


@pytest.mark.single
def test_of_stages_that_are_alike_one_runs(monkeypatch):
    config = tiny_model("llama", num_hidden_layers=6).config
    ran, real = [], rehearsal._run_stage
    monkeypatch.setattr(rehearsal, "_run_stage", lambda *given: ran.append(given[2]) or real(*given))
    short = str(describe(config, "pp6.tp2", batch=(2, 16)))
    assert ran == [0, 1, 5]
    monkeypatch.setattr(rehearsal, "layer_kinds", lambda config: [])
    assert short == str(describe(config, "pp6.tp2", batch=(2, 16)))
    assert ran[3:] == list(range(6))


COUNTED = {
    "cohere2": ParallelSpec(),  # one sum for attention and MLP
    "olmo2": ParallelSpec(),  # norms over split features
    "llama": ParallelSpec(sequence_parallel=True),
    "gpt_neox": ParallelSpec(),
}


def communicate(families):
    """What this rank communicates in forward and backward, and in the gradient phase."""
    found = {}
    with shardwise.Mesh.open("tp2") as mesh:
        for family, spec in families.items():
            model = tiny_model(family, num_hidden_layers=1)
            batch = tiny_batch(model, rows=ROWS, length=LENGTH)
            model = shardwise.parallelize(model, mesh, **vars(spec)).train()
            with CommunicationCount() as count, gradients_of(model).no_sync():
                model(**batch).loss.backward()
                step = count.traffic()
            found[family] = (str(step), str(count.traffic() - step))
    return found


@pytest.mark.spawn
def test_what_plan_prints_is_what_ranks_communicate(found):
    traffic = [rank[2][0] for rank in found]
    assert traffic[0] == traffic[1]
    for family, spec in COUNTED.items():
        config = tiny_model(family, num_hidden_layers=1).config
        text = str(describe(config, "tp2", batch=(ROWS, LENGTH), **vars(spec)))
        step, after = traffic[0][family]
        assert f"over tp, a microbatch of {ROWS} x {LENGTH} tokens: {step}\n" in text
        assert (f"gradient phase, once a step: {after}\n" in text) == (after != "nothing")
    assert "in a layer: 1 in its forward, 1 in its backward" in str(describe(tiny_model("cohere2").config, "tp2"))


WITH_IMAGES = {"qwen2_vl": (qwen2_vl, qwen2_vl_batch(rows=[3])), "llava": (llava, llava_batch(rows=[2]))}
"""Models with a row that has one image, and towers of two layers."""


def encode_an_image(make_model, batch):
    """What this rank communicates in forward and backward of a row with an image, more than without it."""
    found = []
    without = {name: value for name, value in batch.items() if name not in ("pixel_values", "image_grid_thw")}
    with shardwise.Mesh.open("tp2") as mesh:
        model = shardwise.parallelize(make_model(), mesh).train()
        for each in (batch, without):
            with CommunicationCount() as count, gradients_of(model).no_sync():
                model(**each).loss.backward()
            found.append(count.traffic())
    return found[0] - found[1]


@pytest.mark.spawn
@pytest.mark.parametrize("family", WITH_IMAGES)
def test_plan_counts_what_an_image_adds(monkeypatch, found, family):
    counted, real = [], rehearsal._encode
    monkeypatch.setattr(rehearsal, "_encode", lambda *given: counted.append(real(*given)) or counted[0])
    monkeypatch.setattr(rehearsal, "_FEW_PATCHES", (1, 4, 4))
    model = WITH_IMAGES[family][0]()
    text = str(describe(model.config, "fsdp2.tp2", auto_class=type(model), batch=(ROWS, LENGTH)))
    assert counted == [found[0][2][1][family]]
    assert counted[0].calls == {"all_reduce": 8}, "two layers; two sums in each, forward and backward"
    assert f", besides: {counted[0]}\n" in text and "over tp, for each image, pixel_values of " in text
    assert "peak during a step: " in text


@pytest.mark.single
def test_a_tower_without_known_inputs_does_not_end_the_plan(monkeypatch):
    def nothing(*_, **__):
        raise UnsupportedError("no batch for a tower", why="it is odd")

    monkeypatch.setattr(rehearsal, "make_medium", nothing)
    model = WITH_IMAGES["llava"][0]()
    text = str(describe(model.config, "tp2", auto_class=type(model)))
    assert "over tp, for each image, pixel_values, besides: cannot be counted: it is odd" in text
