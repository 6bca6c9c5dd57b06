"""One rank's training run, from a configuration to an exported model."""

from __future__ import annotations

import functools
import json
import logging
import math
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import Progress

from shardwise.api.state import export_pretrained
from shardwise.checkpoint.export import export_bytes
from shardwise.cli.config_file import config_error, dump_config
from shardwise.cli.inputs import read_data_state
from shardwise.cli.launch import local_rank
from shardwise.cli.logs import JsonlLog, Screen, TensorBoardLog
from shardwise.cli.models import build_encoder, build_model, load_tokenizer, make_optimizer, read_model_config
from shardwise.cli.places import check_outputs, check_place, unexported
from shardwise.cli.run_checkpoints import RunCheckpoints, describe_run, find_saved_run
from shardwise.cli.sources import open_source
from shardwise.cli.timelines import with_timeline
from shardwise.comm.agree import raise_on_all_ranks
from shardwise.errors import ConfigError, LoadError, ShardwiseError
from shardwise.mesh import Mesh
from shardwise.parallel.compiled import count_compilation
from shardwise.runtime.registry import local_part, registry_of
from shardwise.train.clip import clip_grad_norm_
from shardwise.train.corpus import Encoder, cache_path, read_tokens, write_tokens
from shardwise.train.evaluate import build_evaluation, evaluation_batches
from shardwise.train.loop import Reporter, StepRecord, TrainingComponents, run_loop
from shardwise.train.once_per_machine import once_per_machine
from shardwise.train.packing import PackedBatches
from shardwise.train.run_config import DataConfig, TrainConfig
from shardwise.train.step import TrainStep
from shardwise.weights.staging import atomic_file

__all__ = ["train"]

logger = logging.getLogger("shardwise.train")


def train(config: TrainConfig) -> StepRecord | None:
    """Trains as `config` says, on this rank; returns the last step's record.

    Args:
        config: the run, free of problems.

    Raises:
        ShardwiseError: something did not fit or went wrong; the same on every rank wherever it was foreseen.
        SystemExit: a signal has ended a run with checkpoints, which has been saved.
    """
    options: dict[str, Any] = {"device": config.device, "timeout_seconds": config.timeout_seconds}
    with Mesh.open(config.layout, **options) as mesh, ExitStack() as open_logs:
        console = Console(quiet=mesh.rank != 0, highlight=False, soft_wrap=True)
        _silence_others(mesh)
        with raise_on_all_ranks(mesh.group(), "trying the places to write to"):
            if mesh.rank == 0 and (problems := check_outputs(config)):
                raise config_error("the configuration", problems)
        tokenizer = load_tokenizer(config)
        encoder = build_encoder(tokenizer)
        batches = _open_batches(config, mesh, encoder, console)
        run = describe_run(config, read_model_config(config, tokenizer), batches)
        saved = find_saved_run(config.checkpoint, mesh, run, console)
        model = build_model(config, mesh, tokenizer, fill=saved.fill if saved is not None else None).train()
        torch.manual_seed(config.seed + mesh.data_rank)  # of dropout: ranks that read the same rows draw the same
        optimizer = make_optimizer(config.optimizer, model)
        num_done = saved.go_on(model, optimizer, batches) if saved is not None else 0
        step = TrainStep(model, mesh, num_microbatches=config.num_microbatches)
        parts = TrainingComponents(
            step=with_timeline(step, config.log, console, num_done=num_done),
            clip=functools.partial(clip_grad_norm_, model),
            optimizer=optimizer,
            batches=iter(batches),
            device=mesh.device,
            evaluate=_prepare_evaluation(config, model, mesh, encoder, console),
            skips_nonfinite=config.precision.nonfinite == "skip" or config.precision.compute == "float16",
        )
        with raise_on_all_ranks(mesh.group(), "opening the logs"):
            if config.export is not None and mesh.rank == 0:
                check_place(config.export, is_beside=True, num_bytes=export_bytes(model))
            done = num_done if saved is not None else None
            reporters = _open_reporters(config, open_logs, console, done) if mesh.rank == 0 else []
        _print_head(console, config, model, batches)
        with RunCheckpoints(config.checkpoint, model, optimizer, batches=batches, run=run) as checkpoints:
            record = run_loop(
                parts,
                num_steps=config.steps,
                settings=config.optimizer,
                reporters=reporters,
                eval_every=config.evaluation.every,
                num_done=num_done,
                checkpoints=checkpoints if config.checkpoint.dir is not None else None,
            )
        open_logs.close()  # the bar ends before anything else is printed
        if checkpoints.ended_by is None:
            _finish(config, mesh, model, tokenizer, batches, console)
        elif record is not None:
            console.print(f"saved after step {record.step:,}; the same command goes on from there")
    if checkpoints.ended_by is not None:
        raise SystemExit(128 + checkpoints.ended_by)
    return record


def _silence_others(mesh: Mesh) -> None:
    """What transformers has to say is said by rank 0."""
    if mesh.rank != 0:
        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()


def _finish(
    config: TrainConfig,
    mesh: Mesh,
    model: torch.nn.Module,
    tokenizer: Any,
    batches: PackedBatches,
    console: Console,
) -> None:
    """What comes after the last step."""
    if config.compilation.backend is not None:
        console.print(f"compiled {count_compilation()}")
    try:
        if config.export is not None:
            _export(model, config.export, config.log.dir, tokenizer)
            console.print(f"exported to {config.export}")
    finally:
        if mesh.rank == 0:
            with atomic_file(Path(config.log.dir) / "data_state.json") as partial:
                partial.write_text(json.dumps(batches.state_dict(), indent=1), encoding="utf-8")


def _open_batches(config: TrainConfig, mesh: Mesh, encoder: Encoder, console: Console) -> PackedBatches:
    batches = PackedBatches(
        _prepare_tokens(config, config.data, encoder, console),
        seq_length=config.data.seq_length,
        batch_size=config.batch_size,
        data_rank=mesh.data_rank,
        data_size=mesh.data_size,
        seed=config.seed,
    )
    if config.data.state is not None:
        batches.load_state_dict(read_data_state(config.data.state))
    return batches


def _export(model: torch.nn.Module, directory: str, log_dir: str, tokenizer: Any) -> None:
    """Exports the model; where that fails, next to the log, so that no weights are lost. Fails on all ranks alike."""
    try:
        export_pretrained(model, directory, tokenizer=tokenizer)
    except Exception as error:  # whatever came between, the weights are there to be kept
        rescued = unexported(log_dir)
        try:
            export_pretrained(model, rescued, tokenizer=tokenizer)
        except ShardwiseError as second:
            why = f"{error}\nnor to {rescued}: {second}"
            raise LoadError(f"the model cannot be exported to {directory}", why=why) from error
        raise LoadError(
            f"the model cannot be exported to {directory}; it is in {rescued}",
            why=str(error),
            fix=f"move {rescued} to where it should be; no step is lost",
        ) from error


def _prepare_evaluation(
    config: TrainConfig, model: torch.nn.Module, mesh: Mesh, encoder: Encoder, console: Console
) -> Callable[[], float] | None:
    if config.evaluation.path is None:
        return None
    held_out = replace(config.data, path=config.evaluation.path, dataset=None, subset=None)
    tokens = _prepare_tokens(config, held_out, encoder, console)
    if len(tokens) < config.data.seq_length:
        raise ConfigError(
            f"the text held out has {len(tokens):,} tokens, fewer than one row of {config.data.seq_length:,}",
            at="evaluation.path",
            fix="hold out more text, or use a smaller data.seq_length",
        )
    read = functools.partial(
        evaluation_batches,
        tokens,
        seq_length=config.data.seq_length,
        batch_size=config.batch_size,
        max_batches=config.evaluation.max_batches,
        data_rank=mesh.data_rank,
        data_size=mesh.data_size,
    )
    return build_evaluation(model, mesh, read)


def _prepare_tokens(config: TrainConfig, data: DataConfig, encoder: Encoder, console: Console) -> NDArray[Any]:
    """The tokens of `data`, encoded by one rank of each machine unless an earlier run has done so."""
    directory = Path(config.data.cache_dir or Path(config.log.dir) / "tokens")

    def write() -> None:
        source = open_source(data)
        path = cache_path(directory, source, encoder)
        try:
            if path.exists():
                read_tokens(path, verify=True)
                return
        except LoadError as error:
            logger.warning("%s (%s); it is made again", error.summary, error.why)
        if not console.is_terminal:
            console.print("tokenizing ...")
        with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
            task = bar.add_task("tokenizing", total=source.size)
            write_tokens(path, source, encoder=encoder, on_progress=lambda done: bar.update(task, completed=done))

    # The others open the source afterwards: by then a data set of the hub has been downloaded once.
    once_per_machine(write, local_rank=local_rank())
    return read_tokens(cache_path(directory, open_source(data), encoder))


def _open_reporters(
    config: TrainConfig, open_logs: ExitStack, console: Console, num_done: int | None
) -> list[Reporter]:
    directory = Path(config.log.dir)
    jsonl = JsonlLog(directory / "train.jsonl", num_done=num_done)
    reporters: list[Reporter] = [open_logs.enter_context(closing(jsonl))]
    if config.log.tensorboard:
        curves = TensorBoardLog(directory / "tensorboard", num_done=num_done)
        reporters.append(open_logs.enter_context(closing(curves)))
    screen = Screen(console, num_steps=config.steps, every=config.log.every, num_done=num_done or 0)
    reporters.append(open_logs.enter_context(closing(screen)))
    with atomic_file(directory / "config.yaml") as partial:
        partial.write_text(dump_config(config), encoding="utf-8")
    return reporters


def _print_head(console: Console, config: TrainConfig, model: torch.nn.Module, batches: PackedBatches) -> None:
    num_full = sum(math.prod(entry.layout.shape) for entry in registry_of(model).entries.values())
    num_held = sum(local_part(parameter).numel() for parameter in model.parameters())
    sequence = ", sequence parallel" if config.sequence_parallel else ""
    passes = config.steps * config.batch_size / batches.num_rows
    console.print(
        f"model   {type(model).__name__}, {num_full:,} parameters ({num_held:,} on rank 0), {config.model.dtype}",
        f"layout  {config.layout}{sequence}",
        f"data    {len(batches.tokens):,} tokens, {batches.num_rows:,} rows of {batches.seq_length:,}",
        f"run     {config.steps:,} steps of {config.batch_size:,} rows ({passes:.2g} passes over the data)",
        f"logs    {Path(config.log.dir) / 'train.jsonl'}",
        sep="\n",
    )
