"""Families whose layers run attention and MLP side by side, whatever their configuration says, and add both."""

from __future__ import annotations

from shardwise.plan.spec import Plan, Rule

__all__ = ["CORRECTIONS"]

_SIDE_BY_SIDE = "the layer adds what attention and MLP compute from one input: one sum for both"

CORRECTIONS: dict[str, Plan] = {
    "cohere2": Plan(
        (Rule("**.layers.*.self_attn.o_proj", "rowwise_into(mlp.down_proj)", source="family", reason=_SIDE_BY_SIDE),)
    ),
}
"""model_type to the rules that go on top of transformers' plan."""
