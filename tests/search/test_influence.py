"""What influence finds in real architectures: which products are left at, and what each rank needs for them."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn

from bench.sweep.known import default_config, model_class
from shardwise.search.influence import RequiredIndices, RowProduct, find_row_products
from shardwise.search.trace import watch
from shardwise.tiny.models import build_tiny_model, make_batch, shrink_config

pytestmark = pytest.mark.single


@functools.cache
def products_of(model_type: str, class_name: str) -> dict[str, RowProduct]:
    """The row products of the first layer of a tiny model, by the weight's name in its layer."""
    config = shrink_config(default_config(model_type, task=None), without_dropout=True)
    model = build_tiny_model(config, model_class(class_name), seed=0).eval()
    for choose in ("set_attn_implementation", "set_experts_implementation"):
        getattr(model, choose)("eager")
    products, layers = find_row_products(model, make_batch(model, seed=0), num_parts=2)
    first = layers[0].fqn
    return {each.parameter.removeprefix(f"{first}."): each for each in products if each.layer == first}


def dims_of(product: RowProduct) -> dict[str, int]:
    """Split parameters of a row product by their names in the layer, with the dim."""
    prefix = f"{product.layer}."
    return {name.removeprefix(prefix): held.dim for name, held in product.required_indices.items() if held.is_split}


def test_llama_attention_and_mlp_are_left_at_their_last_linears() -> None:
    products = products_of("llama", "LlamaForCausalLM")
    assert products.keys() == {"self_attn.o_proj.weight", "mlp.down_proj.weight"}
    assert dims_of(products["self_attn.o_proj.weight"]) == {
        "self_attn.q_proj.weight": 0,
        "self_attn.k_proj.weight": 0,
        "self_attn.v_proj.weight": 0,
    }
    assert dims_of(products["mlp.down_proj.weight"]) == {"mlp.gate_proj.weight": 0, "mlp.up_proj.weight": 0}
    assert not any(product.reenters for product in products.values())


def test_the_sections_of_a_fused_projection_are_seen() -> None:
    product = products_of("gpt2", "GPT2LMHeadModel")["attn.c_proj.weight"]
    assert product.input_dim == 0  # Conv1D stores [in, out]
    held = product.required_indices[f"{product.layer}.attn.c_attn.weight"]
    third = held.size // 3
    half = third // 2
    assert held.dim == 1
    assert held.ranks[0] == {section * third + index for section in range(3) for index in range(half)}
    assert held.ranks[1] == frozenset(range(held.size)) - held.ranks[0]


def test_the_products_inside_a_scan_reenter() -> None:
    products = products_of("mamba", "MambaForCausalLM")
    assert {name: product.reenters for name, product in products.items()} == {
        "mixer.x_proj.weight": True,
        "mixer.out_proj.weight": False,
    }
    assert {"mixer.A_log", "mixer.D", "mixer.conv1d.weight", "mixer.in_proj.weight", "mixer.dt_proj.weight"} <= dims_of(
        products["mixer.out_proj.weight"]
    ).keys()


def test_a_table_of_position_biases_is_split_by_its_heads() -> None:
    product = products_of("t5", "T5ForConditionalGeneration")["layer.0.SelfAttention.o.weight"]
    assert dims_of(product)["layer.0.SelfAttention.relative_attention_bias.weight"] == 1


def test_bare_weights_of_experts_are_row_products_and_routers_stay_whole() -> None:
    products = products_of("mixtral", "MixtralForCausalLM")
    product = products["mlp.experts.down_proj"]
    assert product.input_dim == 2
    assert dims_of(product) == {"mlp.experts.gate_up_proj": 1}


def test_latent_projections_stay_whole() -> None:
    held = dims_of(products_of("deepseek_v3", "DeepseekV3ForCausalLM")["self_attn.o_proj.weight"])
    assert held == {"self_attn.q_b_proj.weight": 0, "self_attn.kv_b_proj.weight": 0}


def test_a_shared_key_is_held_by_every_rank() -> None:
    product = products_of("gpt_bigcode", "GPTBigCodeForCausalLM")["attn.c_proj.weight"]
    held = product.required_indices[f"{product.layer}.attn.c_attn.weight"]
    assert held.is_split
    assert held.shared > 0


def holding(*ranks: set[int], size: int = 4) -> RequiredIndices:
    return RequiredIndices(dim=0, size=size, ranks=tuple(frozenset(rank) for rank in ranks))


def test_a_holding_counts_what_is_shared() -> None:
    assert holding({0, 1}, {2, 3}).shared == 0
    assert holding({0, 1, 2}, {2, 3}).shared == 1


def test_a_holding_is_split_if_every_rank_needs_less_than_all() -> None:
    assert holding({0, 1}, {2, 3}).is_split
    assert holding({0}, {2}).is_split  # what nobody needs does not count
    assert not holding({0, 1, 2, 3}, {2, 3}).is_split


def test_united_holdings_are_needed_for_both() -> None:
    united = holding({0}, {2}).united(holding({1}, {2, 3}))
    assert united.ranks == ({0, 1}, {2, 3})


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.proj = nn.Linear(4, 4)

    def forward(self, x):
        return x + self.proj(x)


class InTurn(nn.Module):
    """Attentions and MLPs in lists of their own, as XLM has them, and one layer that never runs."""

    def __init__(self):
        super().__init__()
        self.mlps = nn.ModuleList(Layer() for _ in range(3))
        self.attentions = nn.ModuleList(Layer() for _ in range(2))

    def forward(self, x):
        for attention, mlp in zip(self.attentions, self.mlps, strict=False):
            x = mlp(attention(x))
        return x


def test_layers_are_seen_in_the_order_in_which_they_run():
    layers = watch(InTurn(), {"x": torch.randn(2, 4, requires_grad=True)})
    assert [layer.fqn for layer in layers] == ["attentions.0", "mlps.0", "attentions.1", "mlps.1"]
