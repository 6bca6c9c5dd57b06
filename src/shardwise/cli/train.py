"""`shardwise train`: read the configuration, start ranks where none run yet, train."""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any, TextIO

from shardwise.cli.check import check_run
from shardwise.cli.config_file import config_error, read_config
from shardwise.cli.launch import (
    SECONDS_TO_SHUT_DOWN,
    end_with_launcher,
    exit_on_terminate,
    is_rank,
    launch,
    prepare,
    record_failures,
)
from shardwise.errors import ConfigError
from shardwise.job.gpu_defaults import set_gpu_defaults
from shardwise.job.slurm import read_slurm_environment
from shardwise.topology.machines import describe_crossing
from shardwise.topology.shape import MeshShape
from shardwise.train.run_config import TrainConfig

__all__ = ["HELP", "add_arguments", "run"]

SECONDS_TO_SAVE = 600
"""How long ranks may take to end after a signal where they save first; a second signal ends them at once."""

HELP = """\
Train a model on text, over as many ranks as the layout names.

  shardwise train run.yaml                          # ranks as the layout says, on this machine
  shardwise train run.yaml layout=tp4 optimizer.lr=1e-4
  torchrun --nnodes 2 --nproc-per-node 8 -m shardwise train run.yaml    # ranks of your own
  srun --nodes 2 --ntasks-per-node 8 shardwise train run.yaml           # Slurm's tasks are ranks

A small run.yaml:

  model: {path: path/or/hub-id}         # or config: {model_type: llama, ...} with tokenizer: path
  layout: tp2                           # ranks along each axis
  sequence_parallel: true
  data: {path: corpus/, seq_length: 512}   # .txt .md .rst .py .jsonl, or dataset: hub-id
  steps: 1000
  batch_size: 16                        # rows a step, over all ranks
  optimizer: {lr: 3e-4, schedule: {name: cosine, warmup_steps: 50}}
  log: {dir: runs/first, tensorboard: true}
  export: runs/first/model              # for AutoModelForCausalLM.from_pretrained

To fine-tune with LoRA on conversations, of which the assistant's words are learned:

  data: {path: chats.jsonl, format: chat, seq_length: 2048}     # or format: prompt, with prompt and response
  adapter: {r: 16, lora_alpha: 32, target_modules: all-linear, export: merged}
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `shardwise train`."""
    parser.add_argument("config", type=Path, metavar="CONFIG.yaml", help="the run; its keys are listed below")
    parser.add_argument(
        "overrides",
        nargs="*",
        default=None,  # else argparse calls them required
        metavar="key=value",
        help="keys to set over the file's, e.g. data.seq_length=256",
    )
    parser.add_argument(
        "--max-restarts",
        type=int,
        default=0,
        metavar="N",
        help="how often ranks are started again when one has failed, from the newest checkpoint",
    )
    parser.add_argument(
        "--nproc", type=int, metavar="N", help="ranks to start on this machine (default: what the layout needs)"
    )


def run(arguments: argparse.Namespace) -> int:
    """Runs the command; returns its exit code."""
    exit_on_terminate()
    read_slurm_environment()
    set_gpu_defaults()
    if is_rank():
        end_with_launcher()
        with record_failures():
            _run_rank(arguments)
        return 0
    config = read_config(arguments.config, arguments.overrides)
    shape = MeshShape.parse(config.layout)
    if arguments.nproc is not None:
        shape.check_world_size(arguments.nproc)
    if shape.world_size > 1:
        prepare(shape.world_size)  # ranks import what this process imports meanwhile
    if problems := check_run(config):
        raise config_error(str(arguments.config), problems)
    if arguments.max_restarts < 0 or (arguments.max_restarts and config.checkpoint.dir is None):
        raise ConfigError(
            f"--max-restarts {arguments.max_restarts}",
            why="it counts restarts from a checkpoint, and the run has none" if arguments.max_restarts > 0 else "",
            fix="name a checkpoint.dir" if arguments.max_restarts > 0 else "use 0 or more",
        )
    if arguments.max_restarts and config.checkpoint.resume == "never":
        raise ConfigError(
            f"--max-restarts {arguments.max_restarts} and checkpoint.resume=never",
            why="a run that never resumes begins again whenever its ranks are started again",
            fix="leave one of them out",
        )
    if shape.world_size == 1 and not arguments.max_restarts:
        _train(config)
        return 0
    words = ["train", str(arguments.config), *arguments.overrides, *(["--traceback"] if arguments.traceback else [])]
    return launch(
        words,
        num_ranks=shape.world_size,
        show_traceback=arguments.traceback,
        max_restarts=arguments.max_restarts,
        seconds_to_end=SECONDS_TO_SHUT_DOWN if config.checkpoint.dir is None else SECONDS_TO_SAVE,
    )


def _run_rank(arguments: argparse.Namespace) -> None:
    """Every rank finds the same problems before any of them communicates, so none waits for another."""
    if arguments.nproc is not None:
        raise ConfigError(
            f"--nproc {arguments.nproc} inside a launcher",
            why="WORLD_SIZE is set, so the ranks have been started already",
            fix="leave it out",
        )
    from shardwise.cli.adapters import check_adapter  # torch and transformers are slow to import
    from shardwise.cli.inputs import check_inputs

    config = read_config(arguments.config, arguments.overrides)
    is_checked = multiprocessing.parent_process() is not None  # by the launcher that this rank was forked for
    if not is_checked and (problems := [*check_inputs(config), *check_adapter(config)]):
        raise config_error(str(arguments.config), problems)
    together = int(os.environ.get("LOCAL_WORLD_SIZE") or 0)
    if (
        together
        and os.environ.get("RANK") == "0"
        and (warning := describe_crossing(MeshShape.parse(config.layout), together))
    ):
        print(f"warning: {warning}", file=sys.stderr)
    _train(config)


def _train(config: TrainConfig) -> None:
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")  # set explicitly, or forks of the process draw a warning
    from shardwise.cli.training import train  # torch and transformers are slow to import

    if not gc.isenabled():  # in a process of our own: what has been imported stays, and is never looked at
        gc.freeze()
        gc.enable()
    with redirect_stdout(_LastingOutput(sys.stdout)):
        train(config)


class _LastingOutput:
    """The standard output of a run, which goes on when nobody reads it any more, or when the disk is full."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Writes `text`, or drops it."""
        with self._dropping():
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        """Writes what is buffered, or drops it."""
        with self._dropping():
            self._stream.flush()

    @contextmanager
    def _dropping(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())
            print(f"cannot write the output: {error.strerror}", file=sys.stderr)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
