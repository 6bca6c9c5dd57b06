"""What a user may choose besides the layout and the plan: frozen values, checked when they are made."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from shardwise.errors import ConfigError, did_you_mean
from shardwise.plan.spec import Plan

__all__ = ["Compile", "FsdpPolicy", "ParallelSpec", "Pipeline", "Precision", "Recompute", "check_choice"]

_STAGES = (1, 2, 3)
_DTYPES = ("float32", "bfloat16", "float16", "float64")
_NONFINITE = ("raise", "skip", "ignore")
_MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
_RECOMPUTED = ("none", "full", "attention", "selective", "alternate", "budget")


@dataclass(frozen=True, kw_only=True)
class FsdpPolicy:
    """How parameters, gradients and optimizer states are stored along `fsdp` and `ddp` (FSDP2; ZeRO, arXiv 1910.02054).

    Parameters, gradients and optimizer states are sharded over `fsdp` in every stage; the stages differ in how long
    what was gathered or not yet reduced is kept:

        stage   parameters are gathered       gradients are reduce-scattered
        3       for each forward and backward of a unit, freed in between   after every microbatch
        2       once a step, kept until the last backward                   after every microbatch
        1       once a step, kept until the last backward                   once a step, after the last microbatch

    A unit is a block, the embedding, the head (with the embedding where they are tied), or what is left of the model.

    Attributes:
        zero_stage: 1, 2 or 3.
        units: patterns of the names of the modules that are units, instead of layers, embedding and head; with none,
            `()`, the whole model is one. Modules that share a parameter are one unit in any case.
        keep_last_block: at stage 3, do not free the last block between its forward and its backward, which follow each
            other.
        prefetch: how many units ahead parameters are gathered, forward and backward. 1 is what FSDP2 does by itself.
        cpu_offload: keep parameters, gradients and optimizer states in host memory; each unit is copied to the device
            when it is used.
        gradient_divide_factor: what gradients are divided by on the wire, against overflow of narrow dtypes; by
            default the number of data ranks. `TrainStep` multiplies the loss by it, so results do not depend on it.
        separate_reduce_group: reduce gradients on a communicator of their own, next to the one that gathers parameters
            (torch 2.13).
        symmetric_memory: communicate through NCCL's symmetric memory (CUDA, torch 2.13).

    Raises:
        ConfigError: a value is none of those named.
    """

    zero_stage: int = 3
    units: tuple[str, ...] | None = None
    keep_last_block: bool = True
    prefetch: int = 1
    cpu_offload: bool = False
    gradient_divide_factor: float | None = None
    separate_reduce_group: bool = False
    symmetric_memory: bool = False

    def __post_init__(self) -> None:
        if self.zero_stage not in _STAGES:
            raise ConfigError(f"zero_stage is {self.zero_stage!r}", fix="use 1, 2 or 3")
        if self.units is not None:
            object.__setattr__(self, "units", _patterns(self.units))
        if self.prefetch < 1:
            raise ConfigError(
                f"prefetch is {self.prefetch!r}", why="it counts units", fix="use an integer of at least 1"
            )
        factor = self.gradient_divide_factor
        if factor is not None and not factor > 0:
            raise ConfigError(f"gradient_divide_factor is {factor!r}", fix="use a positive number, or leave it out")


@dataclass(frozen=True, kw_only=True)
class Precision:
    """The dtypes of training (mixed precision, arXiv 1710.03740).

    The default keeps float32 parameters, which the optimizer updates, computes in bfloat16 and sums gradients in
    float32. What is frozen when the model is split is kept in the dtype of computation, if that is narrower, and cannot
    be trained later. Over the data axes FSDP2 gathers parameters in the dtype of computation; on one data rank they are
    cast where they are used. Inputs of the model and of every unit are cast too.

    Attributes:
        params: of parameters, gradients and optimizer states at rest.
        compute: of forward and backward. With "float16" `TrainStep` scales the loss, by as much as gradients bear.
        reduce: of gradients while they are summed over the data axes.
        nonfinite: what an optimizer from `build_optimizer` does where some gradient is infinite or NaN, decided on all
            ranks alike: "raise" an error, also for a `TrainStep`'s loss, "skip" the step, or "ignore" it and step. With
            "float16" an overflow is skipped in any case, and the loss scaled less. On GPUs fused optimizers leave a
            step out without asking the device (others ask once a step); the error comes at the next step, or the next
            save, and until then every step is left out, so that the weights are those before the first bad one.

    Raises:
        ConfigError: a value is none of those named.
    """

    params: str = "float32"
    compute: str = "bfloat16"
    reduce: str = "float32"
    nonfinite: str = "raise"

    def __post_init__(self) -> None:
        for name in ("params", "compute", "reduce"):
            check_choice(f"Precision {name}", getattr(self, name), _DTYPES)
        check_choice("Precision nonfinite", self.nonfinite, _NONFINITE)
        if self.params == "float16":
            raise ConfigError(
                "Precision params is 'float16'",
                why="updates are lost to rounding, and gradients overflow at rest",
                fix='keep parameters in float32 and use compute="float16"',
            )


@dataclass(frozen=True, kw_only=True)
class Recompute:
    """What forward does not keep and backward computes again (activation checkpointing, arXiv 1604.06174).

    Blocks are the modules in the model's lists of modules; a block that is recomputed keeps its inputs alone.

        "none"        everything is kept
        "full"        blocks are computed again, collectives of tensor parallelism included
        "attention"   attention modules are, whose memory may grow with the square of the sequence
        "selective"   blocks are, except what is expensive to compute: matrix products, attention and collectives are
        kept
        "alternate"   as "selective", but of a block's matrix products every second is computed again
        "budget"      of what compiled blocks would keep, torch keeps as much as `budget` allows, and chooses what

    Attributes:
        mode: none, full, attention, selective, alternate or budget.
        modules: instead of blocks, modules whose names match one of these patterns (`model.layers.*.mlp`), none
            of them inside another.
        budget: with mode "budget", the share of bytes, from 0 (inputs alone) to 1 (as torch.compile does by itself).

    Raises:
        ConfigError: a value is none of those named, or they exclude each other.
    """

    mode: str = "none"
    modules: tuple[str, ...] = ()
    budget: float | None = None

    def __post_init__(self) -> None:
        check_choice("Recompute mode", self.mode, _RECOMPUTED)
        object.__setattr__(self, "modules", _patterns(self.modules))
        if self.modules and self.mode in ("none", "attention", "budget"):
            raise ConfigError(
                f"Recompute modules with mode {self.mode!r}",
                why="patterns say which modules are recomputed in place of blocks",
                fix='use mode="full" or mode="selective" with them',
            )
        if (self.mode == "budget") != (self.budget is not None):
            raise ConfigError(
                f"Recompute mode {self.mode!r} with budget {self.budget}", fix='use mode="budget" and budget=0.5, say'
            )
        if self.budget is not None and not 0 <= self.budget <= 1:
            raise ConfigError(f"Recompute budget is {self.budget!r}", fix="use a share from 0 to 1")


@dataclass(frozen=True, kw_only=True)
class Compile:
    """How `torch.compile` compiles each block: as one graph, or there is an error that names the line.

    Attributes:
        backend: of torch.compile; "inductor" needs a C++ compiler on CPUs.
        dynamic: whether sequence lengths are left open: None compiles for the first length, and for any at the second.
        mode: of torch.compile: "default", "reduce-overhead", "max-autotune" or "max-autotune-no-cudagraphs".
        options: of the backend, by name, in place of a mode.

    Raises:
        ConfigError: a value is none of those named, or they exclude each other.
    """

    backend: str = "inductor"
    dynamic: bool | None = None
    mode: str | None = None
    options: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        if self.mode is not None:
            check_choice("Compile mode", self.mode, _MODES)
        if self.mode is not None and self.options:
            raise ConfigError(
                f"Compile has mode {self.mode!r} and options", why="a mode is a set of options", fix="use one of both"
            )


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """How a model's layers are divided into stages along `pp`, and in what order stages compute (arXiv 1811.06965,
    2104.04473, 2401.10241, 2405.15362, 2412.19437).

    Attributes:
        schedule: "gpipe", "1f1b", "interleaved_1f1b", "looped_bfs", "interleaved_zero_bubble", "zbv" or "dualpipev".
        num_stages_per_rank: how many stages a rank holds; by default the fewest that the schedule takes.
        layers: where stages are cut, counted over all layers in the order in which they run: the first layer of every
            stage (`(0, 7, 15)`, beginning with 0), or the number of layers of every stage (`(7, 8, 9)`); by default
            stages cost as equal as they can, embedding and head counted.

    Raises:
        ConfigError: a value is none of those named.
    """

    schedule: str = "1f1b"
    num_stages_per_rank: int | None = None
    layers: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        number = self.num_stages_per_rank
        if number is not None and number < 1:
            raise ConfigError(f"Pipeline num_stages_per_rank is {number!r}", fix="use an integer of at least 1")
        if self.layers is not None:
            object.__setattr__(self, "layers", tuple(self.layers))
            if not self.layers or min(self.layers) < 0:
                raise ConfigError(
                    f"Pipeline layers is {self.layers!r}",
                    why="it says with which layer every stage begins, or how many each holds",
                    fix="use integers, such as (0, 7, 15)",
                )


def _patterns(patterns: str | Iterable[str]) -> tuple[str, ...]:
    """Patterns as a tuple; text is one pattern."""
    return (patterns,) if isinstance(patterns, str) else tuple(patterns)


def check_choice(what: str, value: object, choices: tuple[str, ...]) -> None:
    """Raises `ConfigError`, with the nearest of the choices, where the value is none of them."""
    if value not in choices:
        raise ConfigError(
            f"{what} is {value!r}{did_you_mean(str(value), choices)}", fix=f"use one of {', '.join(choices)}"
        )


def check_count(what: str, value: object) -> None:
    """Raises `ConfigError` where the value is no integer of at least 1."""
    if type(value) is not int or value < 1:
        raise ConfigError(f"{what} is {value!r}", fix="use an integer of at least 1")


def check_kind(what: str, value: object, kinds: Any, *, fix: str) -> None:
    """Raises `ConfigError` where the value is of none of these types."""
    if not isinstance(value, kinds):
        raise ConfigError(f"{what} cannot be a {type(value).__name__}", fix=fix)


_GROUPS = {
    "fsdp": FsdpPolicy,
    "precision": Precision,
    "recompute": Recompute,
    "compilation": Compile,
    "pipeline": Pipeline,
}
"""Options of a `ParallelSpec` that are values of their own: these are often passed as text or as a dictionary."""


@dataclass(frozen=True, kw_only=True)
class ParallelSpec:
    """What a user asks for besides a model and a layout: the one value that `load`, `parallelize`, `verify`, `describe`
    and the command line make of their options, and that every step of splitting reads.

    Attributes:
        plan: "auto", "declared", "derived", or rules on top of the automatic ones; see `shardwise.parallelize`.
        sequence_parallel: split hidden states between blocks along the sequence too.
        fsdp: how the data axes shard parameters, gradients and optimizer states.
        precision: the dtypes of parameters, computation and gradient reduction; None keeps every tensor's own.
        recompute: what backward computes again.
        compilation: how `torch.compile` compiles every block; None runs eagerly.
        pipeline: how layers are divided into stages along pp.

    Raises:
        ConfigError: options exclude each other.
    """

    plan: str | Plan | Mapping[str, str] = "auto"
    sequence_parallel: bool = False
    fsdp: FsdpPolicy = field(default_factory=FsdpPolicy)
    precision: Precision | None = None
    recompute: Recompute = field(default_factory=Recompute)
    compilation: Compile | None = None
    pipeline: Pipeline = field(default_factory=Pipeline)

    def __post_init__(self) -> None:
        for name, kind in _GROUPS.items():
            if not isinstance(value := getattr(self, name), kind | None):
                raise ConfigError(f"{name} is {value!r}", fix=f"use shardwise.{kind.__name__}(...)")
        mode, backend = self.recompute.mode, self.compilation.backend if self.compilation is not None else "eager"
        if mode == "budget" and backend == "eager":
            raise ConfigError(
                "Recompute mode 'budget' without compilation",
                why="torch chooses what is kept when it divides a compiled block in forward and backward",
                fix='add Compile(), or use mode="alternate" or "selective"',
            )

    @classmethod
    def take(cls, options: Mapping[str, Any]) -> tuple[ParallelSpec, dict[str, Any]]:
        """The spec that some of `options` make, of which None means the default, and the other options."""
        own = {each.name for each in fields(cls)}
        others = {name: value for name, value in options.items() if name not in own}
        return cls(**{name: options[name] for name in own & options.keys() if options[name] is not None}), others
