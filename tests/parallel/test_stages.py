"""A model cut into stages computes what the whole one does."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from bench.sweep.stages import gradients_of, stages_of
from shardwise.comm.simulated import run_ranks
from shardwise.errors import LayoutError, PlanError, UnsupportedError
from shardwise.parallel.apply import apply_plan
from shardwise.parallel.facts import decide_split, read_facts
from shardwise.plan.options import ParallelSpec
from shardwise.plan.spec import Plan
from shardwise.probe.layer_order import find_layer_order, train_in_stages
from shardwise.search.planning import plan_for
from shardwise.stages.absent import Absent
from shardwise.tiny.inputs import clone_batch
from shardwise.tiny.models import build_tiny_model, make_batch, shrink_config
from shardwise.topology.shape import MeshShape
from tests.families import FULL_PRODUCT, tiny_batch, tiny_model
from tests.staged import StageMesh, split_and_train

pytestmark = pytest.mark.single

SHRUNK = {
    "t5": (transformers.T5Config, transformers.T5ForConditionalGeneration),
    "bart": (transformers.BartConfig, transformers.BartForConditionalGeneration),
    "albert": (transformers.AlbertConfig, transformers.AlbertForMaskedLM),
    "zamba2": (transformers.Zamba2Config, transformers.Zamba2ForCausalLM),
    "gemma3n": (transformers.Gemma3nTextConfig, transformers.Gemma3nForCausalLM),
    "gemma4": (transformers.Gemma4TextConfig, transformers.Gemma4ForCausalLM),
}
FROM_FAMILIES = ("llama", "gpt2", "mixtral", "bert")


def model_of(name: str) -> nn.Module:
    if name in FROM_FAMILIES:
        return tiny_model(name, tied=name != "bert")
    config, own_class = SHRUNK[name]
    return build_tiny_model(shrink_config(config(), without_dropout=True), own_class, seed=0).eval()


def batch_of(name: str, model: nn.Module) -> dict[str, Any]:
    return tiny_batch(model) if name in FROM_FAMILIES else make_batch(model, seed=0)


@pytest.mark.parametrize("name", [*FROM_FAMILIES, *SHRUNK])
def test_cut_in_front_of_every_layer(name):
    model = model_of(name)
    batch = batch_of(name, model)
    order = find_layer_order(model)
    stages = stages_of(model, order)
    output, outgoing = train_in_stages(stages, batch)

    whole = copy.deepcopy(model)
    expected = whole(**batch)
    expected.loss.backward()
    assert abs(float(output.loss.detach() - expected.loss.detach())) < 1e-5
    assert float((output.logits - expected.logits).detach().abs().max()) < 1e-4
    found = gradients_of(stages, whole)
    for parameter_name, parameter in whole.named_parameters():
        gradient = parameter.grad
        if gradient is None or not gradient.any():
            assert parameter_name not in found or not found[parameter_name].any()
            continue
        allowed = 1e-4 * float(gradient.abs().max()) + 1e-6
        assert float((found[parameter_name] - gradient).abs().max()) < allowed, parameter_name
    assert [len(each) for each in outgoing] == [len(each) for each in order.cut_tensors]


@pytest.mark.parametrize(
    ("name", "sequence_parallel"),
    [("llama", False), ("llama", True), ("mixtral", False), ("mixtral", True), *[("t5", True)] * FULL_PRODUCT],
)
def test_split_over_tensor_parallel_ranks_too(monkeypatch, name, sequence_parallel):
    monkeypatch.setattr("shardwise.optim.summing._sum_over_stages", lambda *_: None)  # they are summed here
    model = model_of(name)
    batch = batch_of(name, model)
    loss, found = split_and_train(model, batch, ParallelSpec(sequence_parallel=sequence_parallel))
    check_equal_to_whole(model, batch, loss, found)


def check_equal_to_whole(model: nn.Module, batch: dict[str, Any], loss: float, found: dict[str, torch.Tensor]) -> None:
    expected = model(**batch).loss
    expected.backward()
    assert abs(loss - float(expected.detach())) < 1e-5
    for parameter_name, parameter in model.named_parameters():
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        allowed = 1e-4 * float(gradient.abs().max()) + 1e-6
        assert float((found[parameter_name] - gradient).abs().max()) < allowed, parameter_name


GATHERED = """
[parameters]
model.layers.*.laurel.linear_right: rowwise_split_input
model.layers.*.laurel.linear_left: colwise_gather_output
model.layers.*.per_layer_projection: rowwise
model.layers.*.per_layer_input_gate.weight: split(0)
model.layers.*.altup.correction_coefs: colwise_gather_output
model.layers.*.altup.modality_router: colwise_gather_output
model.layers.*.altup.prediction_coefs: colwise_gather_output

[regions]
model.layers.*.per_layer_input_gate: region

[inputs]
model.layers.*.per_layer_input: split(2)
"""


def test_split_modules_whose_features_are_full_outside(monkeypatch):
    """Layers whose code runs for other stages, with outputs that are gathered and inputs that are cut out."""
    monkeypatch.setattr("shardwise.optim.summing._sum_over_stages", lambda *_: None)  # they are summed here
    monkeypatch.setattr("tests.staged.plan_for", lambda *_, **__: Plan.parse(GATHERED))
    model = model_of("gemma3n")
    batch = batch_of("gemma3n", model)
    loss, found = split_and_train(model, batch, ParallelSpec())
    check_equal_to_whole(model, batch, loss, found)


def test_sizes_of_what_other_stages_hold_are_those_of_this_rank_s_part():
    model = tiny_model("gpt2")
    order, facts, shape = find_layer_order(model), read_facts(model), MeshShape(pp_size=2, tp_size=2)
    plan = decide_split(plan_for(model, ParallelSpec(), num_parts=2), model, facts, shape, ParallelSpec(), order=order)

    def rank(group):
        apply_plan(own := copy.deepcopy(model), StageMesh(group, num_stages=2, stage=1), plan, ParallelSpec())
        return own.transformer.h[0].attn.c_attn.nf

    assert run_ranks(rank, 2) == [model.transformer.h[0].attn.c_attn.nf // 2] * 2


def test_a_cut_inside_of_a_split_sequence_is_crossed_by_a_part_of_it():
    model = tiny_model("llama")
    spec = ParallelSpec(sequence_parallel=True)
    order = find_layer_order(model)
    shape = MeshShape(pp_size=2, tp_size=2)
    rules = plan_for(model, spec, num_parts=2)
    plan = decide_split(rules, model, read_facts(model), shape, spec, order=order)

    def rank(group):
        copied = copy.deepcopy(model)
        registry = apply_plan(copied, StageMesh(group, num_stages=2, stage=1), plan, spec)
        return registry.stages.shapes(1, tiny_batch(model, length=13))[0][0].shape

    assert run_ranks(rank, 2) == [(2, 7, 64)] * 2


def test_what_crosses_is_what_is_needed():
    def cut_tensor(name: str) -> list[list[str]]:
        return [[each.anchor for each in cut] for cut in find_layer_order(model_of(name)).cut_tensors]

    assert cut_tensor("llama") == [["input:hidden_states"]]
    assert cut_tensor("gpt2") == [["input:hidden_states"]]
    bias, encoded, hidden = "input:position_bias", "input:encoder_hidden_states", "input:hidden_states"
    assert cut_tensor("t5") == [[bias, hidden], [encoded, hidden], [encoded, bias, hidden]]
    assert cut_tensor("mixtral") == [["output:model.layers.0.mlp.gate:0:0", hidden]]


def test_attention_weights_that_nothing_uses_need_no_code_to_run():
    config = transformers.BloomConfig(vocab_size=96, hidden_size=64, n_layer=2, n_head=4)
    order = find_layer_order(build_tiny_model(config, transformers.BloomForCausalLM, seed=0))
    assert set(order.calls) <= order.returns.keys()


def test_one_layer_that_runs_again_and_again_has_as_many_segments():
    order = find_layer_order(model_of("albert"))
    assert len(order.calls) > len(set(order.calls)) == 1


def test_foreign_parameters_are_gone():
    model = tiny_model("llama", tied=True)
    first, last = stages_of(model, find_layer_order(model))
    assert not any(name.startswith("model.layers.1") for name, _ in first.model.named_parameters())
    assert {name for name, _ in first.model.named_parameters() if "layers" not in name} == {"model.embed_tokens.weight"}
    assert {name for name, _ in last.model.named_parameters() if "layers" not in name} == {
        "model.norm.weight",
        "lm_head.weight",
    }
    assert last.model.model.embed_tokens.weight.shape == model.model.embed_tokens.weight.shape


class Products(TorchDispatchMode):
    """Counts products with weights and look-ups, of tensors with values (angles of positions are products, too)."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        self.count += (
            name in ("mm", "addmm", "embedding")
            and all(type(x) is not Absent for x in args)
            and (not any(x.is_meta for x in args if isinstance(x, torch.Tensor)))
        )
        return func(*args, **(kwargs or {}))


def test_what_comes_before_a_stage_multiplies_nothing():
    model = tiny_model("llama")
    _, last = stages_of(model, find_layer_order(model))
    batch = tiny_batch(model)
    with torch.no_grad(), Products() as products:
        last.run(1, batch, [model.model.embed_tokens(batch["input_ids"])])
    whole = copy.deepcopy(model)
    with torch.no_grad(), Products() as of_layer:
        whole.model.layers = whole.model.layers[1:]
        whole(**batch)
    assert products.count == of_layer.count


def test_what_an_operation_returns_without_values_is_found_again_by_all_that_decides_it():
    whole, real = (Absent.of((2, 3), dtype, torch.device("cpu")) for dtype in (torch.int64, torch.float32))
    for _ in range(2):
        assert [(whole + number).dtype for number in (1, 1.0, True)] == [torch.int64, torch.float32, torch.int64]
        assert (whole[:, 1:].storage_offset(), whole[:, :2].storage_offset()) == (1, 0)
        assert torch.split(real, [1, 2], -1)[1].shape == (2, 2)
        assert real.t().meta.unsqueeze_(0).shape == (1, 3, 2)
        assert float(torch.zeros_like(real).add_(1).sum()) == 6
        with pytest.raises(UnsupportedError):
            real.sum().item()
    torch.set_default_dtype(torch.float64)
    try:
        assert (whole / 2).dtype == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)
    assert (whole / 2).dtype == torch.float32


def test_shapes_follow_the_batch():
    model = tiny_model("llama")
    first, last = stages_of(model, find_layer_order(model))
    for length in (5, 9):
        (incoming,), outgoing = last.shapes(1, tiny_batch(model, length=length))
        assert (incoming.shape, outgoing) == ((2, length, model.config.hidden_size), ())
    assert first.shapes(0, tiny_batch(model, length=9))[1] == (incoming,)


def test_forward_alone_and_other_layers_are_errors():
    model = tiny_model("llama")
    first, last = stages_of(model, find_layer_order(model))
    with pytest.raises(UnsupportedError, match="in stages"):
        first.model(**tiny_batch(model))
    last.model.model.layers = last.model.model.layers[1:]
    with pytest.raises(LayoutError, match=r"model.layers.1 runs where model.layers.0 did"):
        last.run(1, tiny_batch(model), [torch.zeros(2, 13, 64)])


def test_no_layer_runs():
    class Model(transformers.LlamaForCausalLM):
        def forward(self, input_ids, labels=None):
            return super().forward(input_ids, labels=labels) if self.training else {"loss": self.lm_head.weight.sum()}

    model = Model(tiny_model("llama").config).eval()
    with pytest.raises(PlanError, match="cannot be cut into stages"):
        find_layer_order(model)


DROPPED_FOR_ALL = {
    "funnel": (transformers.FunnelConfig(block_sizes=[2]), transformers.FunnelForMaskedLM),
    "xlnet": (transformers.XLNetConfig(n_layer=2), transformers.XLNetLMHeadModel),
}


@pytest.mark.parametrize("name", DROPPED_FOR_ALL)
def test_what_all_layers_use_is_dropped_by_one_stage(name):
    config, own_class = DROPPED_FOR_ALL[name]
    model = build_tiny_model(shrink_config(config), own_class, seed=0).train()
    batch = make_batch(model, seed=0)
    order = find_layer_order(model)
    assert order.shares_dropped
    whole = copy.deepcopy(model)
    torch.manual_seed(0)
    expected = whole(**clone_batch(batch))
    expected.loss.backward()
    stages = stages_of(model, order)
    torch.manual_seed(0)
    output, _ = train_in_stages(stages, batch)
    assert abs(float((output.loss - expected.loss).detach())) < 1e-5
    found = gradients_of(stages, whole)
    for parameter_name, parameter in whole.named_parameters():
        if parameter.grad is not None and parameter.grad.any():
            allowed = 1e-4 * float(parameter.grad.abs().max()) + 1e-6
            assert float((found[parameter_name] - parameter.grad).abs().max()) < allowed, parameter_name


def test_only_what_is_dropped_for_other_stages_travels():
    bert = shrink_config(transformers.BertConfig())  # its layers drop what depends on parameters
    assert not find_layer_order(build_tiny_model(bert, transformers.BertForMaskedLM, seed=0)).shares_dropped
    plain = shrink_config(DROPPED_FOR_ALL["xlnet"][0], without_dropout=True)
    assert not find_layer_order(build_tiny_model(plain, transformers.XLNetLMHeadModel, seed=0)).shares_dropped


def test_layers_that_run_again_in_backward_are_refused_with_and_without_dropout():
    for options in ({}, {"without_dropout": True}):
        config = shrink_config(transformers.ReformerConfig(is_decoder=True), **options)
        reformer = build_tiny_model(config, transformers.ReformerModelWithLMHead, seed=0)
        with pytest.raises(PlanError, match="cut before every layer, it computes another gradient"):
            find_layer_order(reformer)
