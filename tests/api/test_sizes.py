"""Plans of models whose sizes and layers are not their twin's."""

from __future__ import annotations

import pytest

from shardwise.api import deriving
from shardwise.api.deriving import derive_plan
from shardwise.layout.placement import Split
from shardwise.plan.resolve import resolve
from shardwise.plan.spec import Plan
from shardwise.proof.twins import default_config, model_class, shrink_config
from shardwise.split.build import build_meta_model
from shardwise.split.facts import read_facts

# Hybrids, with the kind of layer that all of theirs are here. They cannot build a cache for it.
LINEAR = {
    "bailing_hybrid": ("layer_types", "linear_attention", "BailingHybridForCausalLM"),
    "granitemoehybrid": ("layer_types", "linear_attention", "GraniteMoeHybridForCausalLM"),
    "kimi_linear": ("layer_types", "linear_attention", "KimiLinearForCausalLM"),
    "qwen3_next": ("layer_types", "linear_attention", "Qwen3NextForCausalLM"),
    "recurrent_gemma": ("block_types", "recurrent", "RecurrentGemmaForCausalLM"),
}


@pytest.mark.single
@pytest.mark.parametrize("model_type", LINEAR)
@pytest.mark.parametrize("limit", [0, 8_000_000], ids=["by a smaller twin", "by its own twin"])
def test_a_hybrid_without_attention_layers_is_split(model_type, limit, monkeypatch):
    field, kind, name = LINEAR[model_type]
    config = default_config(model_type)
    vars(config)[field] = [kind] * len(getattr(config, field))
    model = build_meta_model(shrink_config(config), model_class(name), dtype=None, options={})
    monkeypatch.setattr(deriving, "_SMALL_ENOUGH", limit)
    derived = derive_plan(model, Plan(()), tp_size=2)
    assert derived.problem is None
    resolved = resolve(derived.plan, read_facts(model), tp_size=2).parameters
    inside = [planned for fqn, planned in resolved.items() if ".layers.0." in fqn and len(planned.shape) > 1]
    assert any(isinstance(planned.placement, Split) for planned in inside)
