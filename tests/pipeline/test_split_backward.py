"""Backwards in two parts give the gradients of one. A config may ask for outputs of layers."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import MixtralConfig, MixtralForCausalLM

from shardwise.errors import LayoutError
from shardwise.pipeline import stage as stage_module
from shardwise.pipeline.outputs import asked_outputs
from shardwise.pipeline.stage import SecondPart, backward_inputs, check_complete, tie

pytestmark = pytest.mark.single


def shared_between_two_meetings(x, p):
    """The third weight meets the input where the first does, and where the second does."""
    return ((x * (p[0] + p[2])).sin() + (x * (p[1] + p[2])).cos(),)


def used_again_after_others(x, p):
    """The first weight is used at both ends of a chain that leads through another's."""
    return ((((x @ p[0]).tanh() @ p[1]).sigmoid() @ p[0]) * p[2].exp(),)


def beside_the_input(x, p):
    """One output depends on weights alone, and so does all that comes before the input is used (a T5 decoder)."""
    hidden = (p[0] @ p[1]).tanh()
    return hidden * x + hidden, p[2].exp() @ p[1]


def with_a_hook(x, p):
    """A hook changes the gradient of what the second weight is added to the input's path in (a row-split bias)."""
    reduced = x @ p[0] + p[1][0]
    reduced.register_hook(lambda gradient: gradient * 2)
    return (reduced.tanh() * p[2],)


@pytest.mark.parametrize("finds_all_uses", [True, False], ids=["torch's groups", "before torch 2.13"])
@pytest.mark.parametrize("stage", [shared_between_two_meetings, used_again_after_others, beside_the_input, with_a_hook])
def test_two_parts_are_one_backward(stage, finds_all_uses, monkeypatch):
    if finds_all_uses and not stage_module._FINDS_ALL_USES:
        pytest.skip("this torch finds one use of a weight")
    monkeypatch.setattr(stage_module, "_FINDS_ALL_USES", finds_all_uses)
    torch.manual_seed(0)
    value, values = torch.randn(5, 5), torch.randn(3, 5, 5)
    found, wanted = [], []
    for kept in (found, wanted):
        x, weights = value.clone().requires_grad_(), [nn.Parameter(each.clone()) for each in values]
        outputs = stage(x, weights)
        gradients = [torch.ones_like(each) for each in outputs]
        if kept is wanted:
            torch.autograd.backward(outputs, gradients)
            kept.append(x.grad)
        else:
            outputs = tie(outputs, [x])
            ends = [each.grad_fn for each in outputs]
            (gradient,), second = backward_inputs(outputs, gradients, [x], weights)
            check_complete(ends, [x], second, stage=1)
            assert all(weight.grad is None for weight in weights)
            second()
            assert x.grad is None
            kept.append(gradient)
        kept += [weight.grad for weight in weights]
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other)


def test_a_weight_that_the_second_part_leaves_out_is_an_error():
    x, weight = torch.randn(3).requires_grad_(), nn.Parameter(torch.randn(3))
    ends = [(x * weight).sum().grad_fn]
    with pytest.raises(LayoutError, match=r"(?s)gradients of 1 parameters of stage 2 would be lost.*\[3\]"):
        check_complete(ends, [x], SecondPart([weight], groups=[]), stage=2)


def test_outputs_that_need_no_gradient_are_not_tied():
    x, plain = torch.randn(3).requires_grad_(), torch.randn(3)
    assert tie([plain], [x])[0] is plain
    assert tie([x * 2], [plain])[0].grad_fn.name().startswith("Mul")


@pytest.mark.parametrize("name", ["output_hidden_states", "output_attentions", "output_router_logits"])
def test_a_config_asks_for_every_kind_of_output(name):
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = MixtralConfig(**sizes, num_key_value_heads=2, vocab_size=11, num_local_experts=2)
    model = MixtralForCausalLM._from_config(config, attn_implementation="eager")
    assert asked_outputs(model, {}) == frozenset()
    setattr(model.config, name, True)
    assert asked_outputs(model, {}) == {name}
    assert asked_outputs(model, {name: False}) == frozenset()
