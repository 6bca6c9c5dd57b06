"""Configuration of a training run, as frozen values. Creating one reads nothing and starts nothing.

The fields are the keys of the YAML file of `shardwise train`: their names, types, bounds, defaults and help are defined
only here. `cli/config_file.py` reads the file.
"""

import math
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, NonNegativeInt, PositiveFloat, PositiveInt

from shardwise.data.config import DataConfig, EvaluationConfig, Place, Problem, TaskName, check_data
from shardwise.errors import ConfigError, MeshError, counted, did_you_mean
from shardwise.estimate.cuts import check_pipeline, fewest_microbatches, schedule_for
from shardwise.plan.options import FsdpPolicy, Pipeline, Recompute
from shardwise.topology.shape import UNSERVED_AXES, MeshShape

Finite = Field(allow_inf_nan=False)


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The model to train, and the dtype of its weights."""

    path: Place | None = None
    """Model directory or hub id: its weights are loaded."""
    config: str | dict[str, Any] | None = None
    """Instead of `path`: a configuration (a mapping, or a config.json), whose weights are drawn from the seed."""
    task: TaskName | None = None
    """What the model is trained for; by default what the class that the checkpoint names is for. With a task, a head
    that the checkpoint lacks, or has for another number of labels, is drawn from the seed."""
    tokenizer: Place | None = None
    """Tokenizer directory or hub id; by default the model's own."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of weights, gradients and optimizer state; `precision` says what is computed in."""
    plan: dict[str, str] = field(default_factory=dict)
    """Rules laid over the automatic plan: name pattern -> style."""
    allow_missing: tuple[str, ...] = ()
    """Patterns of parameters that the checkpoint at `path` may lack; they are drawn from the seed then."""
    allow_unused: tuple[str, ...] = ()
    """Patterns of tensors of that checkpoint which belong to layers that the model does not have."""


@dataclass(frozen=True, kw_only=True)
class PrecisionConfig:
    """Dtypes of computation, besides the weights' dtype `model.dtype`."""

    compute: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Type of forward and backward; `auto` is bfloat16 on GPUs and `model.dtype` on CPUs, where it is slower."""
    reduce: Literal["float32", "bfloat16"] = "float32"
    """Type in which gradients are summed over data-parallel ranks."""
    nonfinite: Literal["raise", "skip"] = "raise"
    """What happens to a step whose gradients are infinite or NaN; with float16 it is skipped in any case."""


@dataclass(frozen=True, kw_only=True)
class CompilationConfig:
    """Whether the blocks of the model are compiled, each as one graph."""

    backend: str | None = None
    """Backend of torch.compile, such as inductor; auto is inductor on GPUs and none on CPUs; null compiles nothing."""
    dynamic: bool | None = None
    """Whether sequence lengths are dynamic; null makes them dynamic when a second length comes."""
    mode: Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"] | None = None
    """Mode of torch.compile."""
    options: dict[str, Any] = field(default_factory=dict)
    """Options of the backend by their names, in place of a mode."""


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    """Learning-rate schedule over the run."""

    name: Literal["constant", "linear", "cosine", "warmup_stable_decay"] = "cosine"
    """Shape of the decay after the warmup; warmup_stable_decay falls linearly over the last `decay_steps`."""
    decay_steps: NonNegativeInt = 0
    """Of warmup_stable_decay: how many steps at the end of the run the rate falls."""
    warmup_steps: NonNegativeInt = 0
    """Steps over which the rate rises from 0."""
    final_ratio: Annotated[float, Field(ge=0, le=1)] = 0.1
    """Learning rate at the last step, as a share of `lr`; `constant` does not decay."""


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """The optimizer, and gradient clipping."""

    name: str = "AdamW"
    """A class of torch.optim, or the dotted path of another."""
    lr: Annotated[PositiveFloat, Finite] = 3e-4
    """Peak learning rate."""
    weight_decay: Annotated[float, Field(ge=0), Finite] = 0.0
    """Weight decay."""
    options: dict[str, Any] = field(default_factory=dict)
    """Further arguments of the class, such as `betas: [0.9, 0.95]`."""
    groups: tuple[dict[str, Any], ...] = ()
    """Other arguments for some parameters, by name pattern or number of dims, the first that fits:
    `[{max_dims: 1, weight_decay: 0}, {params: "**.embed_tokens.*", lr: 1.0e-4}]`."""
    max_grad_norm: PositiveFloat | None = 1.0
    """Largest norm of the gradients, to which they are clipped; null leaves them."""
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    state: Place | None = None
    """A checkpoint of transformers' Trainer: a new run goes on from the states of its optimizer, and from its step."""


@dataclass(frozen=True, kw_only=True)
class LogConfig:
    """Where the run's logs are written."""

    dir: Place = "runs/latest"
    """Holds train.jsonl (one object a step), config.yaml, data_state.json (where the reading of the data stands after
    the last step), ranks.json (the most memory of each rank) and, if asked for, tensorboard/."""
    every: PositiveInt = 10
    """Print every N steps when the output is not a terminal. On GPUs, metrics are also read from the device every N
    steps; train.jsonl still has every step."""
    tensorboard: bool = False
    """Also write TensorBoard events, like `to: [tensorboard]`."""
    to: tuple[str, ...] = ()
    """Trackers that get every record: tensorboard, or by their names in accelerate wandb, mlflow, trackio, comet_ml,
    aim, clearml, ... Their packages must be installed, and accelerate for all but tensorboard."""
    project: str = "shardwise"
    """Name of the project in those trackers."""
    callbacks: tuple[str, ...] = ()
    """Classes of your own that get every record, as `module:Class`. Such a class is called without arguments on rank 0;
    `report(record)` is called after every step, and `close()` at the end."""
    timeline: PositiveInt | None = None
    """A step whose pipeline is timed: when every stage ran is drawn in timeline.svg and kept in timeline.json (for
    chrome://tracing or Perfetto)."""

    @property
    def trackers(self) -> tuple[str, ...]:
        """The names in `to`, and tensorboard where `tensorboard` asks for it."""
        return tuple(dict.fromkeys([*self.to, *["tensorboard"] * self.tensorboard]))


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Where and when the run is saved, and whether it resumes."""

    dir: Place | None = None
    """Directory of checkpoints; null saves none. A run is saved at its end, and when Ctrl-C, SIGTERM, SIGHUP or
    SIGUSR1 ends it. Only one run at a time may save there."""
    every: PositiveInt | None = None
    """Also save every N steps."""
    minutes: Annotated[PositiveFloat, Finite] | None = None
    """Also save when N minutes have passed since the last save."""
    keep_last: PositiveInt | None = 2
    """Number of checkpoints that are kept, the newest ones; null keeps all."""
    best: bool = False
    """Also keep the best step by `evaluation.metric`, in `dir`/best; that one is exported then."""
    async_save: bool = False
    """Write in the background, while training goes on; takes a copy of what is saved in host memory."""
    resume: Literal["auto", "never"] = "auto"
    """Whether a run goes on from the newest checkpoint in `dir`, where there is one, in this layout or another."""
    change: tuple[str, ...] = ()
    """What may differ from the run that is resumed, such as `[optimizer.lr, optimizer.schedule, data]`. With new data,
    reading begins at its first batch."""


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """One training run."""

    __pydantic_config__ = ConfigDict(extra="forbid", strict=True, use_attribute_docstrings=True)

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    log: LogConfig = field(default_factory=LogConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    fsdp: FsdpPolicy = field(default_factory=FsdpPolicy)
    recompute: Recompute = field(default_factory=Recompute)
    pipeline: Pipeline = field(default_factory=Pipeline)
    compilation: CompilationConfig = field(default_factory=CompilationConfig)
    device: Annotated[str, Field(pattern=r"^(cpu|cuda(:\d+)?)$")] | None = None
    """Where ranks compute: `cpu`, or `cuda`, a card each. By default what SHARDWISE_DEVICE says, or cards where there
    are any."""
    layout: str = "tp1"
    """Ranks along each axis, outermost first, such as `tp2`."""
    sequence_parallel: bool = False
    """Split activations between the tensor-parallel regions along the sequence."""
    steps: PositiveInt = 1000
    """Optimizer steps."""
    epochs: Annotated[PositiveFloat, Finite] | None = None
    """Instead of `steps`: passes over the data."""
    batch_size: PositiveInt = 8
    """Rows of one step, over all ranks and microbatches."""
    num_microbatches: PositiveInt | Literal["auto"] = "auto"
    """Number of parts in which each rank processes its rows; more parts need less memory. `auto` is 1 without a
    pipeline, else the largest number up to 4 a stage that divides the rows and fits the schedule."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Decides the order of the data, dropout, and weights that are not loaded."""
    timeout_seconds: Annotated[float, Field(gt=0, lt=10**9)] = 600.0
    """How long ranks wait for a missing rank, at the start and in a step, before they fail and name it."""
    adapter: dict[str, Any] | None = None
    """Trains an adapter (LoRA) on the frozen model: any keys of peft.LoraConfig, such as
    `{r: 16, lora_alpha: 32, target_modules: all-linear}`, or `path`, the directory or hub id of an adapter that is
    trained further; and `export`, what is exported: `only` the adapter, as PEFT does (the default), `with_base` the
    model with the adapter inside, or `merged`."""
    export: Place | None = None
    """Directory for the trained model and its tokenizer, for `from_pretrained`; of a run with `adapter`, see there."""


def check_config(config: TrainConfig) -> list[Problem]:
    """Returns every error in `config` that its values show, besides their types and bounds."""
    return [
        *_check_sources(config),
        *check_data(config.data, config.evaluation),
        *_check_optimizer(config),
        *_check_layout(config),
        *_check_checkpoint(config),
    ]


def num_microbatches_of(config: TrainConfig, shape: MeshShape | None = None) -> int:
    """Returns the number of microbatches of a step: where it is `auto`, one that fits the schedule and the rows.

    Args:
        shape: in place of the run's own layout.

    Raises:
        ConfigError: no number fits.
    """
    if config.num_microbatches != "auto":
        return config.num_microbatches
    shape = shape or MeshShape.parse(config.layout)
    if shape.pp_size == 1:
        return 1
    fewest = fewest_microbatches(config.pipeline, shape)
    num_rows = config.batch_size // shape.data_size
    for number in sorted(range(fewest, num_rows + 1), key=lambda number: (number > 4 * shape.pp_size, -number)):
        if num_rows % number == 0:
            with suppress(ConfigError):  # an interleaved schedule takes some numbers only
                schedule_for(config.pipeline, shape, number)
                return number
    raise ConfigError(
        f"no number of microbatches from {fewest} on divides the {counted(num_rows, 'row')} of a rank",
        why=f"{config.pipeline.schedule} on {shape} takes {fewest} or more",
        fix=f"use a batch_size that is a multiple of {fewest * shape.data_size}",
    )


def lr_factor(schedule: ScheduleConfig, *, step: int, num_steps: int) -> float:
    """Returns the factor of the peak learning rate at `step` (from 0) of `num_steps`."""
    if step < schedule.warmup_steps:
        return (step + 1) / (schedule.warmup_steps + 1)
    if schedule.name == "constant":
        return 1.0
    if schedule.name == "warmup_stable_decay":
        left = (num_steps - step) / (schedule.decay_steps + 1)
        return min(1.0, schedule.final_ratio + (1 - schedule.final_ratio) * left)
    progress = (step - schedule.warmup_steps) / max(1, num_steps - 1 - schedule.warmup_steps)
    left = 1 - progress if schedule.name == "linear" else (1 + math.cos(math.pi * progress)) / 2
    return schedule.final_ratio + (1 - schedule.final_ratio) * left


def _check_checkpoint(config: TrainConfig) -> Iterator[Problem]:
    checkpoint = config.checkpoint
    if checkpoint.best and config.evaluation.path is None:
        yield Problem("checkpoint.best", "needs held-out data", "name evaluation.path")
    keys = [each.name for each in fields(TrainConfig)]
    for name in (name for name in checkpoint.change if name.partition(".")[0] not in keys):
        yield Problem("checkpoint.change", f"there is no key {name!r}{did_you_mean(name, keys)}")
    if checkpoint.dir is None and checkpoint != CheckpointConfig():
        yield Problem("checkpoint.dir", "is missing", "the other keys of checkpoint need it")


def _check_sources(config: TrainConfig) -> Iterator[Problem]:
    model = config.model
    if (model.path is None) == (model.config is None):
        given = "neither is given" if model.path is None else "both are given"
        yield Problem("model", f"takes either path (trained weights) or config (new weights); {given}")
    if model.config is not None and model.path is None and model.tokenizer is None:
        yield Problem(
            "model.tokenizer", "is missing", "a model made from model.config brings no tokenizer, so name one"
        )
    if isinstance(model.config, Mapping) and "model_type" not in model.config:
        yield Problem("model.config", "has no model_type", "name the architecture, such as model_type: llama")


def _check_optimizer(config: TrainConfig) -> Iterator[Problem]:
    schedule = config.optimizer.schedule
    if config.epochs is not None:
        if config.steps != TrainConfig.steps:
            yield Problem("epochs", f"is {config.epochs}, and steps is {config.steps}", "give one of them")
        return  # the number of steps is known when the data is
    for key in {"lr", "weight_decay"} & config.optimizer.options.keys():
        yield Problem(f"optimizer.options.{key}", f"is in the wrong place: it is optimizer.{key}")
    if schedule.warmup_steps > config.steps:
        what = f"is {schedule.warmup_steps}, must be between 0 and steps ({config.steps})"
        yield Problem("optimizer.schedule.warmup_steps", what)
    elif schedule.decay_steps > config.steps - schedule.warmup_steps:
        yield Problem("optimizer.schedule.decay_steps", f"is {schedule.decay_steps}, which does not fit into the steps")
    elif (is_wsd := schedule.name == "warmup_stable_decay") != (schedule.decay_steps > 0):
        fix = "say over how many steps the rate falls" if is_wsd else "it belongs to warmup_stable_decay"
        yield Problem("optimizer.schedule.decay_steps", f"is {schedule.decay_steps} with {schedule.name}", fix)


def _check_layout(config: TrainConfig) -> Iterator[Problem]:
    try:
        shape = MeshShape.parse(config.layout)
    except MeshError as error:
        yield Problem("layout", str(error))
        return
    for axis in UNSERVED_AXES:
        if shape.size(axis) > 1:
            yield Problem("layout", f"is {shape}, and {axis} is not supported yet", "use pp, ddp, fsdp and tp")
    yield from _check_pipeline(config, shape)
    if config.fsdp != FsdpPolicy() and shape.data_size == 1:
        yield Problem("fsdp", f"configures the fsdp and ddp axes; the layout is {shape}")
    number = 1 if config.num_microbatches == "auto" else config.num_microbatches
    parts = shape.data_size * number
    if config.batch_size % parts:
        yield Problem(
            "batch_size",
            f"is {config.batch_size}, which does not divide into {counted(shape.data_size, 'data-parallel part')} "
            f"of {counted(number, 'microbatch')}",
            f"use a multiple of {parts}",
        )
    if config.sequence_parallel and shape.tp_size == 1:
        yield Problem("sequence_parallel", f"needs at least 2 tp ranks; the layout is {shape}")


def _check_pipeline(config: TrainConfig, shape: MeshShape) -> Iterator[Problem]:
    chosen, timed = config.pipeline, config.log.timeline
    if timed is not None and (shape.pp_size == 1 or (config.epochs is None and timed > config.steps)):
        why = (
            f"the run has {counted(config.steps, 'step')}"
            if shape.pp_size > 1
            else f"the layout is {shape}, without pp"
        )
        yield Problem("log.timeline", f"is {timed}, which is no step of a pipeline: {why}")
    if shape.pp_size == 1:
        if chosen != Pipeline():
            yield Problem("pipeline", f"configures the pp axis; the layout is {shape}")
        return
    try:
        check_pipeline(chosen, shape, config.recompute)
    except ConfigError as error:
        yield Problem("pipeline", str(error))
        return
    try:
        schedule_for(chosen, shape, num_microbatches_of(config))
    except ConfigError as error:
        yield Problem("batch_size" if config.num_microbatches == "auto" else "num_microbatches", str(error))
