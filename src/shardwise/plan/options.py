"""Options of a user besides layout and plan: frozen values, checked when they are created."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from shardwise.errors import ConfigError, did_you_mean
from shardwise.plan.spec import Plan

_STAGES = (1, 2, 3)
_DTYPES = ("float32", "bfloat16", "float16", "float64")
_NONFINITE = ("raise", "skip", "ignore")
_MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
_RECOMPUTED = ("none", "full", "attention", "selective", "alternate", "budget")


@dataclass(frozen=True, kw_only=True)
class FsdpPolicy:
    """How parameters, gradients and optimizer states are stored along `fsdp` and `ddp` (FSDP2; ZeRO, arXiv 1910.02054).

    All are sharded over `fsdp` in every stage. The stages differ in how long gathered parameters and unreduced
    gradients are kept:

        stage   parameters are gathered       gradients are reduce-scattered
        3       for each forward and backward of a unit, freed in between   after every microbatch
        2       once a step, kept until the last backward                   after every microbatch
        1       once a step, kept until the last backward                   once a step, after the last microbatch

    A unit is a block, the embedding, the head (with the embedding if they are tied), or the rest of the model.

    Attributes:
        zero_stage: 1, 2 or 3.
        units: patterns of the names of the modules that are units, instead of layers, embedding and head. With `()` the
            whole model is one unit. Modules that share a parameter always form one unit.
        keep_last_block: at stage 3, keep the last block gathered between its forward and its backward.
        prefetch: how many units ahead parameters are gathered, in forward and backward. FSDP2's own default is 1.
        cpu_offload: keep parameters, gradients and optimizer states in host memory; each unit is copied to the device
            when it is used.
        gradient_divide_factor: divisor of gradients during reduction, against overflow of narrow dtypes. Default: the
            number of data ranks. `TrainStep` multiplies the loss by it, so results do not depend on it.
        separate_reduce_group: reduce gradients and gather parameters on separate communicators (torch 2.13).
        symmetric_memory: communicate through NCCL's symmetric memory (CUDA, torch 2.13).

    Raises:
        ConfigError: a value is invalid.
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
    """Dtypes of mixed-precision training (arXiv 1710.03740).

    By default parameters are float32, computation is bfloat16, and gradients are summed in float32. Parameters that are
    frozen when the model is split are stored in the dtype of computation, if it is narrower, and cannot be trained
    later. Over the data axes FSDP2 gathers parameters in the dtype of computation; on one data rank they are cast on
    use. Inputs of the model and of every unit are cast too.

    Attributes:
        params: dtype of stored parameters, gradients and optimizer states.
        compute: dtype of forward and backward. With "float16" `TrainStep` uses dynamic loss scaling.
        reduce: dtype of gradients during reduction over the data axes.
        nonfinite: what an optimizer from `build_optimizer` does if a gradient is infinite or NaN; all ranks decide
            alike. "raise": raise an error, also for the loss of a `TrainStep`. "skip": skip the step. "ignore": take
            the step. With "float16" an overflow always skips the step and lowers the loss scale. On GPUs fused
            optimizers skip a step without synchronizing (others synchronize once a step). The error is raised at the
            next step or save, and every step until then is skipped, so the weights are those before the first bad step.

    Raises:
        ConfigError: a value is invalid.
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
    """Activation checkpointing (arXiv 1604.06174): what forward does not keep and backward recomputes.

    Blocks are the items of the model's module lists. A recomputed block keeps only its inputs.

        "none"        everything is kept
        "full"        blocks are recomputed, including collectives of tensor parallelism
        "attention"   attention modules are recomputed; their memory may grow with the square of the sequence
        "selective"   blocks are recomputed except expensive operations: matrix products, attention and collectives are
            kept
        "alternate"   like "selective", but every second matrix product of a block is recomputed too
        "budget"      torch chooses what compiled blocks keep, up to the share `budget` of bytes

    Attributes:
        mode: none, full, attention, selective, alternate or budget.
        modules: recompute modules whose names match one of these patterns (`model.layers.*.mlp`) instead of blocks;
            none of them inside another.
        budget: with mode "budget", the share of bytes, from 0 (only inputs) to 1 (the default of torch.compile).

    Raises:
        ConfigError: a value is invalid, or values exclude each other.
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
    """How `torch.compile` compiles each block: as one graph. A graph break is an error that names the line.

    Attributes:
        backend: backend of torch.compile; "inductor" needs a C++ compiler on CPUs.
        dynamic: whether sequence lengths are dynamic. None: static for the first length, dynamic from the second on.
        mode: mode of torch.compile: "default", "reduce-overhead", "max-autotune" or "max-autotune-no-cudagraphs".
        options: options of the backend by name, instead of a mode.

    Raises:
        ConfigError: a value is invalid, or values exclude each other.
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
    """How layers are divided into stages along `pp`, and the schedule (arXiv 1811.06965, 2104.04473, 2401.10241,
    2405.15362, 2412.19437).

    Attributes:
        schedule: "gpipe", "1f1b", "interleaved_1f1b", "looped_bfs", "interleaved_zero_bubble", "zbv" or "dualpipev".
        num_stages_per_rank: stages per rank. Default: the minimum of the schedule.
        layers: the first layer of every stage, beginning with 0, as in `(0, 7, 15)`; or the number of layers of every
            stage, as in `(7, 8, 9)`. Counts all layers in the order in which they run. Default: stages of nearly equal
            cost, including embedding and head.

    Raises:
        ConfigError: a value is invalid.
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
    """Returns the patterns as a tuple; a string is one pattern."""
    return (patterns,) if isinstance(patterns, str) else tuple(patterns)


def check_choice(what: str, value: object, choices: tuple[str, ...]) -> None:
    """Raises `ConfigError`, with the nearest choice, if `value` is not one of `choices`."""
    if value not in choices:
        raise ConfigError(
            f"{what} is {value!r}{did_you_mean(str(value), choices)}", fix=f"use one of {', '.join(choices)}"
        )


def check_count(what: str, value: object) -> None:
    """Raises `ConfigError`, which names the option `what`, unless `value` is an integer of at least 1."""
    if type(value) is not int or value < 1:
        raise ConfigError(f"{what} is {value!r}", fix="use an integer of at least 1")


def check_kind(what: str, value: object, kinds: Any, *, fix: str) -> None:
    """Raises `ConfigError` if `value` has none of the types `kinds`."""
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
    """A user's request besides model and layout.

    `load`, `parallelize`, `verify`, `describe` and the command line build it from their options. Every step of
    splitting reads it.

    Attributes:
        plan: "auto", "declared", "derived", or rules on top of the automatic plan; see `shardwise.parallelize`.
        sequence_parallel: also split hidden states between blocks along the sequence.
        fsdp: how the data axes shard parameters, gradients and optimizer states.
        precision: dtypes of parameters, computation and gradient reduction; None keeps every tensor's dtype.
        recompute: activation checkpointing.
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
        check_kind("sequence_parallel", self.sequence_parallel, bool, fix="use True or False")
        mode, backend = self.recompute.mode, self.compilation.backend if self.compilation is not None else "eager"
        if mode == "budget" and backend == "eager":
            raise ConfigError(
                "Recompute mode 'budget' without compilation",
                why="torch chooses what is kept when it divides a compiled block in forward and backward",
                fix='add Compile(), or use mode="alternate" or "selective"',
            )

    @classmethod
    def take(cls, options: Mapping[str, Any]) -> "tuple[ParallelSpec, dict[str, Any]]":
        """Builds a spec from the `options` that name its fields (None: the default); also returns the others."""
        own = {each.name for each in fields(cls)}
        others = {name: value for name, value in options.items() if name not in own}
        return cls(**{name: options[name] for name in own & options.keys() if options[name] is not None}), others
