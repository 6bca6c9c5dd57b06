"""Rules found on a tiny model, for the layers of the model."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from shardwise.plan.rule import InputRule, ParameterRule
from shardwise.plan.spec import Plan
from shardwise.search.generalize import generalize

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
