"""What a token costs, from facts alone; tests/train/test_step.py holds it against what torch counts."""

from __future__ import annotations

import pytest

from shardwise.estimate.flops import count_work, peak_flops
from shardwise.plan.structure import Heads, LayerStack, ModelFacts, ModuleFacts

pytestmark = pytest.mark.pure

V, D, HIDDEN = 100, 16, 40
"""Words, features, features of the MLP: two layers, the second with a window and with experts, 2 of 4 a token."""

EXPERTS = {"top_k": 2, "num_experts": 4}
MODULES = {
    "": ModuleFacts(kind="other"),
    "embed": ModuleFacts(kind="embedding", parameters={"weight": (V, D)}),
    "layers": ModuleFacts(kind="list"),
    "layers.0": ModuleFacts(kind="other"),
    "layers.0.attn": ModuleFacts(kind="other", heads=Heads(num_heads=4, num_key_value_heads=2, head_dim=8)),
    "layers.0.attn.q": ModuleFacts(kind="linear", parameters={"weight": (32, D), "bias": (32,)}),
    "layers.0.attn.kv": ModuleFacts(kind="linear", parameters={"weight": (32, D)}),
    "layers.1": ModuleFacts(kind="other"),
    "layers.1.attn": ModuleFacts(kind="other", heads=Heads(num_heads=4, num_key_value_heads=4)),
    "layers.1.attn.qkv": ModuleFacts(kind="linear", parameters={"weight": (48, D)}),
    "layers.1.experts": ModuleFacts(kind="other", parameters={"up": (4, D, HIDDEN)}, attributes=EXPERTS),
    "norm": ModuleFacts(kind="other", parameters={"weight": (D,)}),
    "head": ModuleFacts(kind="linear", parameters={"weight": (V, D)}),
}
FACTS = ModelFacts(
    model_type="",
    modules=MODULES,
    stacks=(LayerStack(fqn="layers", items=("layers.0", "layers.1")),),
    tied={"head.weight": "embed.weight"},
    embedding="embed",
)
MULTIPLIED = 64 * D + 48 * D + 2 * D * HIDDEN + V * D
"""Queries, keys, values, the experts that a token goes through, and the head, although it is the embedding's weight."""


def test_weights_that_multiply_count_and_attention_as_far_as_it_sees():
    work = count_work(FACTS, [fqn for fqn, *_ in FACTS.parameters()], {"layers.1.attn": 8})
    assert work.trained == MULTIPLIED and work.frozen == 0
    assert work.attention == ((4 * (8 + 8), None), (4 * (4 + 4), 8))
    assert work.flops(64) == 6 * MULTIPLIED + 12 * (4 * 8 * 64 + 4 * 4 * 8)
    assert work.flops(4) == 6 * MULTIPLIED + 12 * (4 * 8 * 4 + 4 * 4 * 4), "a short row is seen in full"


def test_frozen_weights_cost_no_gradient_of_their_own():
    work = count_work(FACTS, ["embed.weight"], {})
    assert (work.trained, work.frozen) == (V * D, MULTIPLIED - V * D)
    assert work.flops(0) == 6 * V * D + 4 * (MULTIPLIED - V * D)


def test_features_of_values_may_differ_from_those_of_queries():
    modules = {
        "": MODULES[""],
        "a": ModuleFacts(
            kind="other",
            heads=Heads(num_heads=4, num_key_value_heads=4),
            attributes={"qk_head_dim": 24, "v_head_dim": 16},
        ),
        "a.q": ModuleFacts(kind="linear", parameters={"weight": (96, D)}),
        "a.o": ModuleFacts(kind="linear", parameters={"weight": (D, 64)}),
    }
    assert count_work(ModelFacts(model_type="", modules=modules), [], {}).attention == ((4 * 40, None),)
    around = {"": ModuleFacts(kind="other", heads=Heads(num_heads=2, num_key_value_heads=2, head_dim=3)), **modules}
    assert len(count_work(ModelFacts(model_type="", modules=around), [], {}).attention) == 1, "the innermost alone"


@pytest.mark.parametrize(
    ("name", "tflops"),
    [
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H200", 989),
        ("NVIDIA L4", 121),
        ("T4", None),
        ("NVIDIA L40", 181),
        ("NVIDIA L40S", 362),
        ("NVIDIA RTX A1000", None),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA A10G", 70),
        ("NVIDIA H100 NVL", 835),
        ("NVIDIA GH200 480GB", 989),
        ("NVIDIA B200", 2250),
        ("AMD Instinct MI300X", 1307),
    ],
)
def test_peaks_are_known_by_the_name_of_the_card(name, tflops):
    assert peak_flops(name) == (tflops and tflops * 1e12)
