"""One rank's training run, from a configuration to an exported model."""

import dataclasses
import functools
import json
import math
import random
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from rich.console import Console
from torch import Tensor

from shardwise.api.checkpoints import export_pretrained, load_checkpoint
from shardwise.checkpoint.export import export_bytes
from shardwise.checkpoint.stored import StoredParts
from shardwise.cli.config_file import config_error, dump_config, flat_config
from shardwise.cli.data import load_tokenizer, prepare_rows
from shardwise.cli.inputs import check_outputs, check_place, export_mode, find_callback, read_data_state
from shardwise.cli.logs import JsonlLog, Screen, TensorBoardLog, TrackerLog, close_reporter
from shardwise.cli.metrics import ExampleMetrics, check_metrics
from shardwise.cli.models import build_model, find_run_apart, make_optimizer, spec_of
from shardwise.cli.run_checkpoints import BestStep, RunCheckpoints, describe_run, find_saved_run, open_newest
from shardwise.cli.tasks import example_rows, find_task, open_tools, read_model_config
from shardwise.comm.agree import agree_on, gather_from_all, raise_on_all_ranks
from shardwise.comm.collectives import all_gather_objects
from shardwise.data.ahead import PackedBatches, PrefetchLoader
from shardwise.data.batch import counts_rows
from shardwise.data.config import DataConfig, held_out, sources_of
from shardwise.data.rows import DocumentMasking, Rows
from shardwise.data.tasks import TASKS, ExampleRows, Tools
from shardwise.errors import ConfigError, LoadError, counted
from shardwise.mesh import Mesh
from shardwise.optim.clip import clip_grad_norm_
from shardwise.parameters.registry import find_parameters, local_part, registry_of
from shardwise.pipeline.runner import runner_of
from shardwise.runtime.adapter_facts import find_model
from shardwise.schedule.timeline import chrome_trace, draw_svg
from shardwise.train.loop import (
    Reporter,
    StepRecord,
    TrainingComponents,
    build_evaluation,
    evaluation_batches,
    peak_memory_bytes,
    run_loop,
)
from shardwise.train.run_config import LogConfig, TrainConfig, check_config, num_microbatches_of
from shardwise.train.step import StepResult, TrainStep
from shardwise.weights.staging import write_text


def train(config: TrainConfig) -> StepRecord | None:
    """Trains by `config` on this rank; returns the last step's record."""
    opened = Mesh.open(config.layout, device=config.device, timeout_seconds=config.timeout_seconds)
    with opened as mesh, ExitStack() as open_logs:
        with raise_on_all_ranks(mesh.group(), "checking the directories to write to"):
            if mesh.rank == 0 and (problems := check_outputs(config)):
                raise config_error("the configuration", problems)
        run = _Run(config, mesh)
        batches = run.open_batches()
        settings = describe_run(config, run.model_config, batches)
        saved = find_saved_run(config.checkpoint, mesh, settings, run.console, batches=batches)
        if saved is None and config.data.state is not None:
            batches.load_state_dict(read_data_state(config.data.state))
        rows_before = batches.num_batches_read * config.batch_size  # by the run of data.state
        model = run.build_model(None if saved is None else saved.stored).train()
        seed = config.seed + mesh.data_rank  # of dropout and masks: ranks with the same rows draw the same
        torch.manual_seed(seed)
        np.random.seed(seed % 2**32)
        random.seed(seed)
        optimizer = make_optimizer(config.optimizer, model)
        num_done = 0 if saved is None else saved.resume(model, optimizer, batches)
        if saved is None and config.optimizer.state is not None:
            num_done = load_checkpoint(config.optimizer.state, optimizer=optimizer)["step"]
        if saved is not None:
            rows_before = saved.extra.get("rows_before", 0) if batches.num_batches_read else 0
        if config.epochs is not None:
            config = count_steps(config, batches, num_done=num_done, rows_before=rows_before)
            run.config = config
        ahead = PrefetchLoader(batches, mesh.device)
        parts = run.build_components(model, optimizer, ahead, num_done=num_done)
        with raise_on_all_ranks(mesh.group(), "opening the logs"):
            if config.export is not None and mesh.rank == 0:
                check_place(config.export, num_bytes=export_bytes(model))
            reporters = run.open_reporters(open_logs, batches.rows.notes(), num_done=num_done if saved else None)
        run.print_head(model, batches, num_done)
        best = BestStep(config, model, run.console, saved=saved)
        parts = dataclasses.replace(parts, after_evaluation=best.after_evaluation)
        with RunCheckpoints(
            config.checkpoint, model, optimizer, batches=ahead, run=settings, best=best, rows_before=rows_before
        ) as checkpoints:
            record = run_loop(
                parts,
                num_steps=num_done if best.is_over else config.steps,
                settings=config.optimizer,
                reporters=reporters,
                eval_every=config.evaluation.every,
                num_done=num_done,
                checkpoints=checkpoints if config.checkpoint.dir is not None else None,
                report_every=config.log.every if mesh.device.type == "cuda" else 1,
            )
        open_logs.close()  # the progress bar ends before anything else is printed
        if checkpoints.ended_by is None:
            best.restore()
            run.finish(model, ahead)
        elif record is not None:
            run.console.print(f"saved after step {record.step:,}; the same command continues from there")
    if checkpoints.ended_by is not None:
        raise SystemExit(128 + checkpoints.ended_by)
    return record


def evaluate(config: TrainConfig) -> dict[str, float]:
    """Measures the run's model on its held-out data; returns the metrics by name, the same on every rank.

    The model is that of the newest checkpoint in `checkpoint.dir` (of its best with `checkpoint.best`), if there is
    one, else that of `model.path`.
    """
    with Mesh.open(config.layout, device=config.device, timeout_seconds=config.timeout_seconds) as mesh:
        run = _Run(config, mesh)
        stored = open_newest(config.checkpoint, mesh)
        found = run.open_evaluation(run.build_model(stored))()
        where = config.model.path if stored is None else stored.directory
        run.console.print(f"{where}: {'  '.join(f'{name} {value:,.4f}' for name, value in found.items())}")
    return found


class _Run:
    """What a rank reads before it builds the model.

    Attributes:
        console: prints on rank 0 only.
        tokenizer: None where the task needs none.
        tools: of a task whose examples are encoded when they are read; None for text.
        spec: options of the run on this rank's device.
    """

    def __init__(self, config: TrainConfig, mesh: Mesh) -> None:
        if mesh.rank != 0:
            transformers.logging.set_verbosity_error()
            transformers.logging.disable_progress_bar()
        self.config, self.mesh, self.spec = config, mesh, spec_of(config, mesh.device)
        self.console = Console(quiet=mesh.rank != 0, highlight=False, soft_wrap=True)
        self.task = TASKS[find_task(config)]
        self.tokenizer = load_tokenizer(config) if "tokenizer" in self.task.needs else None
        self.model_config: Any = read_model_config(config, self.tokenizer)
        self.tools: Tools | None = None
        if self.task.encode is not None:
            self.tools, self.model_config = open_tools(config, self.model_config, self.tokenizer)
        check_metrics(config, self.task, self.tools)

    def build_model(self, checkpoint: StoredParts | None) -> torch.nn.Module:
        """Returns the split model; see `build_model`."""
        num_tokens = None if self.tokenizer is None else len(self.tokenizer)
        return build_model(
            self.config, self.mesh, self.model_config, self.spec, num_tokens=num_tokens, checkpoint=checkpoint
        )

    def open_batches(self) -> PackedBatches:
        """Returns this rank's batches of training rows."""
        config, mesh = self.config, self.mesh
        return PackedBatches(
            self.read_rows(config.data),
            batch_size=config.batch_size,
            data_rank=mesh.data_rank,
            data_size=mesh.data_size,
            seed=config.seed,
        )

    def read_rows(self, data: DataConfig) -> Rows:
        """Returns the rows of `data`.

        Communicates: of text how documents in a row are separated, from rank 0 to all, and what `prepare_rows` does;
        like `agree_on`.
        """
        group = self.mesh.group()
        if self.tools is not None:
            open_rows: Callable[[], Rows] = functools.partial(example_rows, sources_of(data), self.task, self.tools)
        else:
            apart = gather_from_all(group, "finding how documents in a row are separated", lambda: self._apart(data))[0]
            assert apart is not None, "rank 0 has found it"
            precision, masks = self.spec.precision, self.task is TASKS["masked-lm"]
            dtype = getattr(torch, precision.compute) if precision is not None else torch.float32
            open_rows = prepare_rows(
                self.config, data, self.tokenizer, self.console, apart=apart, dtype=dtype, masks=masks
            )

        def read() -> tuple[Rows, dict[str, str]]:
            rows = open_rows()
            return rows, {f"the {key} of the rows": str(value) for key, value in rows.identity().items()}

        return agree_on(
            group,
            read,
            doing="reading the data",
            what="the ranks read different data",
            fix="give every machine the same files, tokenizer and versions, or a directory that all of them share",
        )

    def _apart(self, data: DataConfig) -> DocumentMasking | None:
        return None if self.mesh.rank else find_run_apart(data, self.model_config, self.task.auto_class)

    def open_evaluation(self, model: torch.nn.Module) -> Callable[[], dict[str, float]]:
        """Returns a function that measures the model on the held-out data; see `build_evaluation`."""
        config, mesh = self.config, self.mesh
        rows = self.read_rows(held_out(config.data, config.evaluation))
        if (is_whole := counts_rows(find_model(model))) and rows.num_rows < config.batch_size:
            what = f"{counted(rows.num_rows, 'held-out row')} for a batch of {config.batch_size}"
            why = "the loss is a mean over rows, so batches are not filled up"
            raise ConfigError(what, at="evaluation", why=why, fix="hold out more rows, or use a smaller batch_size")
        held_out_batches = functools.partial(
            evaluation_batches,
            rows,
            batch_size=config.batch_size,
            max_batches=config.evaluation.max_batches,
            data_rank=mesh.data_rank,
            data_size=mesh.data_size,
            counts_rows=is_whole,
        )
        observer = None
        if self.tools is not None and isinstance(rows, ExampleRows) and self.task.metrics:
            limit = config.evaluation.max_new_tokens
            observer = ExampleMetrics(self.task, self.tools, model, mesh, max_new_tokens=limit, records=rows.records)
        return build_evaluation(model, mesh, held_out_batches, observer)

    def build_components(
        self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, batches: PrefetchLoader, *, num_done: int
    ) -> TrainingComponents:
        """Returns the arguments of the training loop."""
        config, mesh = self.config, self.mesh
        evaluate = self.open_evaluation(model) if config.evaluation.path is not None else None
        skips = config.precision.nonfinite == "skip" or config.precision.compute == "float16"
        step = TrainStep(model, mesh, num_microbatches=num_microbatches_of(config))
        return TrainingComponents(
            step=_with_timeline(step, config.log, self.console, num_done=num_done),
            clip=functools.partial(clip_grad_norm_, model),
            optimizer=optimizer,
            batches=batches,
            device=mesh.device,
            num_devices=mesh.shape.world_size,
            evaluate=evaluate,
            nonfinite="skipped" if skips else "checked" if mesh.device.type == "cpu" else "raised",
        )

    def open_reporters(self, open_logs: ExitStack, notes: str, *, num_done: int | None) -> list[Reporter]:
        """Returns the logs and the screen, on rank 0; `num_done` is None for a new run."""
        config = self.config
        if self.mesh.rank != 0:
            return []
        directory = Path(config.log.dir)
        reporters: list[Any] = [JsonlLog(directory / "train.jsonl", num_done=num_done)]
        for name in config.log.trackers:
            if name == "tensorboard":
                reporters.append(TensorBoardLog(directory / name, num_done=num_done))
            else:
                reporters.append(TrackerLog(name, config, flat_config(config)))
        reporters += [find_callback(place)() for place in config.log.callbacks]
        write_text(directory / "config.yaml", dump_config(config))
        done = num_done or 0
        reporters.append(
            Screen(self.console, num_steps=config.steps, every=config.log.every, num_done=done, notes=notes)
        )
        for reporter in reporters:
            open_logs.callback(close_reporter, reporter)
        return reporters

    def print_head(self, model: torch.nn.Module, batches: PackedBatches, num_done: int) -> None:
        """Prints a summary of model, data and layout."""
        config, rows = self.config, batches.rows
        entries = registry_of(model).entries.values()
        num_full = sum(math.prod(entry.layout.shape) for entry in entries)
        num_local = sum(local_part(parameter).numel() for parameter in model.parameters())
        trained = [entry for _, value, entry in find_parameters(model) if entry is not None and value.requires_grad]
        num_trained = sum(math.prod(entry.layout.shape) for entry in trained)
        notes = f" ({rows.notes()})" if rows.notes() else ""
        passes = config.steps * config.batch_size / batches.num_rows
        size = f"{counted(config.steps, 'step')} of {counted(config.batch_size, 'row')}"
        done = f": step {num_done:,} is done, nothing is left to train" if num_done >= config.steps else ""
        name = type(find_model(model)).__name__
        amount = f"{rows.num_tokens:,} tokens, {counted(rows.num_rows, 'row')} of {rows.seq_length:,}"
        if self.tools is not None:
            amount = counted(rows.num_rows, "example")
        lines = [
            f"model   {name}, {num_full:,} parameters ({num_local:,} on rank 0), {config.model.dtype}",
            f"layout  {config.layout}{', sequence parallel' if config.sequence_parallel else ''}",
            f"data    {amount}{notes}",
            f"run     {size} ({passes:.2g} passes over the data){done}",
            f"logs    {Path(config.log.dir) / 'train.jsonl'}",
        ]
        if config.adapter is not None:
            lines.insert(2, f"adapter {num_trained:,} parameters are trained, in {counted(len(trained), 'tensor')}")
        self.console.print("\n".join(lines))

    def finish(self, model: torch.nn.Module, batches: PrefetchLoader) -> None:
        """Exports the model, and writes the data state and the memory of every rank."""
        config = self.config
        memory = all_gather_objects(peak_memory_bytes(self.mesh.device), self.mesh.group())
        try:
            if config.export is not None:
                self.export(model, config.export)
                self.console.print(f"exported to {config.export}")
        finally:
            if self.mesh.rank == 0:
                write_text(Path(config.log.dir) / "data_state.json", json.dumps(batches.state_dict(), indent=1))
                write_text(Path(config.log.dir) / "ranks.json", json.dumps({"memory_bytes": memory}))

    def export(self, model: torch.nn.Module, directory: str) -> None:
        """Exports the model to `directory`, or beside the log if that fails, so that no weights are lost."""

        def export(place: str | Path) -> None:
            export_pretrained(model, place, tokenizer=self.tokenizer, adapter=export_mode(self.config))
            with raise_on_all_ranks(self.mesh.group(), "writing the processors"):
                for processor in (self.tools.images, self.tools.audio, self.tools.processor) if self.tools else ():
                    if processor is not None and self.mesh.rank == 0:
                        processor.save_pretrained(place)

        try:
            export(directory)
        except Exception as error:
            kept = Path(self.config.log.dir) / "unexported"
            try:
                export(kept)
            except Exception as second:  # noqa: BLE001 - of the disk, or PEFT's
                why = f"{error}\nnor to {kept}: {second}"
                raise LoadError(f"the model cannot be exported to {directory}", why=why) from error
            raise LoadError(
                f"the model cannot be exported to {directory}; it is in {kept}",
                why=str(error),
                fix=f"move {kept} to where it should be; no training is lost",
            ) from error


def count_steps(config: TrainConfig, batches: PackedBatches, *, num_done: int, rows_before: int) -> TrainConfig:
    """Returns the configuration with the steps that `epochs` passes over the data take, `num_done` of which have read
    `batches` so far, beside `rows_before` rows of an earlier run.
    """
    assert config.epochs is not None
    num_read = batches.num_batches_read - rows_before // config.batch_size
    left = round(config.epochs * batches.num_rows / config.batch_size) - num_read
    steps = max(1, num_done + max(0, left))
    config = dataclasses.replace(config, steps=steps, epochs=None)
    if problems := check_config(config):
        raise config_error(f"the configuration, with {steps} steps,", problems)
    return config


def _with_timeline(
    step: TrainStep, log: LogConfig, console: Console, *, num_done: int
) -> Callable[[Mapping[str, Tensor]], StepResult]:
    """Wraps `step` so that step `log.timeline` is measured, and rank 0 draws its timeline.

    Communicates: in that step, a gather of the times over pp.
    """
    runner = runner_of(step.model)
    if log.timeline is None or runner is None:
        return step
    left = log.timeline - num_done

    def timed(batch: Mapping[str, Any]) -> StepResult:
        nonlocal left
        left -= 1
        runner.times_next = left == 0
        result = step(batch)
        if left == 0 and (measured := runner.timeline()) is not None and step.mesh.rank == 0:
            directory, name = Path(log.dir), f"step {log.timeline}"
            (directory / "timeline.svg").write_text(draw_svg(measured), encoding="utf-8")
            (directory / "timeline.json").write_text(chrome_trace({name: measured}), encoding="utf-8")
            console.print(f"in {name} ranks waited {measured.bubble:.1%} of the time ({directory / 'timeline.svg'})")
        return result

    return timed
