"""Tiny instances of the families that every layout must train exactly."""

from __future__ import annotations

import inspect
import os
from typing import Any

import torch
import transformers
from torch import nn

import shardwise
from shardwise.plan.spec import Plan
from shardwise.search.deriving import NO_RULES, build_subject, search_plan

CACHE = "cache" if "cache" in inspect.signature(transformers.LlamaForCausalLM.forward).parameters else "past_key_values"
"""What transformers calls the argument and the output of keys and values."""

COMMON = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MOE = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"num_key_value_heads": 2},
    "mistral": {"num_key_value_heads": 2, "sliding_window": 8},
    "qwen2": {"num_key_value_heads": 2},
    "qwen3": {"num_key_value_heads": 2},
    "gemma2": {"num_key_value_heads": 2, "query_pre_attn_scalar": 16, "sliding_window": 8},
    "gemma3_text": {"num_key_value_heads": 2, "query_pre_attn_scalar": 16, "sliding_window": 8},
    "phi3": {"num_key_value_heads": 2},
    "glm4": {"num_key_value_heads": 2, "partial_rotary_factor": 0.5},
    "cohere2": {"num_key_value_heads": 2, "sliding_window": 8},
    "olmo2": {"num_key_value_heads": 2},
    "gpt_neox": {},
    "starcoder2": {"num_key_value_heads": 2, "sliding_window": None},
    "smollm3": {"num_key_value_heads": 2, "no_rope_layers": [1, 0]},
    "granite": {
        "num_key_value_heads": 2,
        "embedding_multiplier": 2.0,
        "logits_scaling": 2.0,
        "residual_multiplier": 0.5,
    },
    "mixtral": {"num_key_value_heads": 2, **MOE, "output_router_logits": True, "router_aux_loss_coef": 0.1},
    "qwen3_moe": {
        "num_key_value_heads": 2,
        **MOE,
        "mlp_only_layers": [0],
        "decoder_sparse_step": 1,
        "output_router_logits": True,
        "router_aux_loss_coef": 0.1,
    },
    "deepseek_v3": {
        **MOE,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "n_group": 2,
        "topk_group": 1,
        "q_lora_rank": 24,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
    },
}


OTHERS: dict[str, dict[str, Any]] = {
    "gpt2": {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_inner": 96, "n_positions": 64},
    "bert": {},
}
"""Families of older build, which keep counts under names of their own; not causal, some of them."""


MECHANISMS = {
    "llama": "key/value heads that several ranks hold",
    "qwen3": "norms within heads, whose gradients are sums over all ranks' heads",
    "olmo2": "norms over all heads of a query and of a key, which ranks hold parts of",
    "phi3": "query, key and value fused, with shared heads in the middle",
    "mixtral": "a router and its balance of experts, which ranks compute alike",
    "deepseek_v3": "low-rank projections that stay replicated, experts that all tokens share",
    "gpt2": "one tensor that is embedding and head",
}
"""Families that have a way of their own in which copies on different ranks could drift apart, and which."""

FULL_PRODUCT = "SHARDWISE_FULL_PRODUCT" in os.environ
"""Whether everything is proved for every family and every cell of a product, as `make coverage` does."""

MANY_STEPS = 20 if FULL_PRODUCT else 10
"""After so many steps copies are compared that could drift apart."""


def num_steps(family: str, *, is_long: bool) -> int:
    """After how many steps copies are compared: families made of others' parts take the three that every one takes, and
    so do those with a mechanism of their own in cells of a product that are not chosen to be long.
    """
    return MANY_STEPS if FULL_PRODUCT or (is_long and family in MECHANISMS) else 3


def tiny_model(family: str, *, tied: bool = False, seed: int = 0, **overrides: Any) -> nn.Module:
    """A language model of the family in float32 whose every parameter is moved off its special initial value."""
    values = {**COMMON, **(FAMILIES | OTHERS)[family], "tie_word_embeddings": tied, **overrides}
    if family == "gpt2":
        values = {**OTHERS["gpt2"], "vocab_size": COMMON["vocab_size"], "tie_word_embeddings": tied, **overrides}
        values |= {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
    auto_class = transformers.AutoModelForMaskedLM if family == "bert" else transformers.AutoModelForCausalLM
    if family == "deepseek_v3":
        values.pop("head_dim")
    torch.manual_seed(seed)
    config = transformers.AutoConfig.for_model(family, **values)
    model = auto_class.from_config(config, attn_implementation="eager")
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.05)
    return model.eval()


def tiny_batch(model: nn.Module, *, rows: int = 2, length: int = 13, seed: int = 0) -> dict[str, torch.Tensor]:
    """Random ids with labels, a few of them ignored."""
    generator = torch.Generator().manual_seed(seed)
    size = model.config.vocab_size
    ids = torch.randint(3 if size > 3 else 0, size, (rows, length), generator=generator)
    labels = ids.clone()
    labels[0, :3] = -100
    return {"input_ids": ids, "labels": labels}


def rows_of(batch: dict[str, torch.Tensor], mesh: shardwise.Mesh) -> dict[str, torch.Tensor]:
    """This data rank's rows of a batch."""
    rows = batch["labels"].shape[0] // mesh.data_size
    return {name: value[mesh.data_rank * rows :][:rows] for name, value in batch.items()}


def checkpoint_layers(model: nn.Module, *options: Any, enable: bool = True) -> None:
    """Lets transformers itself run layers again in backward, or no longer; it renamed this on the way to 5.23.

    Args:
        options: those of `torch.utils.checkpoint`, as a mapping.
    """
    end = "enable" if enable else "disable"
    change = getattr(model, f"activation_checkpointing_{end}", None) or getattr(model, f"gradient_checkpointing_{end}")
    change(*options)


def derive_plan(
    model: nn.Module, declared: Plan, *, num_parts: int, sequence_parallel: bool = False, given: Plan = NO_RULES
) -> Plan:
    """The plan that a search finds for `model`, on top of what is declared."""
    subject = build_subject(model, num_parts=num_parts)
    return search_plan(subject, declared, sequence_parallel=sequence_parallel, given=given)
