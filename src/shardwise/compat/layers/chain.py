"""A model that is nothing but layers, each of which is given what the one before returned."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from shardwise.errors import ConfigError, counted
from shardwise.plan.pipeline_plan import LayerOrder

__all__ = ["Chain", "share_weights", "spread_evenly", "starts_of"]


class Chain(nn.Module):
    """Layers one after another, and what makes a loss of the last one's output.

    Args:
        layers: each takes what the one before returned, as one argument: any structure of tensors.
        loss: of the last output and the labels.
    """

    def __init__(self, layers: Sequence[nn.Module], loss: Callable[[Any, Any], Tensor] | None = None) -> None:
        if not isinstance(layers, list | tuple) or not all(isinstance(each, nn.Module) for each in layers):
            raise ConfigError(f"a {type(layers).__name__} is no list of layers", fix="use a list of torch modules")
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.__dict__["_loss"] = loss  # no child: names are those of the layers

    def forward(self, inputs: Any, labels: Any = None) -> Any:
        """The loss; what the last layer returned where there are no labels, or nothing that makes a loss.

        Args:
            inputs: what the first layer takes; a tensor alone is given to it in a list.
            labels: what the loss takes, or a list that begins with it.
        """
        passed = [inputs] if isinstance(inputs, Tensor) else inputs
        for layer in self.layers:
            passed = layer(passed)
        output = passed[0] if isinstance(passed, list | tuple) else passed
        loss: Any = self.__dict__["_loss"]
        if labels is None or loss is None:
            return output
        return loss(output, labels[0] if isinstance(labels, list | tuple) else labels)

    def order(self) -> LayerOrder:
        """The layers as they run."""
        names = {id(layer): f"layers.{number}" for number, layer in reversed(list(enumerate(self.layers)))}
        uses = {name: (int(name.split(".")[1]),) for name, _ in self.named_parameters(remove_duplicate=False)}
        return LayerOrder(
            calls=tuple(names[id(layer)] for layer in self.layers), uses=uses, crossings=(), is_chain=True
        )


def spread_evenly(layers: Sequence[nn.Module], num_stages: int) -> dict[nn.Module, int]:
    """Layers to stages, the same number to each; what is left over goes to the last stage.

    Raises:
        ConfigError: there are fewer layers than stages.
    """
    size = len(layers) // num_stages
    if not size:
        raise ConfigError(
            f"{counted(num_stages, 'stage')} for {counted(len(layers), 'layer')}", why="every stage has a layer or more"
        )
    return {layer: min(number // size, num_stages - 1) for number, layer in enumerate(layers)}


def starts_of(layers: Sequence[nn.Module], num_stages: int, stages: Mapping[nn.Module, int]) -> tuple[int, ...]:
    """With which layer each stage begins.

    Raises:
        ConfigError: a layer has no stage, a stage no layer, or the stages do not follow one another.
    """
    found: list[Any] = [stages.get(layer) for layer in layers]
    if set(found) != set(range(num_stages)) or found != sorted(found):
        raise ConfigError(
            f"the stages of {counted(len(layers), 'layer')} are {found}",
            why=f"each of {num_stages} stages has layers that follow one another, from the first layer to the last",
            fix=f"give every layer a stage from 0 to {num_stages - 1}, in ascending order",
        )
    return tuple(found.index(stage) for stage in range(num_stages))


def share_weights(layer_and_weight_path: Sequence[tuple[nn.Module, str]], sharing_group_name: str = "default") -> None:
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
