"""The order of attention kernels: measured on a card, kept, read, and set around every attention of a step."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch.nn.attention import SDPBackend, _cur_sdpa_kernel_backends, sdpa_kernel, varlen

import shardwise
from shardwise.api.describing import describe
from shardwise.data.rows import segment_inputs
from shardwise.optim.gradients import gradients_of
from shardwise.parallel.compiled import count_compilation
from shardwise.runtime import attention_kernels, own_attention
from shardwise.runtime.attention_kernels import chosen_kernels, measure_kernels, read_orders, take_kernels
from tests.families import tiny_batch, tiny_model
from tests.varlen_loop import attend_as_operator, attend_by_loop

pytestmark = pytest.mark.single

CPU = torch.device("cpu")


@pytest.fixture
def card(monkeypatch, tmp_path):
    """A card on which cuDNN is the fastest, flash attention cannot, and another kernel is wrong where there is a mask;
    measured already, for float32.
    """
    seconds = {SDPBackend.EFFICIENT_ATTENTION: 2.0, SDPBackend.CUDNN_ATTENTION: 1.0}

    def computed(kernels, inputs, hidden):
        if kernels is SDPBackend.FLASH_ATTENTION:
            raise RuntimeError("No available kernel.")
        is_wrong = kernels is SDPBackend.EFFICIENT_ATTENTION and hidden is not None
        return [each.detach() * (1 + is_wrong) for each in inputs]

    monkeypatch.setattr(attention_kernels, "_DTYPES", (torch.float32,))
    monkeypatch.setattr(attention_kernels, "_SIZES", (64,))
    monkeypatch.setattr(attention_kernels, "_LENGTH", 8)
    monkeypatch.setattr(attention_kernels, "_place", lambda device: tmp_path / "cards" / "card.json")
    monkeypatch.setattr(attention_kernels, "_computed", computed)
    is_varlen = {True: 0.5, False: 1.0}
    monkeypatch.setattr(
        attention_kernels,
        "_time",
        lambda kernels, inputs, hidden: seconds[kernels] if kernels in seconds else is_varlen[kernels is None],
    )
    measure_kernels(CPU)
    take_kernels(CPU)
    yield tmp_path / "cards" / "card.json"
    attention_kernels._taken.clear()


def test_what_was_measured_is_read_and_a_damaged_file_is_none(card):
    assert read_orders(CPU) == {
        "float32 64 causal": ["cudnn", "efficient", "flash"],
        "float32 64 mask": ["cudnn", "flash"],
        "float32 64 packed": ["varlen", "mask"],
        "float32 64 packed window": ["varlen", "mask"],
    }
    for damaged in ("{", '{"float32 64 causal": ["fast"]}', "[]"):
        card.write_text(damaged)
        assert read_orders(CPU) == {}


def test_a_kernel_that_computes_what_torch_does_passes():
    """By the real computation of the CPU, which has one of these kernels."""
    inputs = attention_kernels._draw(torch.bfloat16, 64, CPU, 32)
    exact = attention_kernels._draw(torch.float32, 64, CPU, 32)
    for kind in ("causal", "mask", "packed window"):
        hidden = attention_kernels._hidden(kind, 32, CPU)
        found = attention_kernels._computed(SDPBackend.FLASH_ATTENTION, inputs, hidden)
        expected = attention_kernels._computed(SDPBackend.MATH, exact, hidden)
        assert len(found) == 4 and all(map(attention_kernels._is_near, found, expected))


FAULTS = {
    "right": lambda one: one,
    "a window wider by a token": lambda one: {**one, "window_size": (one["window_size"][0] + 1, 0)},
    "no window": lambda one: {**one, "window_size": (-1, 0)},
    "documents that see each other": lambda one: {**one, "starts": one["starts"][[0, -1]]},
    "another scale": lambda one: {**one, "scale": 0.1},
    "other heads": lambda one: {**one, "key": one["key"].flip(1)},
    "twice the gradient": lambda one: {**one, "key": 2 * one["key"] - one["key"].detach()},
}


@pytest.mark.parametrize("fault", FAULTS)
def test_varlen_is_taken_where_it_is_right(monkeypatch, fault):
    def varlen_attn(query, key, value, starts, *_, scale=None, window_size, enable_gqa=False):
        call = FAULTS[fault]({"key": key, "starts": starts, "window_size": window_size, "scale": scale})
        key, starts = call.pop("key"), call.pop("starts")
        lengths = [int(starts.diff().max())] * 2
        return attend_by_loop(query, key, value, starts, starts, *lengths, enable_gqa=enable_gqa, **call)

    monkeypatch.setattr(varlen, "varlen_attn", varlen_attn)
    monkeypatch.setattr(attention_kernels, "_LENGTH", 16)
    monkeypatch.setattr(attention_kernels, "_time", lambda kernels, inputs, hidden: 2.0 - (kernels is None))
    kinds = ["packed", "packed window"] if fault in ("right", "documents that see each other") else ["packed window"]
    names = [attention_kernels._measured(torch.bfloat16, 64, CPU, kind, ["flash"]) for kind in kinds]
    assert names == [["varlen", "mask"] if fault == "right" else ["mask"]] * len(names), names


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
        monkeypatch.setitem(attention_kernels._taken, (torch.float32, 64, "causal"), ["math"])
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
    with sdpa_kernel([SDPBackend.MATH, SDPBackend.EFFICIENT_ATTENTION], set_priority=True):
        assert int(run(query).max()) == 0  # the caller's own order holds


def test_the_order_is_torchs_again_after_an_attention_with_a_kernel_switched_off(card, monkeypatch):
    query, before = torch.zeros(1, 1, 2, 64), torch._C._get_sdp_priority_order()
    with sdpa_kernel([SDPBackend.MATH, SDPBackend.CUDNN_ATTENTION]):
        for _ in range(2):
            assert len(chosen_kernels(query, has_mask=False)) == 2
            own_attention._attend(torch.nn.Module(), query, query, query, None)
            assert torch._C._get_sdp_priority_order() == before


def test_the_plan_says_by_what_it_attends():
    config = tiny_model("llama").config
    for name, expected in (("eager", "the model's own (eager)"), ("sdpa", "torch's kernels, in torch's order")):
        config._attn_implementation = name
        assert f"attention: {expected}" in str(describe(config, "tp1"))
    assert f"attention: {expected}" in str(describe(config, "pp2"))


def disagreeing(mesh):
    """What is said, and left of the orders, where ranks have measured others."""
    model = tiny_model("llama", num_hidden_layers=1).train()
    model.set_attn_implementation("sdpa")
    batch = tiny_batch(model, rows=2, length=8)
    model = shardwise.parallelize(model, mesh)
    gradients_of(model).is_late = True
    orders = {"float32 64 causal": ["math"] if mesh.rank else ["flash"]}
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        patch.setattr("shardwise.train.step.take_kernels", lambda device: orders)
        patch.setitem(attention_kernels._taken, (torch.float32, 64, "causal"), orders["float32 64 causal"])
        step = shardwise.TrainStep(model, mesh)
        losses = [float(step(batch).loss) for _ in range(2)]
        left = dict(attention_kernels._taken)
    return losses, [str(each.message) for each in said if "doctor" in str(each.message)], left


@pytest.mark.spawn
@pytest.mark.parametrize("layout", ["tp2"])
def test_ranks_whose_cards_were_measured_differently_go_by_torchs_order(on_ranks, layout):
    (losses, said, left), (of_other, silent, of_others) = on_ranks(disagreeing)
    assert losses == of_other and left == of_others == {} and silent == []
    assert len(said) == 1 and said[0].endswith("all ranks go by torch's")


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")  # as above
def test_compiled_and_recomputed_blocks_attend_by_bounds(monkeypatch):
    """To the number that masks give, without a mask, and compiled again once, when the number of documents changes."""
    rows = (((7, 5, 12), (9, 15)), ((3, 3, 3, 15), (20, 4)), ((10, 14), (9, 15)))
    model = tiny_model("mistral", num_hidden_layers=1).train()
    model.set_attn_implementation("sdpa")
    monkeypatch.setattr(varlen, "varlen_attn", attend_as_operator)
    torch.compiler.reset()
    found = []
    with shardwise.Mesh.open("tp1") as mesh:
        for compiled in (None, shardwise.Compile(backend="aot_eager")):
            split = shardwise.parallelize(
                copy.deepcopy(model), mesh, recompute=shardwise.Recompute(mode="full"), compilation=compiled
            )
            gradients_of(split).is_late = True
            step = shardwise.TrainStep(split, mesh)
            size = split.config.head_dim
            if compiled is not None:
                for kind in ("packed", "packed window"):
                    monkeypatch.setitem(attention_kernels._taken, (torch.float32, size, kind), ["varlen", "mask"])
                monkeypatch.setattr("shardwise.runtime.own_attention.mask_of", None)
            before = count_compilation()
            for lengths in rows:
                ids = torch.arange(48).view(2, 24) % 40
                split.zero_grad()
                batch = {"input_ids": ids, "labels": ids, **segment_inputs(lengths, 24, apart="positions")}
                found.append([step(batch).loss, *shardwise.full_gradients(split).values()])
            torch.compiler.reset()
    for mine, masked in zip(found[3:], found[:3], strict=True):
        assert all(torch.allclose(*each, rtol=1e-4, atol=1e-6) for each in zip(mine, masked, strict=True))
    after = count_compilation()
    assert (after.graphs - before.graphs, after.recompiles - before.recompiles) == (2, 1)
