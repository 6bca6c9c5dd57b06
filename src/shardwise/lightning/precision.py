"""Precision plugin: clips by the norm over all ranks, and converts Lightning's precision flags to a `Precision`."""

from typing import Any

import torch
from lightning.pytorch.plugins.precision import DoublePrecision, HalfPrecision, MixedPrecision
from lightning.pytorch.plugins.precision import Precision as LightningPrecision

from shardwise.errors import ConfigError, UnsupportedError
from shardwise.optim.clip import clip_grad_norm_
from shardwise.optim.optimizer import model_under
from shardwise.parameters.registry import local_part
from shardwise.plan.options import Precision

_MEANING = {
    "bf16-mixed": Precision(),
    "16-mixed": Precision(compute="float16"),
    "bf16-true": Precision(params="bfloat16"),
    "64-true": Precision(params="float64", compute="float64", reduce="float64"),
}
"""Lightning's flags in our words."""


class ShardwisePrecision(LightningPrecision):
    """Computes in the dtypes of a `Precision`, and clips like on the unsplit model.

    `ShardwiseStrategy` creates it from its option `precision` or from `Trainer(precision=...)`.
    `Trainer(plugins=[ShardwisePrecision(Precision(...))])` is equivalent to the option.

    Args:
        dtypes: dtypes of parameters, computation and reduction; None keeps every tensor's dtype.
    """

    def __init__(self, dtypes: Precision | None = None) -> None:
        super().__init__()
        self.dtypes = dtypes

    def clip_grad_by_norm(self, optimizer: torch.optim.Optimizer, clip_val: float) -> None:
        """Clips the gradients of the optimizer's parameters by their norm over all ranks.

        Communicates: over all ranks, one all-reduce of one value.
        """
        parameters = [each for group in optimizer.param_groups for each in group["params"]]
        clip_grad_norm_(parameters, clip_val, model=model_under(optimizer))

    def clip_grad_by_value(self, optimizer: torch.optim.Optimizer, clip_val: float) -> None:
        """Clips every entry of the gradients of the optimizer's parameters."""
        parameters = (each for group in optimizer.param_groups for each in group["params"])
        for gradient in [local_part(each.grad) for each in parameters if each.grad is not None]:
            gradient.clamp_(-clip_val, clip_val)


def read_precision(plugin: Any, own: Precision | None) -> ShardwisePrecision:
    """Returns the plugin for the arguments `Trainer(precision=..., plugins=...)`."""
    if isinstance(plugin, ShardwisePrecision):
        theirs = plugin.dtypes
    elif type(plugin) is LightningPrecision:
        theirs = None
    else:
        is_flag = type(plugin) in (MixedPrecision, HalfPrecision, DoublePrecision)
        flag = str(getattr(plugin, "precision", "")) if is_flag else ""
        if flag not in _MEANING:
            raise UnsupportedError(
                f"the precision plugin {type(plugin).__name__}{f' ({flag})' * bool(flag)} with ShardwiseStrategy",
                why="it converts modules or scales losses without regard to other ranks",
                fix=f"use Trainer(precision=...) with one of {', '.join(('32-true', *_MEANING))}, or\n"
                "ShardwiseStrategy(..., precision=shardwise.Precision(...))",
            )
        theirs = _MEANING[flag]
    if theirs is not None and own is not None and theirs != own:
        raise ConfigError(
            "two precisions: the Trainer's and the strategy's",
            why=f"the Trainer says {theirs}\nthe strategy says {own}",
            fix="set it in one place",
        )
    return ShardwisePrecision(own if theirs is None else theirs)
