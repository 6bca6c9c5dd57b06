"""`NxDModel`: a split model with NxD's methods."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.compat.neuronx_distributed.parallel_layers.parallel_state import current_mesh
from shardwise.errors import BatchError
from shardwise.runtime.registry import registry_of
from shardwise.train.step import TrainStep

__all__ = ["NxDModel"]


class NxDModel(nn.Module):
    """Wraps a split model; its modules and parameters keep their names, and `shardwise`'s functions take it, too."""

    def __init__(self, module: nn.Module, nxd_config: Mapping[str, Any] | None = None) -> None:
        super().__init__()
        self.__dict__["module"] = module  # no child: names have no prefix
        self.__dict__["nxd_config"] = dict(nxd_config or {})
        self.train()

    def local_module(self) -> nn.Module:
        """The split model itself."""
        return self.__dict__["module"]

    original_module = local_module

    def local_modules(self) -> list[nn.Module]:
        """The split model, in a list."""
        return [self.local_module()]

    def run_train(self, *args: Any, **kwargs: Any) -> Tensor:
        """Forward and backward of one batch; the loss, detached.

        A transformers model with labels is trained as `shardwise.TrainStep` does: the loss is the mean over the tokens
        of all data ranks' batches, with the `num_microbatches` of `pipeline_config`. Any other model gives its loss, an
        output with a `loss`, or a tuple that begins with it; gradients are means over data ranks.

        Args:
            args: one dictionary of inputs, or the arguments of forward.

        Raises:
            BatchError: the model gives no loss.
        """
        model = self.local_module()
        args, kwargs = _spread(args, kwargs)
        if not args and "labels" in kwargs and not registry_of(model).local_state:
            number = self.__dict__["nxd_config"].get("pipeline_config", {}).get("num_microbatches", 1)
            return TrainStep(model, current_mesh(), num_microbatches=number)(kwargs).loss
        loss = _loss_of(model(*args, **kwargs))
        loss.backward()
        return loss.detach()

    @torch.no_grad()
    def run_eval(self, *args: Any, **kwargs: Any) -> Any:
        """What the model computes, without gradients."""
        args, kwargs = _spread(args, kwargs)
        return self.local_module()(*args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's own."""
        return self.local_module()(*args, **kwargs)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """The model's, by its own names."""
        return self.local_module().named_parameters(*args, **kwargs)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Tensor]]:
        """The model's, by its own names."""
        return self.local_module().named_buffers(*args, **kwargs)

    def named_modules(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Module]]:
        """The model's, by its own names."""
        return self.local_module().named_modules(*args, **kwargs)

    def named_children(self) -> Iterator[tuple[str, nn.Module]]:
        """The model's, by its own names."""
        return self.local_module().named_children()

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The model's; see `shardwise.full_state_dict` for full tensors."""
        return self.local_module().state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The model's."""
        return self.local_module().load_state_dict(*args, **kwargs)

    @property
    def config(self) -> Any:
        """Of a transformers model."""
        return self.local_module().config

    @property
    def dtype(self) -> torch.dtype:
        """Of the first floating-point parameter."""
        return next((each.dtype for each in self.parameters() if each.is_floating_point()), torch.get_default_dtype())

    def train(self, mode: bool = True) -> NxDModel:
        """Sets the mode of the model, and of this wrapper."""
        self.training = mode
        self.local_module().train(mode)
        return self

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["module"], name)

    def __repr__(self) -> str:
        return f"NxDModel({self.local_module()!r})"


def _spread(args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """One dictionary of inputs, as keyword arguments."""
    if len(args) == 1 and isinstance(args[0], Mapping) and not kwargs:
        return (), dict(args[0])
    return args, kwargs


def _loss_of(output: Any) -> Tensor:
    loss = getattr(output, "loss", None) if not isinstance(output, Tensor) else output
    if loss is None and isinstance(output, tuple | list) and output:
        loss = output[0]
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        raise BatchError(
            f"run_train was given {type(output).__name__}, which is no loss",
            fix="let forward return the loss, an output with a loss, or a tuple that begins with it; pass labels",
        )
    return loss
