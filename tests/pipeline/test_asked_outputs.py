"""Outputs of layers that a call asks for, by argument or by config."""

from __future__ import annotations

import pytest
from transformers import MixtralConfig, MixtralForCausalLM

from shardwise.pipeline.outputs import asked_outputs

pytestmark = pytest.mark.single


@pytest.mark.parametrize("name", ["output_hidden_states", "output_attentions", "output_router_logits"])
def test_a_config_asks_for_every_kind_of_output(name):
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = MixtralConfig(**sizes, num_key_value_heads=2, vocab_size=11, num_local_experts=2)
    model = MixtralForCausalLM._from_config(config, attn_implementation="eager")
    assert asked_outputs(model, {}) == frozenset()
    setattr(model.config, name, True)
    assert asked_outputs(model, {}) == {name}
    assert asked_outputs(model, {name: False}) == frozenset()
