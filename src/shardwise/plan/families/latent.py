"""Families with multi-head latent attention (MLA), which transformers leaves whole or reduces piece by piece."""

from __future__ import annotations

from shardwise.plan.spec import Plan, Rule

__all__ = ["CORRECTIONS"]

_MLA = "heads split after the latents: the latents stay replicated inside the region, where their gradients are partial"
_NAMES = {
    "q_proj": "colwise",
    "q_b_proj": "colwise",
    "kv_b_proj": "colwise",
    "kv_a_proj_with_mqa": "replicated_with_grad_allreduce",
    "o_proj": "rowwise",
}
_RULES = tuple(
    Rule(f"**.layers.*.self_attn.{name}", style, source="family", reason=_MLA) for name, style in _NAMES.items()
)

CORRECTIONS: dict[str, Plan] = {"deepseek_v2": Plan(_RULES), "deepseek_v3": Plan(_RULES)}
"""model_type to the rules that go on top of transformers' plan."""
