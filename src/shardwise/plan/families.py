"""Corrections to declared plans of single model families. Data only; every correction is proved."""

from shardwise.plan.rule import ParameterRule
from shardwise.plan.spec import Plan


def _plan(reason: str, **styles: str) -> Plan:
    """Returns the rules for modules of every layer; `__` in a name stands for a dot."""
    rules = {f"**.layers.*.{name.replace('__', '.')}": style for name, style in styles.items()}
    return Plan(tuple(ParameterRule(name, style, source="family", reason=reason) for name, style in rules.items()))


_GATE_UP = _plan(
    "gate and up are two equal sections of one weight: splitting each saves the gather transformers does",
    mlp__gate_up_proj="packed_colwise",
    mlp__down_proj="rowwise",
)
_FUSED_QKV = _plan(
    "q, k and v are sections of one weight: splitting each by its heads saves the gather transformers does",
    self_attn__qkv_proj="qkv_colwise",
    self_attn__o_proj="rowwise",
)
_SPLIT_QK_NORM = _plan(
    "the norm runs over all heads: sharing one statistic a token saves gathering q, k and v",
    self_attn__q_proj="colwise",
    self_attn__k_proj="colwise",
    self_attn__v_proj="colwise",
    self_attn__o_proj="rowwise",
    self_attn__q_norm="norm_split",
    self_attn__k_norm="norm_split",
)
_LATENT = _plan(
    "heads split after the latents: the latents stay replicated inside the region, where their gradients are partial",
    self_attn__q_proj="colwise",
    self_attn__q_b_proj="colwise",
    self_attn__kv_b_proj="colwise",
    self_attn__kv_a_proj_with_mqa="replicated_with_grad_allreduce",
    self_attn__o_proj="rowwise",
)
_SIDE_BY_SIDE = _plan(
    "the layer adds what attention and MLP compute from one input: one sum for both",
    self_attn__o_proj="rowwise_into(mlp.down_proj)",
)

CORRECTIONS: dict[str, Plan] = {
    "cohere2": _SIDE_BY_SIDE,
    "deepseek_v2": _LATENT,  # multi-head latent attention, which transformers replicates or reduces piece by piece
    "deepseek_v3": _LATENT,
    "glm": _GATE_UP,
    "glm4": _GATE_UP,
    "olmo2": _SPLIT_QK_NORM,
    "olmo3": _SPLIT_QK_NORM,
    "phi3": _FUSED_QKV | _GATE_UP,
}
"""model_type to the rules that go on top of transformers' plan."""

PROVED = frozenset(
    [
        "cohere2",
        "deepseek_v3",
        "gemma2",
        "gemma3_text",
        "glm4",
        "gpt_neox",
        "granite",
        "llama",
        "mistral",
        "mixtral",
        "olmo2",
        "phi3",
        "qwen2",
        "qwen3",
        "qwen3_moe",
        "smollm3",
        "starcoder2",
    ]
)
"""model_type of those whose declared plan, with our corrections, the test suite trains next to the unsplit model on
every layout: their causal language models need no derivation."""

SINGLE_FSDP_UNIT = {
    "reformer": "its reversible layers run a second time in backward by code that calls parts of a block, never it",
    "squeezebert": "its encoder calls the forward of its layers directly, past the hooks that gather them",
}
"""model_type of those whose blocks data parallelism cannot gather one by one, to the reason."""
