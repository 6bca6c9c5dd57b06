"""What a user may choose about data parallelism, beside the layout: frozen values, said once, checked when made."""

from __future__ import annotations

from dataclasses import dataclass

from shardwise.errors import ConfigError

__all__ = ["FsdpPolicy"]

_STAGES = (1, 2, 3)


@dataclass(frozen=True, kw_only=True)
class FsdpPolicy:
    """How parameters, gradients and optimizer states lie along `fsdp` and `ddp` (FSDP2; ZeRO, arXiv 1910.02054).

    Parameters, gradients and optimizer states are sharded over `fsdp` in every stage; the stages differ in how long
    what was gathered or not yet reduced is kept:

        stage   parameters are gathered       gradients are reduce-scattered
        3       for each forward and backward of a unit, freed in between   behind every microbatch
        2       once a step, kept until the last backward                   behind every microbatch
        1       once a step, kept until the last backward                   once a step, behind the last microbatch

    A unit is a block, the embedding, the head (with the embedding where they are tied), or what is left of the model.

    Attributes:
        zero_stage: 1, 2 or 3.
        keep_last_block: at stage 3, do not free the last block between its forward and its backward, which follow each
            other.
        prefetch: how many units ahead parameters are gathered, forward and backward. 1 is what FSDP2 does by itself.
        cpu_offload: keep parameters, gradients and optimizer states in host memory; each unit is copied to the device
            when it is used.
        gradient_divide_factor: what gradients are divided by on the wire, against overflow of narrow dtypes; by
            default the number of data ranks. `TrainStep` multiplies the loss by it, so results do not depend on it.
        separate_reduce_group: reduce gradients on a communicator of their own, beside the one that gathers parameters
            (torch 2.13).
        symmetric_memory: communicate through NCCL's symmetric memory (CUDA, torch 2.13).

    Raises:
        ConfigError: a value is none of those named.
    """

    zero_stage: int = 3
    keep_last_block: bool = True
    prefetch: int = 1
    cpu_offload: bool = False
    gradient_divide_factor: float | None = None
    separate_reduce_group: bool = False
    symmetric_memory: bool = False

    def __post_init__(self) -> None:
        if self.zero_stage not in _STAGES:
            raise ConfigError(f"zero_stage is {self.zero_stage!r}", fix="use 1, 2 or 3")
        if type(self.prefetch) is not int or self.prefetch < 1:
            raise ConfigError(
                f"prefetch is {self.prefetch!r}", why="it counts units", fix="use an integer of at least 1"
            )
        factor = self.gradient_divide_factor
        if factor is not None and not factor > 0:
            raise ConfigError(f"gradient_divide_factor is {factor!r}", fix="use a positive number, or leave it out")
