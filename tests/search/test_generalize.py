"""Rules found on a tiny model, for the layers of the model."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

from bench.sweep.known import default_config, model_class
from shardwise.plan.rule import InputRule, ParameterRule
from shardwise.plan.spec import Plan
from shardwise.probe.trial import smallest_with_all_layer_kinds
from shardwise.search.generalize import generalize
from shardwise.tiny.models import shrink_config
from shardwise.tiny.shrink import keep_layers
from tests.families import FULL_PRODUCT

pytestmark = pytest.mark.single


class Layer(nn.Module):
    def __init__(self, **parts):
        super().__init__()
        for name, part in parts.items():
            self.add_module(name, part)


class Sharing(nn.Module):
    """Layers that share a list of adapters, of which each uses its own."""

    def __init__(self, depth):
        super().__init__()
        adapters = nn.ModuleList(nn.Linear(2, 2) for _ in range(2))
        self.layers = nn.ModuleList(Layer(adapters=adapters) for _ in range(depth))


FOUND = Plan.of({"layers.0.adapters.0": "colwise", "layers.1.adapters.1": "colwise"})


def test_layers_keep_the_rules_of_their_namesakes():
    assert generalize(FOUND, Sharing(2), Sharing(2)) == FOUND


def test_other_layers_may_use_any_item_of_a_list_of_which_each_layer_uses_its_own():
    patterns = {rule.pattern for rule in generalize(FOUND, Sharing(2), Sharing(3)).rules}
    assert patterns == {"layers.0.adapters.0", "layers.1.adapters.1", "layers.2.adapters.*"}


def test_rules_that_all_layers_have_alike_keep_their_numbers():
    found = Plan.of({"layers.0.adapters.0": "colwise", "layers.1.adapters.0": "colwise"})
    assert str(generalize(found, Sharing(2), Sharing(3))) == "[parameters]\nlayers.*.adapters.0: colwise"


class Choosing(nn.Module):
    """A layer of experts, each a module of its own."""

    def __init__(self, num_experts, depth):
        super().__init__()
        experts = (
            nn.ModuleList(nn.ModuleDict({"up": nn.Linear(2, 4), "down": nn.Linear(4, 2)}) for _ in range(num_experts))
            for _ in range(depth)
        )
        self.layers = nn.ModuleList(Layer(experts=each) for each in experts)


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_rules_of_all_experts_are_for_any_number_of_them(depth):
    found = {f"layers.{layer}.experts.{each}.up": "colwise" for layer in range(2) for each in range(2)}
    found |= {f"layers.{layer}.experts.0.down": "rowwise" for layer in range(2)}
    rules = {rule.pattern: rule.style for rule in generalize(Plan.of(found), Choosing(2, 2), Choosing(5, depth)).rules}
    layer = "*" if depth > 1 else "0"
    assert rules == {f"layers.{layer}.experts.*.up": "colwise", f"layers.{layer}.experts.0.down": "rowwise"}


def test_experts_of_a_dictionary_are_as_many_as_the_model_has():
    def named(number):
        model = Choosing(number, 1)
        model.layers[0].experts = nn.ModuleDict({f"expert_{i}": each for i, each in enumerate(model.layers[0].experts)})
        model.layers[0].linear_1, model.layers[0].norm = nn.Linear(2, 2), nn.LayerNorm(2)
        return model

    found = {f"layers.0.experts.expert_{each}.up": "colwise" for each in range(2)} | {"layers.0.linear_1": "colwise"}
    rules = {rule.pattern: rule.style for rule in generalize(Plan.of(found), named(2), named(5)).rules}
    assert rules == {"layers.0.experts.*.up": "colwise", "layers.0.linear_1": "colwise"}


def test_only_what_all_experts_have_is_for_any_number_of_them():
    """An expert that gets no token on the tiny model shows no structure; its outputs are gathered, without a region."""
    rules = {f"layers.0.experts.{each}.up": "colwise" for each in (0, 2)} | {"layers.0.experts.1.up": "colwise_rep"}
    rules |= {f"layers.0.experts.{each}": "region" for each in (0, 2)}
    inputs = [InputRule(f"layers.0.experts.{each}.act.input", "split(2)") for each in (0, 2)]
    plan = Plan((*Plan.of(rules).rules, *inputs))

    def acting(number):
        model = Choosing(number, 1)
        for expert in model.layers[0].experts:
            expert["act"] = nn.SiLU()
        return model

    assert {rule.pattern for rule in generalize(plan, acting(3), acting(5)).rules} == {r.pattern for r in plan.rules}


PATTERNED = (
    ("switch_transformers", "SwitchTransformersForConditionalGeneration"),  # every n-th is sparse, the first has biases
    ("jamba", "JambaForCausalLM"),
    ("zamba2", "Zamba2ForCausalLM"),
    ("nllb-moe", "NllbMoeForConditionalGeneration"),
    ("deepseek_v3", "DeepseekV3ForCausalLM"),
    ("qwen3_next", "Qwen3NextForCausalLM"),
    ("qwen2_moe", "Qwen2MoeForCausalLM"),
    ("modernbert-decoder", "ModernBertDecoderForCausalLM"),
    ("nemotron_h", "NemotronHForCausalLM"),
    ("lfm2_moe", "Lfm2MoeForCausalLM"),
    ("llama4_text", "Llama4ForCausalLM"),
    ("t5", "T5ForConditionalGeneration"),
)


@pytest.mark.parametrize(("model_type", "name"), PATTERNED if FULL_PRODUCT else PATTERNED[:3])
@pytest.mark.parametrize("shrink", [keep_layers, shrink_config])
def test_the_few_layers_that_are_tried_are_of_every_kind(model_type, name, shrink):
    config = default_config(model_type)
    with torch.device("meta"):
        model = model_class(name)(config)
        few = smallest_with_all_layer_kinds(lambda number: model_class(name)(shrink(config, num_layers=number)), model)

    def kinds(model):  # by stack and what is in a layer, as its items are called
        found = set()
        for stack, layers in model.named_modules():
            if isinstance(layers, nn.ModuleList) and stack.rpartition(".")[2] in ("block", "layers"):
                named = [{re.sub(r"\d+", "*", each) for each, _ in layer.named_parameters()} for layer in layers]
                found |= {(stack, frozenset(each)) for each in named}
        return found

    assert kinds(few) == kinds(model)


class Gated(nn.Module):
    """Layers with an activation, whose input only a layer that keeps its gate whole has to cut."""

    def __init__(self, depth):
        super().__init__()
        self.layers = nn.ModuleList(
            Layer(gate=nn.Linear(2, 4), act=nn.SiLU(), mixer=nn.Linear(2, 2)) for _ in range(depth)
        )


def test_inputs_of_parameterless_modules_are_cut_only_where_the_layer_itself_said_so():
    inputs = (InputRule("layers.0.act.input", "split(2)"), InputRule("layers.1.mixer.extra", "split(2)"))
    found = Plan((*inputs, ParameterRule("layers.1.gate", "split(0)")))
    rules = {rule.pattern for rule in generalize(found, Gated(2), Gated(2)).rules}
    assert rules == {"layers.0.act.input", "layers.1.gate", "layers.*.mixer.extra"}


class Experts(nn.Module):
    """A layer whose experts lie one behind the other in one parameter, and one that holds gate and up in two halves."""

    def __init__(self, number, width):
        super().__init__()
        self.number, self.width = number, width
        self.up, self.bias = nn.Parameter(torch.zeros(number * width, 2)), nn.Parameter(torch.zeros(2 * width))
        self.gate_up = nn.Parameter(torch.zeros(2 * width, 2))

    def forward(self, x):
        return self.up.view(self.number, self.width, 2) @ x, self.gate_up.view(2, self.width, 2) @ x + self.bias.sum()


class Experted(nn.Module):
    def __init__(self, number, width):
        super().__init__()
        self.layers = nn.ModuleList([Layer(experts=Experts(number, width))])


@pytest.mark.parametrize(("number", "found"), [(2, 2), (3, 3), (4, 3)])
def test_sections_are_as_many_as_the_model_has_experts(number, found):
    rules = {"layers.0.experts.up": f"split(0, sections={found})", "layers.0.experts.gate_up": "split(0, sections=2)"}
    rules["layers.0.experts.bias"] = "split(1, sections=2)"  # of a weight [in, out]
    plan = generalize(Plan.of(rules), Experted(found, 6), Experted(number, 4))
    own = {rule.pattern: rule.style for rule in plan.rules}
    assert own == rules | {"layers.0.experts.up": f"split(0, sections={number})"}
