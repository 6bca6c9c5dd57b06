"""One rank's training run, from a configuration to an exported model."""

from __future__ import annotations

import functools
import json
import logging
import math
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import transformers
from rich.console import Console

from shardwise.api.state import export_pretrained
from shardwise.checkpoint.export import export_bytes
from shardwise.cli.adapters import describe_adapter, export_mode
from shardwise.cli.config_file import config_error, dump_config
from shardwise.cli.data import prepare_rows
from shardwise.cli.inputs import read_data_state
from shardwise.cli.logs import JsonlLog, Screen, TensorBoardLog
from shardwise.cli.models import build_model, find_run_apart, make_optimizer, read_model_config, spec_of
from shardwise.cli.places import check_outputs, check_place, unexported
from shardwise.cli.run_checkpoints import RunCheckpoints, SavedRun, describe_run, find_saved_run
from shardwise.cli.timelines import with_timeline
from shardwise.cli.tokenizer import load_tokenizer
from shardwise.comm.agree import raise_on_all_ranks
from shardwise.comm.operations import all_gather_objects
from shardwise.data.ahead import BatchesAhead
from shardwise.data.config import DataConfig, held_out
from shardwise.data.packing import PackedBatches
from shardwise.data.rows import Rows
from shardwise.errors import BatchError, ConfigError, LoadError, ShardwiseError, counted
from shardwise.mesh import Mesh
from shardwise.optim.clip import clip_grad_norm_
from shardwise.parameters.registry import find_parameters, local_part, registry_of
from shardwise.plan.options import ParallelSpec
from shardwise.runtime.adapters import find_model
from shardwise.train.evaluate import build_evaluation, evaluation_batches
from shardwise.train.loop import Reporter, StepRecord, TrainingComponents, run_loop
from shardwise.train.run_config import PrecisionConfig, TrainConfig
from shardwise.train.step import TrainStep
from shardwise.weights.staging import atomic_file

__all__ = ["train"]

logger = logging.getLogger("shardwise.train")


def train(config: TrainConfig) -> StepRecord | None:
    """Trains as `config` says, on this rank; returns the last step's record.

    Args:
        config: the run, free of problems.

    Raises:
        ShardwiseError: something did not fit or went wrong; the same on every rank wherever it could be checked.
        SystemExit: a signal has ended a run with checkpoints, which has been saved.
    """
    opened = Mesh.open(config.layout, device=config.device, timeout_seconds=config.timeout_seconds)
    with opened as mesh, ExitStack() as open_logs:
        setup = _prepare(config, mesh)
        batches = _open_batches(setup)
        run = describe_run(config, setup.model_config, batches, adapter=describe_adapter(config))
        saved = find_saved_run(config.checkpoint, mesh, run, setup.console)
        model, optimizer = _build(setup, saved)
        num_done = saved.go_on(model, optimizer, batches) if saved is not None else 0
        ahead = BatchesAhead(batches, mesh.device)
        parts = _components(setup, model, optimizer, ahead, num_done=num_done)
        with raise_on_all_ranks(mesh.group(), "opening the logs"):
            if config.export is not None and mesh.rank == 0:
                check_place(config.export, num_bytes=export_bytes(model))
            reporters = _open_reporters(setup, open_logs, num_done if saved else None, batches)
        _print_head(setup, model, batches, num_done)
        with RunCheckpoints(config.checkpoint, model, optimizer, batches=ahead, run=run) as checkpoints:
            record = run_loop(
                parts,
                num_steps=config.steps,
                settings=config.optimizer,
                reporters=reporters,
                eval_every=config.evaluation.every,
                num_done=num_done,
                checkpoints=checkpoints if config.checkpoint.dir is not None else None,
                report_every=config.log.every if mesh.device.type == "cuda" else 1,
            )
        open_logs.close()  # the bar ends before anything else is printed
        if checkpoints.ended_by is None:
            _finish(setup, model, ahead)
        elif record is not None:
            setup.console.print(f"saved after step {record.step:,}; the same command continues from there")
    if checkpoints.ended_by is not None:
        raise SystemExit(128 + checkpoints.ended_by)
    return record


@dataclass(frozen=True, kw_only=True)
class _Setup:
    """What a rank reads once, before it builds anything.

    Attributes:
        console: prints on rank 0 alone.
        model_config: transformers' configuration of the model.
        spec: what the run's file asks for, on this rank's device.
    """

    config: TrainConfig
    mesh: Mesh
    console: Console
    tokenizer: Any
    model_config: Any
    spec: ParallelSpec

    def read_rows(self, data: DataConfig) -> Rows:
        """The rows of `data`.

        Communicates: how documents of a row are kept apart, from rank 0 to all; what `prepare_rows` does.
        """
        precision, group = self.spec.precision, self.mesh.group()
        with raise_on_all_ranks(group, "trying how documents of a row are kept apart"):
            apart = find_run_apart(data, self.model_config) if self.mesh.rank == 0 else None
        apart = all_gather_objects(apart, group)[0]
        dtype = getattr(torch, precision.compute) if precision is not None else torch.float32
        return prepare_rows(self.config, data, self.tokenizer, self.console, group=group, apart=apart, dtype=dtype)


def _prepare(config: TrainConfig, mesh: Mesh) -> _Setup:
    """Tries the places that the run writes to, and reads tokenizer and model config."""
    if mesh.rank != 0:
        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
    with raise_on_all_ranks(mesh.group(), "trying the places to write to"):
        if mesh.rank == 0 and (problems := check_outputs(config)):
            raise config_error("the configuration", problems)
    tokenizer = load_tokenizer(config)
    return _Setup(
        config=config,
        mesh=mesh,
        console=Console(quiet=mesh.rank != 0, highlight=False, soft_wrap=True),
        tokenizer=tokenizer,
        model_config=read_model_config(config, tokenizer),
        spec=spec_of(config, mesh.device),
    )


def _open_batches(setup: _Setup) -> PackedBatches:
    config, mesh = setup.config, setup.mesh
    rows = setup.read_rows(config.data)
    batches = PackedBatches(
        rows, batch_size=config.batch_size, data_rank=mesh.data_rank, data_size=mesh.data_size, seed=config.seed
    )
    if config.data.state is not None:
        batches.load_state_dict(read_data_state(config.data.state))
    return batches


def _build(setup: _Setup, saved: SavedRun | None) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """The split model, with the values of a saved run where one goes on, and its optimizer."""
    config, mesh = setup.config, setup.mesh
    checkpoint = saved.stored if saved is not None else None
    model = build_model(
        config, mesh, setup.model_config, setup.spec, num_tokens=len(setup.tokenizer), checkpoint=checkpoint
    ).train()
    torch.manual_seed(config.seed + mesh.data_rank)  # of dropout: ranks that read the same rows draw the same
    return model, make_optimizer(config.optimizer, model)


def _components(
    setup: _Setup, model: torch.nn.Module, optimizer: torch.optim.Optimizer, batches: BatchesAhead, *, num_done: int
) -> TrainingComponents:
    config, mesh = setup.config, setup.mesh
    step = TrainStep(model, mesh, num_microbatches=config.num_microbatches)
    return TrainingComponents(
        step=with_timeline(step, config.log, setup.console, num_done=num_done),
        clip=functools.partial(clip_grad_norm_, model),
        optimizer=optimizer,
        batches=batches,
        device=mesh.device,
        num_devices=mesh.shape.world_size,
        evaluate=_prepare_evaluation(setup, model),
        nonfinite=_nonfinite_steps(config.precision, mesh.device),
    )


def _finish(setup: _Setup, model: torch.nn.Module, batches: BatchesAhead) -> None:
    """Exports the model, and writes where the reading of the data stands."""
    config, console = setup.config, setup.console
    try:
        if config.export is not None:
            _export(model, config, config.export, setup.tokenizer)
            console.print(f"exported to {config.export}")
    finally:
        if setup.mesh.rank == 0:
            with atomic_file(Path(config.log.dir) / "data_state.json") as partial:
                partial.write_text(json.dumps(batches.state_dict(), indent=1), encoding="utf-8")


def _export(model: torch.nn.Module, config: TrainConfig, directory: str, tokenizer: Any) -> None:
    """Exports the model; where that fails, next to the log, so that no weights are lost. Fails on all ranks alike."""
    mode = export_mode(config)
    try:
        export_pretrained(model, directory, tokenizer=tokenizer, adapter=mode)
    except Exception as error:  # whatever came between, the weights are there to be kept
        rescued = unexported(config.log.dir)
        try:
            export_pretrained(model, rescued, tokenizer=tokenizer, adapter=mode)
        except ShardwiseError as second:
            why = f"{error}\nnor to {rescued}: {second}"
            raise LoadError(f"the model cannot be exported to {directory}", why=why) from error
        raise LoadError(
            f"the model cannot be exported to {directory}; it is in {rescued}",
            why=str(error),
            fix=f"move {rescued} to where it should be; no step is lost",
        ) from error


def _prepare_evaluation(setup: _Setup, model: torch.nn.Module) -> Callable[[], float] | None:
    config, mesh = setup.config, setup.mesh
    if config.evaluation.path is None:
        return None
    try:
        rows = setup.read_rows(held_out(config.data, config.evaluation))
    except BatchError as error:
        raise ConfigError(
            error.summary, at="evaluation.path", why=error.why, fix="hold out more text, or use other rows"
        ) from error
    batches = functools.partial(
        evaluation_batches,
        rows,
        batch_size=config.batch_size,
        max_batches=config.evaluation.max_batches,
        data_rank=mesh.data_rank,
        data_size=mesh.data_size,
    )
    return build_evaluation(model, mesh, batches)


def _nonfinite_steps(precision: PrecisionConfig, device: torch.device) -> Literal["checked", "raised", "skipped"]:
    """What becomes of steps whose loss or gradients are infinite or NaN: looking before the update is free on CPUs."""
    if precision.nonfinite == "skip" or precision.compute == "float16":
        return "skipped"
    return "checked" if device.type == "cpu" else "raised"


def _open_reporters(
    setup: _Setup, open_logs: ExitStack, num_done: int | None, batches: PackedBatches
) -> list[Reporter]:
    config, console = setup.config, setup.console
    if console.quiet:  # of this rank nobody hears
        return []
    notes = batches.rows.notes()
    directory = Path(config.log.dir)
    jsonl = JsonlLog(directory / "train.jsonl", num_done=num_done)
    reporters: list[Reporter] = [open_logs.enter_context(closing(jsonl))]
    if config.log.tensorboard:
        curves = TensorBoardLog(directory / "tensorboard", num_done=num_done)
        reporters.append(open_logs.enter_context(closing(curves)))
    screen = Screen(console, num_steps=config.steps, every=config.log.every, num_done=num_done or 0, notes=notes)
    reporters.append(open_logs.enter_context(closing(screen)))
    with atomic_file(directory / "config.yaml") as partial:
        partial.write_text(dump_config(config), encoding="utf-8")
    return reporters


def _print_head(setup: _Setup, model: torch.nn.Module, batches: PackedBatches, num_done: int) -> None:
    config = setup.config
    num_full = sum(math.prod(entry.layout.shape) for entry in registry_of(model).entries.values())
    num_held = sum(local_part(parameter).numel() for parameter in model.parameters())
    sequence = ", sequence parallel" if config.sequence_parallel else ""
    rows = batches.rows
    notes = f" ({rows.notes()})" if rows.notes() else ""
    passes = config.steps * config.batch_size / batches.num_rows
    size = f"{counted(config.steps, 'step')} of {counted(config.batch_size, 'row')}"
    done = f": step {num_done:,} was reached before, nothing is left to train" if num_done >= config.steps else ""
    name = type(find_model(model)).__name__
    setup.console.print(
        f"model   {name}, {num_full:,} parameters ({num_held:,} on rank 0), {config.model.dtype}",
        f"layout  {config.layout}{sequence}",
        *([f"adapter {_describe_trained(model)}"] if config.adapter is not None else []),
        f"data    {rows.num_tokens:,} tokens, {counted(rows.num_rows, 'row')} of {rows.seq_length:,}{notes}",
        f"run     {size} ({passes:.2g} passes over the data){done}",
        f"logs    {Path(config.log.dir) / 'train.jsonl'}",
        sep="\n",
    )


def _describe_trained(model: torch.nn.Module) -> str:
    """How much of the model is trained, in words: on this rank, in full numbers."""
    trained = [entry for _, value, entry in find_parameters(model) if entry is not None and value.requires_grad]
    number = sum(math.prod(entry.layout.shape) for entry in trained)
    return f"{number:,} parameters are trained, in {counted(len(trained), 'tensor')}"
