"""Weights that layers of a manual pipeline share."""

from __future__ import annotations

from shardwise.compat.layers.chain import share_weights

__all__ = ["PipelineStageModule"]


class PipelineStageModule:
    """What NxD's stages of a manual pipeline say about layers before they are cut; the stages themselves are ours."""

    mark_weight_sharing = staticmethod(share_weights)
