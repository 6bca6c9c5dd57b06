"""The model and tokenizer that a configuration names."""

import inspect
import logging
from contextlib import suppress
from typing import Any

import torch

from shardwise.api.building import load_by_spec
from shardwise.api.fitting import find_remedies
from shardwise.api.rehearsal import Rehearsal
from shardwise.checkpoint.export import export_bytes
from shardwise.checkpoint.stored import StoredParts
from shardwise.cli.config_file import Problems, config_error
from shardwise.cli.data import build_encoder, check_records, load_tokenizer
from shardwise.cli.inputs import adapter_of, check_place, compilation_of, find_optimizer
from shardwise.cli.metrics import check_metrics
from shardwise.cli.tasks import class_of, example_rows, find_task, new_head, open_tools, read_model_config
from shardwise.data.config import DataConfig, Problem, held_out, rows_of, sources_of
from shardwise.data.rows import DocumentMasking
from shardwise.data.tasks import TASKS
from shardwise.errors import ConfigError, ShardwiseError, as_error, did_you_mean, sized
from shardwise.estimate.memory import Card
from shardwise.loss.label_use import check_label_use
from shardwise.mesh import Mesh
from shardwise.optim.optimizer import build_optimizer
from shardwise.parallel.build import num_positions, read_generation_config
from shardwise.plan.options import ParallelSpec, Precision
from shardwise.probe.label_use import probe_document_masking
from shardwise.runtime.adapter_facts import find_model
from shardwise.topology.shape import MeshShape
from shardwise.train.run_config import OptimizerConfig, TrainConfig, num_microbatches_of

logger = logging.getLogger("shardwise.train")


def build_model(
    config: TrainConfig,
    mesh: Mesh,
    model_config: Any,
    spec: ParallelSpec,
    *,
    num_tokens: int | None,
    checkpoint: StoredParts | None = None,
) -> torch.nn.Module:
    """Returns the split model on `mesh`: loaded from `model.path`, or new with weights drawn from the seed.

    Args:
        num_tokens: vocabulary size of the tokenizer; None: there is none.
        checkpoint: of the run that resumes; its values replace those of `model.path`.
    """
    source = config.model
    if problems := _check_fit(model_config, config, num_tokens):
        raise config_error("the configuration", problems)
    options: dict[str, Any] = {"allow_missing": source.allow_missing, "allow_unused": source.allow_unused}
    if head := new_head(config, model_config):
        options |= {"allow_missing": (*source.allow_missing, *head), "ignore_mismatched_sizes": head}
    model: torch.nn.Module = load_by_spec(
        model_config if source.path is None else source.path,
        mesh,
        spec,
        auto_class=class_of(config),
        dtype=getattr(torch, source.dtype),
        seed=config.seed,
        adapter=adapter_of(config),
        config=model_config,
        checkpoint=checkpoint,
        options=options,
    )
    return model


def find_run_apart(data: DataConfig, model_config: Any, auto_class: Any) -> DocumentMasking:
    """Returns how documents in a row are kept apart in attention. Raises `UnsupportedError` if it is impossible."""
    kind = rows_of(data)
    if kind == "stream":
        return "padded without mask"  # a document sees those before it
    return probe_document_masking(model_config, auto_class, packed=kind == "packed")


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
    with problems.of("model.path" if config.model.path is not None else "model"):
        task = find_task(config)  # before the tokenizer, which may be missing because there is no model
    if problems:
        return problems
    with problems.of("model.tokenizer"):
        tokenizer = load_tokenizer(config) if "tokenizer" in TASKS[task].needs else None
        if TASKS[task].encode is None:
            build_encoder(tokenizer)
    if problems:
        return problems
    with problems.of("model"):
        model_config = read_model_config(config, tokenizer)
    if problems:
        return problems
    tools = None
    read = [config.data, *([held_out(config.data, config.evaluation)] if config.evaluation.path else [])]
    if TASKS[task].encode is None:
        problems += check_records(config, tokenizer)
        for data in {rows_of(data): data for data in read}.values():
            with problems.of("data.rows"):
                find_run_apart(data, model_config, TASKS[task].auto_class)
    else:
        with problems.of("data"):
            tools, model_config = open_tools(config, model_config, tokenizer)
            for data in read:
                rows = example_rows(sources_of(data), TASKS[task], tools)
                rows.read([0, rows.num_rows - 1], width=0)
    with problems.of("evaluation.metric"):
        check_metrics(config, TASKS[task], tools)
    num_tokens = len(tokenizer) if tokenizer is not None else None
    return [*problems, *_check_fit(model_config, config, num_tokens), *_rehearse(config, model_config)]


def microbatch_of(config: TrainConfig, shape: MeshShape) -> tuple[tuple[int, int], int | None]:
    """Returns the rows and tokens of a microbatch on one data rank, and how many there are in a step.

    Where another layout needs more rows that is one row, and the number is not known.
    """
    number = None
    with suppress(ConfigError):
        number = num_microbatches_of(config, shape)
    num_rows = config.batch_size // (shape.data_size * (number or 1))
    return (max(1, num_rows), config.data.seq_length), number


def find_gpu() -> Card | None:
    """Returns the memory of the first visible GPU; None without one."""
    properties = torch.cuda.get_device_properties(0) if torch.cuda.is_available() else None
    return None if properties is None else Card(properties.name, properties.total_memory)


def check_memory(config: TrainConfig, card: Card) -> list[Problem]:
    """Returns a problem if a step of a run that has no other problems does not fit a card."""
    tokenizer = load_tokenizer(config) if "tokenizer" in TASKS[find_task(config)].needs else None
    rehearsal = _rehearsal(config, read_model_config(config, tokenizer), adapter_of(config))
    found = rehearsal.forecast(*microbatch_of(config, rehearsal.shape), most=card.num_bytes)
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


def _rehearse(config: TrainConfig, model_config: Any) -> list[Problem]:
    """Returns the problems of building the model and its optimizer as the run does, on fake tensors."""
    problems = Problems()
    with problems.of("adapter"):
        adapter = adapter_of(config)
    if problems:
        return problems
    try:
        with _rehearsal(config, model_config, adapter).open() as model:
            if config.model.path is not None:
                with problems.of("model.path"):
                    read_generation_config(find_model(model), config.model.path, {})
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
    closure = inspect.signature(optimizer_class.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ConfigError(f"{config.name} computes the loss several times a step, which a run does once")
    what, fix = f"{config.name} cannot be built with these options", "correct optimizer.options and optimizer.groups"
    with as_error(ConfigError, what, TypeError, ValueError, fix=fix):
        for group in config.groups:  # torch checks no values of groups
            own = {key: value for key, value in group.items() if key not in ("params", "max_dims")}
            optimizer_class([torch.zeros(1, 1)], **{**arguments, **own})
        return build_optimizer(model, optimizer_class, groups=config.groups, **arguments)


def _check_fit(model_config: Any, config: TrainConfig, num_tokens: int | None) -> list[Problem]:
    problems: list[Problem] = []
    if MeshShape.parse(config.layout).size("ddp") > 1 and getattr(model_config, "layerdrop", False):
        what = f"is {config.layout}, and the model leaves out layers at random (layerdrop {model_config.layerdrop})"
        problems.append(Problem("layout", what, "use fsdp: ddp ranks would add up gradients of different layers"))
    if num_tokens is None:
        return problems
    vocab_size = getattr(model_config.get_text_config(), "vocab_size", None)
    if vocab_size is not None and num_tokens > vocab_size:
        what = f"has {num_tokens:,} tokens, the model only {vocab_size:,}"
        fix = "use the model's own tokenizer, or a model with a larger vocab_size"
        problems.append(Problem("model.tokenizer", what, fix))
    window = num_positions(model_config)
    if TASKS[find_task(config)].encode is None:  # of Whisper's decoder; its own task truncates
        window = window or getattr(model_config, "max_target_positions", None)
    if window is not None and config.data.seq_length > window:
        what = f"is {config.data.seq_length:,}, but the model has {window:,} positions"
        problems.append(Problem("data.seq_length", what, f"use at most {window:,}"))
    return problems
