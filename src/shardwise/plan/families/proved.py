"""Families whose declared plan, with our corrections, the test suite trains beside the whole model on every layout."""

from __future__ import annotations

__all__ = ["PROVED"]

PROVED = frozenset(
    {
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
    }
)
"""model_type of each: their causal language models need no derivation."""
