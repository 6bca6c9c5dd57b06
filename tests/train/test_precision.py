"""Mixed precision keeps float32 parameters and computes in a narrower dtype, the same on every layout."""

from __future__ import annotations

import copy
import math

import peft
import pytest
import torch

import shardwise
from shardwise.errors import ConfigError, GradientError, UnsupportedError
from shardwise.optim.gradients import LossScale, gradients_of
from shardwise.parameters.registry import local_part
from shardwise.parameters.replicas import find_unequal_replicas
from shardwise.ranks.spawn import spawn
from tests.families import rows_of, tiny_batch, tiny_model

ROWS = 4


def train_mixed(mesh, compute, mode):
    """The loss, and the worst gradient relative to that of the unsplit model in the dtype of computation."""
    whole = tiny_model("llama")
    batch = tiny_batch(whole, rows=ROWS)
    model = shardwise.parallelize(
        copy.deepcopy(whole),
        mesh,
        precision=shardwise.Precision(compute=compute),
        recompute=shardwise.Recompute(mode=mode),
    )
    reference = copy.deepcopy(whole).to(getattr(torch, compute))
    loss = reference(**batch).loss
    loss.backward()
    result = shardwise.TrainStep(model, mesh)(rows_of(batch, mesh))
    gradients = shardwise.full_gradients(model)
    norms = {name: parameter.grad.float() for name, parameter in reference.named_parameters()}
    worst = max(
        float((gradients[name] - norm).abs().max() / norm.abs().max().clamp(min=1e-3)) for name, norm in norms.items()
    )
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert {gradient.dtype for gradient in gradients.values()} == {torch.float32}
    optimizer = shardwise.build_optimizer(model, torch.optim.AdamW, lr=1e-3)
    optimizer.step()
    return float(loss.detach()), float(result.loss), worst


@pytest.mark.spawn
@pytest.mark.parametrize(
    ("layout", "compute", "mode"),
    [  # tp alone casts parameters by itself, FSDP2 where there are data ranks
        *((layout, *each) for layout in ("tp2", "fsdp2") for each in (("bfloat16", "none"), ("float16", "full"))),
        ("ddp2", "float16", "none"),
        ("fsdp2.tp2", "bfloat16", "full"),
    ],
)
def test_masters_stay_in_float32_and_gradients_are_those_of_the_narrow_model(on_ranks, layout, compute, mode):
    for loss, found, worst in on_ranks(train_mixed):
        assert found == pytest.approx(loss, rel=5e-3)
        assert worst < (0.04 if compute == "bfloat16" else 0.01)


def train_the_last_layer(mesh):
    """What differs from the unsplit model in bfloat16, and which dtypes there are at rest, after a step and a save."""
    whole = tiny_model("llama")
    for name, parameter in whole.named_parameters():
        parameter.requires_grad_(name.startswith("model.layers.1."))
    batch = tiny_batch(whole, rows=ROWS)
    model = shardwise.parallelize(copy.deepcopy(whole), mesh, precision=shardwise.Precision())
    reference = copy.deepcopy(whole).to(torch.bfloat16)
    loss = reference(**batch).loss
    loss.backward()
    optimizer = shardwise.build_optimizer(model, torch.optim.AdamW, lr=1e-3)
    found = shardwise.TrainStep(model, mesh, num_microbatches=mesh.size("pp"))(rows_of(batch, mesh)).loss
    gradients = shardwise.full_gradients(model)
    expected = {name: each.grad for name, each in reference.named_parameters() if each.grad is not None}
    assert gradients.keys() == expected.keys()
    worst = max(float((gradients[name] - each).abs().max() / each.abs().max()) for name, each in expected.items())
    optimizer.step()
    state = shardwise.full_state_dict(model)
    for name, value in state.items():
        is_trained = name.startswith("model.layers.1.")
        assert value.dtype is (torch.float32 if is_trained else torch.bfloat16), name
        assert is_trained is not torch.equal(value, whole.get_parameter(name).to(value.dtype)), name
    held = {parameter.dtype for parameter in model.parameters() if not parameter.requires_grad}
    model.requires_grad_(True)
    with pytest.raises(UnsupportedError, match="which was frozen when the model was split"):
        shardwise.build_optimizer(model, torch.optim.AdamW, lr=1e-3)
    return float(loss.detach()), float(found), worst, held


@pytest.mark.spawn
@pytest.mark.parametrize("layout", ["tp2", "fsdp2", "pp2"])
def test_what_is_frozen_rests_in_the_dtype_of_computation(on_ranks, layout):
    for loss, found, worst, held in on_ranks(train_the_last_layer):
        assert found == pytest.approx(loss, rel=5e-3)
        assert worst < 0.04
        assert held <= {torch.bfloat16}


@pytest.mark.single
def test_a_base_is_loaded_narrow_and_its_adapters_wide(tmp_path):
    whole = tiny_model("llama")
    whole.save_pretrained(tmp_path)
    adapter = peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    with shardwise.Mesh.open("tp1") as mesh:
        for source in (str(tmp_path), whole.config):
            model = shardwise.load(source, mesh, adapter=adapter, precision=shardwise.Precision())
            kinds = {parameter.requires_grad: parameter.dtype for parameter in model.parameters()}
            assert kinds == {True: torch.float32, False: torch.bfloat16}


def step_on_nonfinite(policy):
    """Whether the step raised, and whether parameters moved, where only rank 1 sees an infinite gradient."""
    with shardwise.Mesh.open("fsdp2") as mesh:
        model = shardwise.parallelize(
            tiny_model("llama"), mesh, precision=shardwise.Precision(compute="float32", nonfinite=policy)
        )
        optimizer = shardwise.build_optimizer(model, torch.optim.SGD, lr=0.1)
        before = shardwise.full_state_dict(model)
        shardwise.TrainStep(model, mesh)(rows_of(tiny_batch(model, rows=ROWS), mesh))
        if mesh.rank == 1:
            next(model.parameters()).grad.to_local()[0] = math.inf
        error = ""
        try:
            optimizer.step()
        except GradientError as raised:
            error = str(raised)
        after = shardwise.full_state_dict(model)
        return error, max(float((after[name] - before[name]).abs().nan_to_num(nan=9.0).max()) for name in before)


@pytest.mark.spawn
def test_what_happens_to_infinite_gradients_is_decided_alike_on_every_rank():
    first, second = spawn(step_on_nonfinite, 2, "raise")
    assert "gradient norm is inf" in first[0] and "gradient norm is inf" in second[0]
    assert "on another rank" in first[0] and "model.embed_tokens.weight" in second[0]
    assert first[1] == second[1] == 0
    assert spawn(step_on_nonfinite, 2, "skip") == [("", 0.0)] * 2
    for error, moved in spawn(step_on_nonfinite, 2, "ignore"):
        assert not error and moved > 0


def step_after_a_second_backward(mesh):
    """A norm that was computed before a backward says nothing of the gradients after it."""
    precision = shardwise.Precision(compute="float32", nonfinite="raise")
    model = shardwise.parallelize(tiny_model("llama"), mesh, precision=precision)
    optimizer, batch = shardwise.build_optimizer(model, torch.optim.SGD, lr=0.1), tiny_batch(model)
    model(**batch).loss.backward()
    shardwise.clip_grad_norm_(model, 1.0)
    (model(**batch).loss * math.inf).backward()
    with pytest.raises(GradientError, match="gradient norm is nan"):
        optimizer.step()


@pytest.mark.spawn
@pytest.mark.parametrize("layout", ["tp2"])
def test_a_norm_is_that_of_the_gradients_there_are(on_ranks, layout):
    on_ranks(step_after_a_second_backward)


@pytest.mark.single
def test_overflowing_float16_losses_are_scaled_less_and_the_step_is_left_out():
    with shardwise.Mesh.open("tp1") as mesh:
        model = shardwise.parallelize(tiny_model("llama"), mesh, precision=shardwise.Precision(compute="float16"))
        optimizer = shardwise.build_optimizer(model, torch.optim.SGD, lr=0.1)
        step, batch = shardwise.TrainStep(model, mesh), tiny_batch(model)
        scale = gradients_of(model).loss_scale
        scale.factor.fill_(2.0**40)
        before = shardwise.full_state_dict(model)
        step(batch)
        optimizer.step()
        optimizer.zero_grad()
        after = shardwise.full_state_dict(model)
        assert scale.factor == 2.0**39 and all(torch.equal(before[name], after[name]) for name in before)
        scale.factor.fill_(2.0**10)
        step(batch)
        optimizer.step()
        assert not torch.equal(before["lm_head.weight"], shardwise.full_state_dict(model)["lm_head.weight"])


@pytest.mark.single
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_scale_is_doubled_behind_enough_good_steps(dtype):
    usual = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        scale = LossScale(torch.device("cpu"), value=8.0, interval=2)
    finally:
        torch.set_default_dtype(usual)
    for is_bad, expected in ((0.0, 8.0), (0.0, 16.0), (1.0, 8.0), (0.0, 8.0), (0.0, 16.0)):
        scale.update(torch.tensor(is_bad))
        assert scale.factor == expected


@pytest.mark.single
def test_narrow_masters_draw_a_warning_and_float16_ones_an_error():
    precision = shardwise.Precision(params="bfloat16", compute="bfloat16")
    with shardwise.Mesh.open("tp1") as mesh, pytest.warns(UserWarning, match="lost to rounding"):
        model = shardwise.parallelize(tiny_model("llama"), mesh, precision=precision)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    with pytest.raises(ConfigError, match="updates are lost"):
        shardwise.Precision(params="float16")


def autocast(layout):
    with shardwise.Mesh.open(layout) as mesh:
        whole = tiny_model("llama")
        batch = tiny_batch(whole)
        model = shardwise.parallelize(copy.deepcopy(whole), mesh)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            expected, found = whole(**batch).loss, shardwise.TrainStep(model, mesh)(batch).loss
        expected.backward()
        gradients = shardwise.full_gradients(model)
        return (
            float(expected.detach()),
            float(found),
            max(
                float((gradients[name] - parameter.grad).abs().max() / parameter.grad.abs().max())
                for name, parameter in whole.named_parameters()
            ),
        )


@pytest.mark.spawn
def test_autocast_works_around_a_step():
    for expected, found, worst in spawn(autocast, 2, "tp2"):
        assert found == pytest.approx(expected, rel=5e-3)
        assert worst < 0.05


def overflow_on_one_rank(mesh):
    """A good step, one that overflows on rank 1 alone, a good one: what each changed, the scales, unequal copies."""
    model = tiny_model("llama", num_hidden_layers=1).train()
    model = shardwise.parallelize(model, mesh, precision=shardwise.Precision(compute="float16"))
    gradients = gradients_of(model)
    gradients.is_late = True
    gradients.loss_scale.factor.fill_(2.0**10)
    optimizer = shardwise.build_optimizer(model, torch.optim.AdamW, lr=1e-3)
    step, batch = shardwise.TrainStep(model, mesh), rows_of(tiny_batch(model, rows=4), mesh)
    changed, scales = [], []
    for is_bad in (False, True, False):
        step(batch)
        if is_bad and mesh.rank == 1:
            local_part(model.model.layers[0].self_attn.q_proj.weight.grad)[0, 0] = math.inf
        before = {name: local_part(value).clone() for name, value in model.named_parameters()}
        optimizer.step()
        optimizer.zero_grad()
        changed.append(sum(not torch.equal(local_part(p), before[name]) for name, p in model.named_parameters()))
        scales.append(float(gradients.loss_scale.factor))
    return changed, scales, find_unequal_replicas(model)


@pytest.mark.spawn
@pytest.mark.parametrize("layout", ["tp2", "fsdp2"])
def test_what_overflows_on_one_rank_is_left_out_on_all(on_ranks, layout):
    for changed, scales, unequal in on_ranks(overflow_on_one_rank):
        assert changed[0] and not changed[1] and changed[2] and scales == [2.0**10, 2.0**9, 2.0**9] and not unequal
