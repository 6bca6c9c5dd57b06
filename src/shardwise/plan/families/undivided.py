"""Families whose blocks data parallelism cannot gather one by one. Data only."""

from __future__ import annotations

__all__ = ["UNDIVIDED"]

UNDIVIDED = {
    "reformer": "its reversible layers are run again in backward by code that calls parts of a block, not the block",
    "squeezebert": "its encoder calls the forward of its layers directly, past the hooks that gather them",
}
"""Model type to the reason."""
