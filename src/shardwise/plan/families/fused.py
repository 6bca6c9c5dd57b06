"""Families whose declared plan gathers a fused projection that can be split section by section."""

from __future__ import annotations

from shardwise.plan.spec import Plan, Rule

__all__ = ["CORRECTIONS"]

_GATE_UP = "gate and up are two equal sections of one weight: splitting each saves the gather transformers does"
_QKV = "q, k and v are sections of one weight: splitting each by its heads saves the gather transformers does"
_QK_NORM = "the norm runs over all heads: sharing one statistic a token saves gathering q, k and v"


def _gate_up(name: str = "gate_up_proj") -> tuple[Rule, ...]:
    return (
        Rule(f"**.layers.*.mlp.{name}", "packed_colwise", source="family", reason=_GATE_UP),
        Rule("**.layers.*.mlp.down_proj", "rowwise", source="family", reason=_GATE_UP),
    )


_FUSED_QKV = (
    Rule("**.layers.*.self_attn.qkv_proj", "qkv_colwise", source="family", reason=_QKV),
    Rule("**.layers.*.self_attn.o_proj", "rowwise", source="family", reason=_QKV),
)
_SPLIT_QK_NORM = (
    Rule("**.layers.*.self_attn.q_proj", "colwise", source="family", reason=_QK_NORM),
    Rule("**.layers.*.self_attn.k_proj", "colwise", source="family", reason=_QK_NORM),
    Rule("**.layers.*.self_attn.v_proj", "colwise", source="family", reason=_QK_NORM),
    Rule("**.layers.*.self_attn.o_proj", "rowwise", source="family", reason=_QK_NORM),
    Rule("**.layers.*.self_attn.q_norm", "norm_split", source="family", reason=_QK_NORM),
    Rule("**.layers.*.self_attn.k_norm", "norm_split", source="family", reason=_QK_NORM),
)

CORRECTIONS: dict[str, Plan] = {
    "phi3": Plan((*_FUSED_QKV, *_gate_up())),
    "glm": Plan(_gate_up()),
    "glm4": Plan(_gate_up()),
    "olmo2": Plan(_SPLIT_QK_NORM),
    "olmo3": Plan(_SPLIT_QK_NORM),
}
"""model_type to the rules that go on top of transformers' plan."""
