"""One rank's training run, from a configuration to an exported model."""

from __future__ import annotations

import functools
import json
import logging
import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers
from numpy.typing import NDArray
from rich.console import Console

from shardwise.api.state import export_pretrained
from shardwise.checkpoint.export import export_bytes
from shardwise.cli.config import config_error, dump_config
from shardwise.cli.inputs import check_outputs, find_optimizer, optimizer_arguments, read_data_state
from shardwise.cli.logs import JsonlLog, Screen, TensorBoardLog
from shardwise.cli.models import build_encoder, build_model, load_tokenizer
from shardwise.cli.places import check_export, unexported
from shardwise.cli.sources import open_source
from shardwise.comm.agree import raise_on_all_ranks
from shardwise.errors import ConfigError, LoadError, ShardwiseError
from shardwise.layers.registry import local_part, registry_of
from shardwise.mesh import Mesh
from shardwise.split.compiled import count_compilation
from shardwise.train.atomic_file import atomic_file
from shardwise.train.clip import clip_grad_norm_
from shardwise.train.config import TrainConfig
from shardwise.train.corpus import Encoder, cache_path, read_tokens, write_tokens
from shardwise.train.data import PackedBatches
from shardwise.train.evaluate import build_evaluation, evaluation_batches
from shardwise.train.loop import Parts, Reporter, StepRecord, run_loop
from shardwise.train.once import once_per_machine
from shardwise.train.optimizer import build_optimizer
from shardwise.train.step import TrainStep

__all__ = ["train"]

logger = logging.getLogger("shardwise.train")


def train(config: TrainConfig, *, local_rank: int) -> StepRecord | None:
    """Trains as `config` says, on this rank; returns the last step's record.

    Args:
        config: the run, free of problems.
        local_rank: this rank's number on its machine.

    Raises:
        ShardwiseError: something did not fit or went wrong; the same on every rank wherever it was foreseen.
    """
    with Mesh.open(config.layout, timeout_seconds=config.timeout_seconds) as mesh, ExitStack() as open_logs:
        console = Console(quiet=mesh.rank != 0)
        if mesh.rank != 0:
            transformers.logging.set_verbosity_error()
            transformers.logging.disable_progress_bar()
        with raise_on_all_ranks(mesh.group(), "trying the places to write to"):
            problems = check_outputs(config) if mesh.rank == 0 else []
            if problems:
                raise config_error("the configuration", problems)
        tokenizer = load_tokenizer(config)
        tokens = _prepare_tokens(config, build_encoder(tokenizer), local_rank=local_rank, console=console)
        batches = PackedBatches(
            tokens,
            seq_length=config.data.seq_length,
            batch_size=config.batch_size,
            data_rank=mesh.data_rank,
            data_size=mesh.data_size,
            seed=config.seed,
        )
        if config.data.state is not None:
            batches.load_state_dict(read_data_state(config.data.state))
        model = build_model(config, mesh, tokenizer)
        torch.manual_seed(config.seed + mesh.data_rank)  # of dropout: ranks that read the same rows draw the same
        parts = _build_parts(config, model, mesh, batches)
        if config.evaluation.path is not None:
            held_out = _read_held_out(config, build_encoder(tokenizer), local_rank=local_rank, console=console)
            parts = replace(parts, evaluate=_build_evaluation(config, model, mesh, held_out))
        with raise_on_all_ranks(mesh.group(), "opening the logs"):
            if config.export is not None and mesh.rank == 0:
                check_export(config.export, num_bytes=export_bytes(model))
            reporters = _open_reporters(config, open_logs, console) if mesh.rank == 0 else []
        _print_head(console, config, model, batches)
        record = run_loop(
            parts,
            num_steps=config.steps,
            settings=config.optimizer,
            reporters=reporters,
            eval_every=config.evaluation.every,
        )
        open_logs.close()  # the bar ends before anything else is printed
        if config.compilation.backend is not None:
            console.print(f"compiled {count_compilation()}", highlight=False, soft_wrap=True)
        try:
            if config.export is not None:
                _export(model, config, tokenizer)
                console.print(f"exported to {config.export}", highlight=False, soft_wrap=True)
        finally:
            if mesh.rank == 0:
                _write_data_state(config, batches)
        return record


def _write_data_state(config: TrainConfig, batches: PackedBatches) -> None:
    with atomic_file(Path(config.log.dir) / "data_state.json") as partial:
        partial.write_text(json.dumps(batches.state_dict(), indent=1), encoding="utf-8")


def _export(model: torch.nn.Module, config: TrainConfig, tokenizer: Any) -> None:
    """Exports the model; where that fails, beside the log, so that no weights are lost. Fails on all ranks alike."""
    assert config.export is not None
    try:
        export_pretrained(model, config.export, tokenizer=tokenizer)
    except Exception as error:  # whatever came between, the weights are there to be kept
        rescued = unexported(config.log.dir)
        try:
            export_pretrained(model, rescued, tokenizer=tokenizer)
        except ShardwiseError as second:
            why = f"{error}\nnor to {rescued}: {second}"
            raise LoadError(f"the model cannot be exported to {config.export}", why=why) from error
        raise LoadError(
            f"the model cannot be exported to {config.export}; it is in {rescued}",
            why=str(error),
            fix=f"move {rescued} to where it should be; no step is lost",
        ) from error


def _read_held_out(config: TrainConfig, encoder: Encoder, *, local_rank: int, console: Console) -> NDArray[Any]:
    data = replace(config.data, path=config.evaluation.path, dataset=None, subset=None)
    return _prepare_tokens(replace(config, data=data), encoder, local_rank=local_rank, console=console)


def _build_evaluation(
    config: TrainConfig, model: torch.nn.Module, mesh: Mesh, tokens: NDArray[Any]
) -> Callable[[], float]:
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


def _prepare_tokens(config: TrainConfig, encoder: Encoder, *, local_rank: int, console: Console) -> NDArray[Any]:
    """The tokens, encoded by one rank of each machine unless an earlier run has done so."""
    directory = Path(config.data.cache_dir or Path(config.log.dir) / "tokens")

    def write() -> None:
        source = open_source(config.data)
        path = cache_path(directory, source, encoder)
        if not _is_sound(path):
            with _progress(console, "tokenizing", source.size) as advance:
                write_tokens(path, source, encoder=encoder, on_progress=advance)

    # The others open the source afterwards: by then a data set of the hub has been downloaded once.
    once_per_machine(write, local_rank=local_rank)
    return read_tokens(cache_path(directory, open_source(config.data), encoder))


def _is_sound(path: Path) -> bool:
    """Whether the tokens in `path` are there and as they were written."""
    if not path.exists():
        return False
    try:
        read_tokens(path, verify=True)
    except LoadError as error:
        logger.warning("%s (%s); it is made again", error.summary, error.why)
        return False
    return True


@contextmanager
def _progress(console: Console, title: str, total: int) -> Iterator[Any]:
    """Draws a bar on a terminal, prints one line elsewhere; gives the function that moves it."""
    if not console.is_terminal:
        console.print(f"{title} ...", highlight=False)
        yield lambda done: None
        return
    from rich.progress import Progress

    with Progress(console=console, transient=True) as bar:
        task = bar.add_task(title, total=total)
        yield lambda done: bar.update(task, completed=done)


def _build_parts(config: TrainConfig, model: torch.nn.Module, mesh: Mesh, batches: PackedBatches) -> Parts:
    optimizer_class = find_optimizer(config.optimizer.name)
    assert optimizer_class is not None, "check_inputs has found it"
    model.train()
    return Parts(
        step=TrainStep(model, mesh, num_microbatches=config.num_microbatches),
        clip=functools.partial(clip_grad_norm_, model),
        optimizer=build_optimizer(
            model,
            optimizer_class,
            groups=config.optimizer.groups,
            **optimizer_arguments(config.optimizer, optimizer_class),
        ),
        batches=iter(batches),
        device=mesh.device,
        skips_nonfinite=config.precision.nonfinite == "skip" or config.precision.compute == "float16",
    )


def _open_reporters(config: TrainConfig, open_logs: ExitStack, console: Console) -> list[Reporter]:
    directory = Path(config.log.dir)
    log = open_logs.enter_context(closing(JsonlLog(directory / "train.jsonl")))
    with atomic_file(directory / "config.yaml") as partial:
        partial.write_text(dump_config(config), encoding="utf-8")
    reporters: list[Reporter] = [log]
    if config.log.tensorboard:
        reporters.append(open_logs.enter_context(closing(TensorBoardLog(directory / "tensorboard"))))
    screen = open_logs.enter_context(closing(Screen(console, num_steps=config.steps, every=config.log.every)))
    return [*reporters, screen]


def _print_head(console: Console, config: TrainConfig, model: torch.nn.Module, batches: PackedBatches) -> None:
    num_whole = sum(math.prod(entry.layout.shape) for entry in registry_of(model).entries.values())
    num_held = sum(local_part(parameter).numel() for parameter in model.parameters())
    sequence = ", sequence parallel" if config.sequence_parallel else ""
    passes = config.steps * config.batch_size / batches.num_rows
    lines = (
        f"model   {type(model).__name__}, {num_whole:,} parameters ({num_held:,} on rank 0), {config.model.dtype}",
        f"layout  {config.layout}{sequence}",
        f"data    {len(batches.tokens):,} tokens, {batches.num_rows:,} rows of {batches.seq_length:,}",
        f"run     {config.steps:,} steps of {config.batch_size:,} rows ({passes:.2g} passes over the data)",
        f"logs    {Path(config.log.dir) / 'train.jsonl'}",
    )
    for line in lines:
        console.print(line, highlight=False, soft_wrap=True)
