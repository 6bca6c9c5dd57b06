"""What is done to a model once tensor parallelism has split it."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import nn

from shardwise.layers.registry import Registry
from shardwise.plan.options import Compile, FsdpPolicy, Precision, Recompute
from shardwise.split.caches import train_without_cache
from shardwise.split.compiled import apply_compilation
from shardwise.split.data import apply_data_parallelism
from shardwise.split.precision import apply_precision
from shardwise.split.remat import apply_recomputation

__all__ = ["Choices"]


@dataclass(frozen=True, kw_only=True)
class Choices:
    """The options of `load` and `parallelize` beside the plan."""

    fsdp: FsdpPolicy = field(default_factory=FsdpPolicy)
    precision: Precision | None = None
    recompute: Recompute = field(default_factory=Recompute)
    compilation: Compile | None = None

    def apply(self, model: nn.Module, registry: Registry) -> None:
        """From the inside out: FSDP2 gathers a unit before anything in it runs, or runs again.

        Raises:
            ConfigError: a choice names what the model does not have.
            UnsupportedError: it asks for what this torch or device does not have.
        """
        apply_precision(model, registry, self.precision)
        apply_recomputation(model, self.recompute)
        apply_compilation(model, self.compilation)
        train_without_cache(model, recomputes=self.recompute.mode != "none")
        apply_data_parallelism(model, registry, self.fsdp)
