"""The order of attention kernels: measured on a card, kept, read, and set around every attention of a step."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention import SDPBackend, _cur_sdpa_kernel_backends, sdpa_kernel

import shardwise
from shardwise.api.describing import describe
from shardwise.optim.gradients import gradients_of
from shardwise.runtime import attention_kernels
from shardwise.runtime.attention_kernels import chosen_kernels, measure_kernels, read_orders, take_kernels
from tests.families import tiny_batch, tiny_model

pytestmark = pytest.mark.single

CPU = torch.device("cpu")


@pytest.fixture
def card(monkeypatch, tmp_path):
    """A card on which cuDNN is the fastest, flash attention cannot, and another kernel is wrong where there is a mask;
    measured already, for float32.
    """
    seconds = {SDPBackend.EFFICIENT_ATTENTION: 2.0, SDPBackend.CUDNN_ATTENTION: 1.0}

    def computed(kernel, inputs, *, has_mask):
        if kernel is SDPBackend.FLASH_ATTENTION:
            raise RuntimeError("No available kernel.")
        is_wrong = kernel is SDPBackend.EFFICIENT_ATTENTION and has_mask
        return [each.detach() * (1 + is_wrong) for each in inputs]

    monkeypatch.setattr(attention_kernels, "_DTYPES", (torch.float32,))
    monkeypatch.setattr(attention_kernels, "_SIZES", (64,))
    monkeypatch.setattr(attention_kernels, "_LENGTH", 8)
    monkeypatch.setattr(attention_kernels, "_place", lambda device: tmp_path / "cards" / "card.json")
    monkeypatch.setattr(attention_kernels, "_computed", computed)
    monkeypatch.setattr(attention_kernels, "_time", lambda kernel, inputs, *, has_mask: seconds[kernel])
    measure_kernels(CPU)
    take_kernels(CPU)
    yield tmp_path / "cards" / "card.json"
    attention_kernels._taken.clear()


def test_what_was_measured_is_read_and_a_damaged_file_is_none(card):
    assert read_orders(CPU) == {
        "float32 64 causal": ["cudnn", "efficient", "flash"],
        "float32 64 mask": ["cudnn", "flash"],
    }
    for damaged in ("{", '{"float32 64 causal": ["fast"]}', "[]"):
        card.write_text(damaged)
        assert read_orders(CPU) == {}


def test_a_kernel_that_computes_what_torch_does_passes():
    """By the real computation of the CPU, which has one of these kernels."""
    inputs = attention_kernels._draw(torch.bfloat16, 64, CPU, 32)
    exact = attention_kernels._draw(torch.float32, 64, CPU, 32)
    for has_mask in (False, True):
        found = attention_kernels._computed(SDPBackend.FLASH_ATTENTION, inputs, has_mask=has_mask)
        expected = attention_kernels._computed(SDPBackend.MATH, exact, has_mask=has_mask)
        assert len(found) == 4 and all(map(attention_kernels._is_near, found, expected))


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")  # torch's tracing of what it does
@pytest.mark.parametrize("compiled", [None, shardwise.Compile(backend="aot_eager")])
def test_forward_and_recomputation_attend_as_measured_and_whoever_comes_after_as_torch_does(monkeypatch, compiled):
    """CPUs have one fused kernel, and take it unless the order lacks it."""
    model = tiny_model("llama", num_hidden_layers=1).train()
    model.set_attn_implementation("sdpa")
    batch, before = tiny_batch(model, rows=1, length=8), _cur_sdpa_kernel_backends(with_priority=True)
    names = []
    with shardwise.Mesh.open("tp1") as mesh:
        model = shardwise.parallelize(model, mesh, recompute=shardwise.Recompute(mode="full"), compilation=compiled)
        gradients_of(model).is_late = True
        step = shardwise.TrainStep(model, mesh)
        monkeypatch.setitem(attention_kernels._taken, (torch.float32, 64, False), ["math"])
        for _ in range(2):
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
                step(batch)
            names.append([event.name for event in profile.events() if "_scaled_dot_product" in event.name])
            attention_kernels._taken.clear()
            torch.compiler.reset()
    mine, torchs = names
    assert sum("math" in name for name in mine) >= 2 * (compiled is None) and not any("flash" in name for name in mine)
    assert any("flash" in name for name in torchs)
    assert _cur_sdpa_kernel_backends(with_priority=True) == before


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # as above
@pytest.mark.parametrize("compiled", [False, True])
def test_a_kernel_that_is_switched_off_stays_off(card, compiled):
    def chosen(query):
        return query + len(chosen_kernels(query, has_mask=False) or ())

    query, before = torch.zeros(1, 1, 2, 64), _cur_sdpa_kernel_backends(with_priority=True)
    run = torch.compile(chosen, backend="eager", fullgraph=True) if compiled else chosen
    counts = []
    for kernels in (before, [SDPBackend.MATH, SDPBackend.CUDNN_ATTENTION], [SDPBackend.OVERRIDEABLE]):
        with sdpa_kernel(kernels):
            counts.append(int(run(query).max()))
        torch.compiler.reset()
    assert counts == [4, 2, 0]
    with sdpa_kernel([SDPBackend.MATH, SDPBackend.CUDNN_ATTENTION]):
        assert chosen_kernels(query, has_mask=False) == [SDPBackend.CUDNN_ATTENTION, SDPBackend.MATH]


def test_the_plan_says_by_what_it_attends():
    config = tiny_model("llama").config
    for name, expected in (("eager", "the model's own (eager)"), ("sdpa", "torch's kernels, in torch's order")):
        config._attn_implementation = name
        assert f"attention: {expected}" in str(describe(config, "tp1"))
    assert f"attention: {expected}" in str(describe(config, "pp2"))
