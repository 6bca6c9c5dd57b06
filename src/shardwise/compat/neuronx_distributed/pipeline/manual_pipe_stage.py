"""Weights that layers of a manual pipeline share."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from shardwise.errors import ConfigError

__all__ = ["PipelineStageModule"]


class PipelineStageModule:
    """What NxD's stages of a manual pipeline say about layers before they are cut; the stages themselves are ours."""

    @staticmethod
    def mark_weight_sharing(
        layer_and_weight_path: Sequence[tuple[nn.Module, str]], sharing_group_name: str = "default"
    ) -> None:
        """Has all these layers compute with the first one's weight, each on its stage; gradients are summed.

        Raises:
            ConfigError: the weights differ in shape.
        """
        first, path = layer_and_weight_path[0]
        weight = first.get_parameter(path)
        for layer, own in layer_and_weight_path[1:]:
            if layer.get_parameter(own).shape != weight.shape:
                shapes = tuple(weight.shape), tuple(layer.get_parameter(own).shape)
                raise ConfigError(f"{sharing_group_name!r} shares weights of the shapes {shapes[0]} and {shapes[1]}")
            owner, _, name = own.rpartition(".")
            setattr(layer.get_submodule(owner), name, weight)
