"""Adapters divide as what they adapt, and compute what they compute unsplit: on simulated ranks, one step."""

from __future__ import annotations

import re
from contextlib import nullcontext
from dataclasses import replace

import peft
import pytest
import torch
import transformers
from torch import nn

import shardwise
from shardwise.api.describing import describe
from shardwise.api.prepare import decide
from shardwise.compat.layers.adapters import register_split_layers
from shardwise.compat.layers.linears import ColumnLinear
from shardwise.errors import PlanError, UnsupportedError
from shardwise.lora.inject import check_prompts
from shardwise.mesh import Mesh
from shardwise.optim.summing import time_reduction
from shardwise.parallel.facts import decide_split, read_facts
from shardwise.parameters.registry import registry_of
from shardwise.plan.adapters import plan_adapter
from shardwise.plan.options import FsdpPolicy, ParallelSpec
from shardwise.probe import trial
from shardwise.probe.trial import Trial
from shardwise.runtime.adapter_facts import find_model
from shardwise.search.planning import plan_for
from shardwise.sharding.placement import Replicate, Split
from shardwise.tiny.models import build_tiny_model, make_batch, shrink_config
from shardwise.topology.shape import MeshShape
from tests.families import FULL_PRODUCT, rows_of, tiny_batch, tiny_model
from tests.staged import split_and_train

# peft warns of attributes that transformers has renamed, of tied layers, and of patterns of its own for experts.
pytestmark = [
    pytest.mark.single,
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore:.*_pattern keys:RuntimeWarning"),
]

EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


def t5():
    config = shrink_config(transformers.T5Config(), without_dropout=True)
    return build_tiny_model(config, transformers.AutoModelForSeq2SeqLM, seed=0).eval()


def with_lora(family, *, tied=False, name="default", model=None, **options):
    """A tiny model with adapters that are no zeros."""
    base = model or (t5() if family == "t5" else tiny_model(family, tied=tied))
    torch.manual_seed(5)
    given = {"r": 4, "target_modules": "all-linear", "init_lora_weights": False} | options
    return peft.inject_adapter_in_model(peft.LoraConfig(**given), base, adapter_name=name).eval()


def verdict(model, *, tp_size=2, sequence_parallel=False, in_training=False):
    spec = ParallelSpec(sequence_parallel=sequence_parallel)
    plan = plan_for(model, spec, num_parts=tp_size)
    padded = make_batch(model, seed=0, padding="right") if in_training else None
    trial = Trial(model, make_batch(model, seed=0), num_parts=tp_size, padded=padded)
    return trial.run(plan, sequence_parallel=sequence_parallel)


def decided(model, *, tp_size=2):
    facts = read_facts(model)
    plan = plan_for(model, ParallelSpec(), num_parts=tp_size, facts=facts)
    return decide_split(plan, model, facts, MeshShape(tp_size=tp_size), ParallelSpec())


MODES = {
    "llama": ["tp2+sp", *["tp4"] * FULL_PRODUCT],
    "gpt2": ["tp4", "tp2+sp"] * FULL_PRODUCT,
    "phi3": ["tp2+sp", *["tp2"] * FULL_PRODUCT],
    "qwen3": ["tp4", *["tp2+sp"] * FULL_PRODUCT],
    "mixtral": ["tp4"],
    "deepseek_v3": ["tp2"],
    "bert": ["tp2+sp"],
    "t5": ["tp2"] * FULL_PRODUCT,
}


@pytest.mark.parametrize(("family", "mode"), [(family, mode) for family, modes in MODES.items() for mode in modes])
def test_every_gradient_is_that_of_the_unsplit_model(family, mode):
    found = verdict(with_lora(family), tp_size=int(mode[2]), sequence_parallel=mode.endswith("sp"))
    assert found.passed, found.reason


BOTH, ONE, PARTS = (False, True), (False,), (True,)
TARGETS = [
    ("llama", {"target_modules": ["q_proj", "v_proj"]}, ONE),
    ("llama", {"tied": True, "target_modules": ["q_proj", "embed_tokens"]}, ONE),
    ("llama", {"tied": True, "target_modules": ["q_proj", "embed_tokens", "lm_head"]}, PARTS),
    ("llama", {"target_modules": r".*\.(o_proj|embed_tokens|lm_head)"}, BOTH),
    ("llama", {"target_modules": ["q_proj"], "modules_to_save": ["lm_head", "embed_tokens"]}, ONE),
    ("llama", {"target_modules": ["q_proj"], "modules_to_save": ["mlp", "norm"]}, PARTS),
    (
        "llama",
        {"target_modules": ["q_proj", "k_proj"], "rank_pattern": {"q_proj": 2}, "layers_to_transform": [1]},
        PARTS,
    ),
    ("llama", {"use_rslora": True, "lora_alpha": 3, "alpha_pattern": {"k_proj": 5}}, ONE),
    ("llama", {"init_lora_weights": "pissa"}, ONE),
    ("gpt2", {"bias": "all"}, PARTS),
    ("gpt2", {"bias": "lora_only"}, ONE),
    ("gpt2", {"lora_bias": True}, BOTH),
    ("mixtral", {"target_modules": ["q_proj"], "target_parameters": EXPERTS}, ONE),
]
"""With sequence parallelism or without: both for what is added behind a row's or a column's sum, else one of them."""


@pytest.mark.parametrize(
    ("family", "options", "sequence_parallel"),
    [
        (family, options, sequence_parallel)
        for family, options, chosen in TARGETS
        for sequence_parallel in (BOTH if FULL_PRODUCT else chosen)
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else str(value),
)
def test_all_kinds_of_targets_are_split(family, options, sequence_parallel):
    found = verdict(with_lora(family, **options), sequence_parallel=sequence_parallel)
    assert found.passed, found.reason


@pytest.mark.parametrize(
    ("family", "sequence_parallel"),
    [("llama", True), ("gpt2", False), *([("llama", False), ("gpt2", True)] if FULL_PRODUCT else [])],
)
def test_ranks_drop_the_same_of_what_they_are_given_alike(family, sequence_parallel):
    model = with_lora(family, lora_dropout=0.3)
    found = verdict(model, sequence_parallel=sequence_parallel, in_training=True)
    assert found.passed, found.reason


STAGED = [
    ("llama", {"tied": True, "target_modules": ["q_proj", "embed_tokens", "lm_head"]}),
    ("llama", {"target_modules": ["q_proj"], "modules_to_save": ["mlp", "norm"]}),
    ("llama", {"target_modules": ["q_proj"], "layers_to_transform": [0]}),
    ("mixtral", {}),  # its router, too, whose layer's code runs in foreign stages
]


@pytest.mark.parametrize(("family", "options"), STAGED, ids=lambda value: "-".join(value) if value else "")
def test_stages_hold_the_adapters_of_what_they_hold(monkeypatch, family, options):
    monkeypatch.setattr("shardwise.optim.summing._sum_over_stages", lambda *_: None)  # they are summed here
    model = with_lora(family, **options)
    batch = make_batch(model, seed=0)
    loss, found = split_and_train(model, batch, ParallelSpec(sequence_parallel=True))
    expected = model(**batch).loss
    expected.backward()
    assert abs(loss - float(expected.detach())) < 1e-5
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            allowed = 1e-4 * float(parameter.grad.abs().max()) + 1e-7
            assert float((found[name] - parameter.grad).abs().max()) <= allowed, name


def test_two_adapters_compute_together():
    model = with_lora("llama")
    model = with_lora("llama", model=model, name="two", r=2, target_modules=["q_proj", "o_proj"])
    for module in model.modules():
        if hasattr(module, "lora_A"):
            module.set_adapter(["default", "two"])
    found = verdict(model)
    assert found.passed, found.reason


def test_adapters_cost_no_collective_of_their_own():
    assert verdict(with_lora("llama")).num_collectives == verdict(frozen(tiny_model("llama"))).num_collectives


def frozen(model):
    """Without anything to train before the first region, like the base of adapters."""
    for module in (model.model.embed_tokens, model.model.layers[0].input_layernorm):
        module.requires_grad_(requires_grad=False)
    return model


def test_a_column_and_a_row_have_the_placements_of_their_base():
    parameters = decided(with_lora("llama", tied=True, target_modules=["k_proj", "o_proj", "embed_tokens"])).parameters
    layer, base = "model.layers.0.self_attn", "base_layer.weight"

    def placement(name):
        return parameters[name].placement

    assert placement(f"{layer}.k_proj.lora_A.default.weight") == Replicate()
    assert parameters[f"{layer}.k_proj.lora_A.default.weight"].gradient == "partial"
    assert placement(f"{layer}.k_proj.lora_B.default.weight") == placement(f"{layer}.k_proj.{base}")
    columns = placement(f"{layer}.o_proj.{base}")
    assert isinstance(columns, Split) and columns.dim == 1
    assert placement(f"{layer}.o_proj.lora_A.default.weight") == columns
    assert placement(f"{layer}.o_proj.lora_B.default.weight") == Replicate()
    rows = placement("model.embed_tokens.base_layer.weight")
    assert placement("model.embed_tokens.lora_embedding_A.default") == Split(1, rows.pieces)


def test_the_base_is_planned_as_if_it_stood_alone():
    plain = decided(tiny_model("gpt2")).parameters
    parameters = decided(with_lora("gpt2")).parameters
    renamed = {fqn.replace(".base_layer.", "."): each for fqn, each in parameters.items() if ".lora_" not in fqn}
    assert {fqn: each.placement for fqn, each in renamed.items()} == {
        fqn: each.placement for fqn, each in plain.items()
    }
    assert {fqn: each.gradient for fqn, each in renamed.items()} == {fqn: each.gradient for fqn, each in plain.items()}


REFUSED = [
    (peft.LoraConfig(target_modules=["q_proj"], use_dora=True), "DoraLinearVariant of adapter 'default'"),
    (peft.LoraConfig(target_modules=["q_proj"], trainable_token_indices=[1]), "an adapter of peft.utils"),
    (peft.IA3Config(target_modules=["k_proj"], feedforward_modules=[]), "an adapter of peft.tuners.ia3"),
    # has A and B as LoRA does, and another factor between them, and parameters that no gradient reaches
    (peft.AdaLoraConfig(target_modules=["k_proj"], init_r=4, total_step=9), "an adapter of peft.tuners.adalora"),
]


@pytest.mark.parametrize(("config", "what"), REFUSED, ids=lambda value: type(value).__name__)
def test_adapters_that_read_the_full_weight_are_refused_by_name(config, what):
    model = peft.inject_adapter_in_model(config, tiny_model("llama"))
    with pytest.raises(PlanError, match=f"{what}.* cannot be split over tp=2") as raised:
        decided(model)
    assert "the full weight, of which a rank holds a part" in str(raised.value) and "use fsdp" in str(raised.value)


@pytest.mark.parametrize("option", ["use_dora", "lora_bias"])
def test_what_is_more_than_a_product_is_refused_around_modules_that_divide_themselves(option):
    with Mesh.open("tp1") as mesh:
        model = nn.Sequential(ColumnLinear(4, 4, mesh))
        with pytest.raises(UnsupportedError, match="around parallel layers"):
            register_split_layers(model, peft.LoraConfig(target_modules=["0"], **{option: True}))


IN_COMMON = [
    peft.VBLoRAConfig(target_modules=["q_proj"], num_vectors=8, vector_length=8, topk=2),
    peft.LoraConfig(target_modules=["embed_tokens", "lm_head"], ensure_weight_tying=True),
]


@pytest.mark.parametrize("layout", ["tp2", "fsdp2", "pp2"])
@pytest.mark.parametrize("config", IN_COMMON, ids=lambda value: type(value).__name__)
def test_adapters_with_parameters_in_common_are_refused(config, layout):
    model = find_model(peft.get_peft_model(tiny_model("llama", tied=True), config))
    with pytest.raises(PlanError, match=r"(?s)the adapter on .* cannot be divided over .*its parameters are those of"):
        decide(model, MeshShape.parse(layout), ParallelSpec())


def split_with_parameters_in_common(mesh):
    """What this rank is told."""
    model = peft.get_peft_model(tiny_model("llama", tied=True), IN_COMMON[1])
    with pytest.raises(PlanError, match="its parameters are those of") as raised:
        shardwise.parallelize(model, mesh)
    return str(raised.value)


@pytest.mark.spawn
def test_ranks_refuse_them_together(on_ranks):
    first, second = on_ranks(split_with_parameters_in_common, layout="tp2")
    assert first == second


def gradients_after_zero_grad(mesh):
    """Those of a backward, alone and after another one that FSDP2 had not reduced when gradients were cleared."""
    model = peft.get_peft_model(tiny_model("llama", num_hidden_layers=1), peft.LoraConfig(target_modules=["q_proj"]))
    model = shardwise.parallelize(model, mesh, fsdp=FsdpPolicy(zero_stage=1))
    batch = rows_of(tiny_batch(model, rows=4), mesh)

    def backward():
        model(**batch).loss.backward()
        return {name: each.clone() for name, each in shardwise.full_gradients(model).items()}

    alone = backward()
    time_reduction(registry_of(find_model(model)), is_last=False)
    model(**batch).loss.backward()
    time_reduction(registry_of(find_model(model)), is_last=True)
    model.zero_grad()
    return alone, backward()


@pytest.mark.spawn
def test_the_wrappers_zero_grad_clears_what_is_not_reduced_yet(on_ranks):
    for alone, after in on_ranks(gradients_after_zero_grad, layout="fsdp2"):
        assert alone and all(torch.equal(value, after[name]) for name, value in alone.items())


PROMPTS = [
    (peft.PromptTuningConfig, "pp2", "PROMPT_TUNING.* cannot be cut into stages"),
    (peft.PrefixTuningConfig, "pp2", "PREFIX_TUNING.* cannot be cut into stages"),
    (peft.PrefixTuningConfig, "tp2", "PREFIX_TUNING.* cannot be split over tp=2"),
    (peft.PromptTuningConfig, "tp2", ""),
    (peft.PrefixTuningConfig, "fsdp2", ""),
]


@pytest.mark.parametrize(("kind", "layout", "refusal"), PROMPTS)
def test_prompts_are_refused_where_ranks_cannot_compute_them_alike(kind, layout, refusal):
    model = peft.get_peft_model(tiny_model("llama"), kind(task_type="CAUSAL_LM", num_virtual_tokens=2))
    assert find_model(model) is model.get_base_model()
    plan = decide(find_model(model), MeshShape.parse(layout), ParallelSpec())
    with pytest.raises(PlanError, match=refusal) if refusal else nullcontext():
        check_prompts(model, plan)


def test_trained_rows_of_a_tied_weight_are_not_cut_into_stages():
    config = peft.LoraConfig(target_modules=["q_proj"], trainable_token_indices=[1])
    model = peft.inject_adapter_in_model(config, tiny_model("llama", tied=True))
    with pytest.raises(PlanError, match=r"an adapter of peft.* on .*cannot be cut into stages"):
        decide(model, MeshShape(pp_size=2), ParallelSpec())


def test_adapters_of_a_derived_plan_are_tried_once_and_kept(monkeypatch):
    model = with_lora("gpt2", r=3, lora_dropout=0.1)
    tried = []
    monkeypatch.setattr(trial, "_try", lambda *given, run=trial._try, **more: tried.append(1) or run(*given, **more))
    plans = [plan_for(model, ParallelSpec(), num_parts=2) for _ in range(2)]
    assert plans[0] == plans[1] and tried == [1]


def test_adapters_that_compute_something_else_are_an_error(monkeypatch):
    def whole(adapted, base, *, num_parts):
        found = plan_adapter(adapted, base, num_parts=num_parts)
        return {fqn: replace(each, gradient="full") for fqn, each in found.items()}

    monkeypatch.setattr("shardwise.plan.adapters.plan_adapter", whole)
    with pytest.raises(PlanError, match="the adapters of GPT2LMHeadModel give other results") as raised:
        plan_for(with_lora("gpt2", r=5), ParallelSpec(), num_parts=2)
    assert "gradient of transformer.h.0" in str(raised.value) and "lora_" in str(raised.value)


def test_a_plan_shows_adapters_and_that_frozen_weights_have_no_state():
    config = tiny_model("llama").config
    lora = peft.LoraConfig(r=4, target_modules=["q_proj", "o_proj"])
    text = str(describe(config, "tp2", adapter=lora, batch=(2, 16)))
    assert "model.layers.*.self_attn.q_proj.lora_B.default.weight" in text and "adapter" in text
    assert "as its base" in text or "split dim 0" in text
    plain = str(describe(config, "tp2", batch=(2, 16)))
    adamw = [float(each.partition("AdamW ")[2].split()[0]) for each in (text, plain)]
    assert adamw[0] < 0.2 * adamw[1]
    stages = str(describe(config, "pp2", adapter=lora))
    parameters, at_rest = re.search(r"pp 0: .* ([\d,]+) parameters, ([\d.]+) MiB at rest", stages).groups()
    assert float(at_rest) < 2 * 4 * int(parameters.replace(",", "")) / 2**20, "a frozen weight is its value alone"
