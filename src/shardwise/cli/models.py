"""The model and tokenizer that a configuration names."""

import inspect
import logging
from typing import Any

import torch
import transformers

from shardwise.api.building import load_by_spec
from shardwise.api.describing import Rehearsal
from shardwise.api.fitting import find_remedies
from shardwise.checkpoint.export import export_bytes
from shardwise.checkpoint.stored import StoredParts
from shardwise.cli.config_file import Problems, config_error
from shardwise.cli.data import build_encoder, check_records, load_tokenizer
from shardwise.cli.inputs import adapter_of, check_place, compilation_of, find_optimizer
from shardwise.data.config import DataConfig, held_out, rows_of
from shardwise.data.rows import DocumentMasking
from shardwise.errors import ConfigError, ShardwiseError, UnsupportedError, did_you_mean, one_line, sized
from shardwise.estimate.memory import Card
from shardwise.loss.label_use import check_label_use
from shardwise.mesh import Mesh
from shardwise.optim.optimizer import build_optimizer
from shardwise.parallel.build import model_class_of, num_positions, read_config
from shardwise.plan.options import ParallelSpec, Precision
from shardwise.probe.label_use import probe_document_masking
from shardwise.topology.shape import MeshShape
from shardwise.train.run_config import OptimizerConfig, Problem, TrainConfig

logger = logging.getLogger("shardwise.train")

SPECIAL_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")


def build_model(
    config: TrainConfig,
    mesh: Mesh,
    model_config: Any,
    spec: ParallelSpec,
    *,
    num_tokens: int,
    checkpoint: StoredParts | None = None,
) -> torch.nn.Module:
    """Returns the split model on `mesh`: loaded from `model.path`, or new with weights drawn from the seed.

    Args:
        num_tokens: vocabulary size of the tokenizer.
        checkpoint: of the run that resumes; its values replace those of `model.path`.
    """
    source = config.model
    if problems := _check_fit(model_config, config, num_tokens):
        raise config_error("the configuration", problems)
    model: torch.nn.Module = load_by_spec(
        model_config if source.path is None else source.path,
        mesh,
        spec,
        auto_class=class_of(config),
        dtype=getattr(torch, source.dtype),
        seed=config.seed,
        adapter=adapter_of(config),
        checkpoint=checkpoint,
        options={"allow_missing": source.allow_missing, "allow_unused": source.allow_unused},
    )
    return model


def find_run_apart(data: DataConfig, model_config: Any) -> DocumentMasking:
    """Returns how documents in a row are kept from attending to each other. Raises `UnsupportedError` if it is
    impossible.
    """
    kind = rows_of(data)
    if kind == "stream":
        return "padded without mask"  # a document sees those before it
    return probe_document_masking(model_config, transformers.AutoModelForCausalLM, packed=kind == "packed")


def spec_of(config: TrainConfig, device: torch.device | None = None) -> ParallelSpec:
    """Returns the options of a run on `device`; default: a GPU if there is one."""
    asked, chosen = config.precision, config.compilation
    device = device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
    automatic = "bfloat16" if device.type == "cuda" else config.model.dtype
    compute = automatic if asked.compute == "auto" else asked.compute
    return ParallelSpec(
        plan=config.model.plan or "auto",
        sequence_parallel=config.sequence_parallel,
        fsdp=config.fsdp,
        precision=Precision(params=config.model.dtype, compute=compute, reduce=asked.reduce, nonfinite=asked.nonfinite),
        recompute=config.recompute,
        pipeline=config.pipeline,
        compilation=compilation_of(chosen, device),
    )


def check_model(config: TrainConfig) -> list[Problem]:
    """Returns the problems of model, tokenizer, rows, layout, adapter and optimizer together. Reads no weights."""
    problems = Problems()
    with problems.of("model.path"):
        if config.model.path is not None:  # before the tokenizer, which may be missing because there is no model
            _check_task(read_config(config.model.path, {})[0], config)
    if problems:
        return problems
    with problems.of("model.tokenizer"):
        tokenizer = load_tokenizer(config)
        build_encoder(tokenizer)
    if problems:
        return problems
    with problems.of("model"):
        model_config = read_model_config(config, tokenizer)
        _check_task(model_config, config)
    if problems:
        return problems
    problems += check_records(config, tokenizer)
    read = [config.data, *([held_out(config.data, config.evaluation)] if config.evaluation.path else [])]
    for data in {rows_of(data): data for data in read}.values():
        with problems.of("data.rows"):
            find_run_apart(data, model_config)
    return [*problems, *_check_fit(model_config, config, len(tokenizer)), *_rehearse(config, model_config)]


def microbatch_of(config: TrainConfig, shape: MeshShape) -> tuple[int, int]:
    """Returns the rows and tokens of a microbatch on one data rank; one row where another layout needs more of them."""
    return max(1, config.batch_size // (shape.data_size * config.num_microbatches)), config.data.seq_length


def find_gpu() -> Card | None:
    """Returns the memory of the first visible GPU; None without one."""
    properties = torch.cuda.get_device_properties(0) if torch.cuda.is_available() else None
    return None if properties is None else Card(properties.name, properties.total_memory)


def check_memory(config: TrainConfig, card: Card) -> list[Problem]:
    """Returns a problem if a step of a run that has no other problems does not fit a card."""
    rehearsal = _rehearsal(config, read_model_config(config, load_tokenizer(config)), adapter_of(config))
    found = rehearsal.forecast(microbatch_of(config, rehearsal.shape), config.num_microbatches, most=card.num_bytes)
    if found.needed <= card.num_bytes:  # or a step is not known, which is no problem elsewhere either
        return []
    what = f"a step needs {sized(found.needed)}, and {card.name} are {sized(card.num_bytes)}"
    return [Problem("batch_size", what, find_remedies(card, found))]


def _rehearsal(config: TrainConfig, model_config: Any, adapter: Any) -> Rehearsal:
    return Rehearsal(
        source=model_config,
        shape=MeshShape.parse(config.layout),
        spec=spec_of(config),
        dtype=getattr(torch, config.model.dtype),
        auto_class=class_of(config),
        adapter=adapter,
    )


def class_of(config: TrainConfig) -> Any:
    """Returns the `auto_class` argument of `load`. With `model.allow_missing` a new head is trained on the checkpoint's
    body; otherwise the checkpoint names the class.
    """
    return transformers.AutoModelForCausalLM if config.model.allow_missing else None


def _check_task(model_config: Any, config: TrainConfig) -> None:
    chosen = class_of(config) or model_class_of(model_config)
    if chosen is not transformers.AutoModelForCausalLM:
        raise UnsupportedError(
            f"a model of type {model_config.model_type!r}",
            why=f"shardwise train trains causal language models, and this one is a {chosen.__name__}",
            fix="train it in Python, with shardwise.load and shardwise.TrainStep",
        )


def _rehearse(config: TrainConfig, model_config: Any) -> list[Problem]:
    """Returns the problems of building the model and its optimizer as the run does, on fake tensors."""
    problems = Problems()
    with problems.of("adapter"):
        adapter = adapter_of(config)
    if problems:
        return problems
    try:
        with _rehearsal(config, model_config, adapter).open() as model:
            with problems.of("model"):
                check_label_use(model)
            with problems.of("optimizer"):
                make_optimizer(config.optimizer, model)
            if config.export is not None:
                with problems.of("export"):
                    check_place(config.export, num_bytes=export_bytes(model))
    except ShardwiseError as error:
        problems.append(Problem(error.at if error.at in ("adapter", "pipeline") else "model", str(error)))
    except Exception as error:  # noqa: BLE001 - a model whose code needs values cannot run on fake tensors
        logger.info("cannot rehearse the run, which may work nevertheless: %s", error)
    return problems


def make_optimizer(config: OptimizerConfig, model: torch.nn.Module) -> torch.optim.Optimizer:
    """Returns the optimizer of a run, over the parameters of the split `model`."""
    optimizer_class = find_optimizer(config.name)
    accepted = inspect.signature(optimizer_class).parameters
    arguments = {"lr": config.lr, "weight_decay": config.weight_decay, **config.options}
    if config.weight_decay == 0 and "weight_decay" not in accepted:
        del arguments["weight_decay"]
    for key in {key for group in config.groups for key in group} - {"params", "max_dims"} - accepted.keys():
        raise ConfigError(f"optimizer.groups: {config.name} has no argument {key!r}{did_you_mean(key, accepted)}")
    try:
        return build_optimizer(model, optimizer_class, groups=config.groups, **arguments)
    except (TypeError, ValueError) as error:
        if isinstance(error, ShardwiseError):
            raise
        raise ConfigError(
            f"{config.name} cannot be built with these options",
            why=one_line(error),
            fix="correct optimizer.options and optimizer.groups",
        ) from error


def read_model_config(config: TrainConfig, tokenizer: Any) -> Any:
    """Returns the model's transformers config. A new model gets the tokenizer's vocabulary size and special tokens."""
    source = config.model.path or config.model.config
    if isinstance(source, dict):
        names = {"vocab_size": len(tokenizer), **{name: getattr(tokenizer, name) for name in SPECIAL_TOKENS}}
        source = names | source
    return read_config(source or {}, {})[0]


def _check_fit(model_config: Any, config: TrainConfig, num_tokens: int) -> list[Problem]:
    problems = []
    vocab_size = getattr(model_config.get_text_config(), "vocab_size", None)
    if vocab_size is not None and num_tokens > vocab_size:
        what = f"has {num_tokens:,} tokens, the model only {vocab_size:,}"
        fix = "use the model's own tokenizer, or a model with a larger vocab_size"
        problems.append(Problem("model.tokenizer", what, fix))
    window = num_positions(model_config)
    if window is not None and config.data.seq_length > window:
        what = f"is {config.data.seq_length:,}, but the model has {window:,} positions"
        problems.append(Problem("data.seq_length", what, f"use at most {window:,}"))
    return problems
