"""`shardwise train`: reads the configuration, starts ranks if no launcher has, and trains."""

import argparse
import os

from shardwise.cli.check import check_run, warn_of_crossing
from shardwise.cli.config_file import add_run, config_error, read_config
from shardwise.cli.launch import SECONDS_TO_SHUT_DOWN, launch, prepare, run_as_rank
from shardwise.errors import ConfigError
from shardwise.topology.shape import MeshShape
from shardwise.train.run_config import TrainConfig

SECONDS_TO_SAVE = 600  # how long ranks may take to save after a signal; a second signal ends them at once

HELP = """\
Train a model on text, on as many ranks as the layout names.

  shardwise train run.yaml                          # starts the ranks of the layout on this machine
  shardwise train run.yaml layout=tp4 optimizer.lr=1e-4
  torchrun --nnodes 2 --nproc-per-node 8 -m shardwise train run.yaml    # torchrun starts the ranks
  srun --nodes 2 --ntasks-per-node 8 shardwise train run.yaml           # Slurm's tasks are the ranks

A small run.yaml:

  model: {path: path/or/hub-id}         # or config: {model_type: llama, ...} with tokenizer: path
  layout: tp2                           # ranks along each axis
  sequence_parallel: true
  data: {path: corpus/, seq_length: 512}   # .txt .md .rst .py .jsonl, or dataset: hub-id
  steps: 1000
  batch_size: 16                        # rows per step, over all ranks
  optimizer: {lr: 3e-4, schedule: {name: cosine, warmup_steps: 50}}
  log: {dir: runs/first, tensorboard: true}
  export: runs/first/model              # for AutoModelForCausalLM.from_pretrained

To fine-tune with LoRA on conversations (the loss is computed on the assistant's messages):

  data: {path: chats.jsonl, format: chat, seq_length: 2048}     # or format: prompt, with prompt and response
  adapter: {r: 16, lora_alpha: 32, target_modules: all-linear, export: merged}
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `shardwise train`."""
    add_run(parser)
    about = "restart all ranks from the newest checkpoint after a failure, at most N times"
    parser.add_argument("--max-restarts", type=int, default=0, metavar="N", help=about)
    parser.add_argument("--nproc", type=int, metavar="N", help="number of ranks (default: what the layout needs)")


def run(arguments: argparse.Namespace) -> int:
    """Runs the command; returns its exit code."""
    if run_as_rank(lambda: _train(_read(arguments))):
        return 0
    config = _read(arguments)
    num_ranks = MeshShape.parse(config.layout).world_size
    if num_ranks > 1:
        prepare(num_ranks)  # the ranks' imports run while this process checks the run
    if problems := check_run(config):
        raise config_error(str(arguments.config), problems)
    if num_ranks == 1 and not arguments.max_restarts:
        _train(config)
        return 0
    return launch(
        arguments.words,
        num_ranks=num_ranks,
        show_traceback=arguments.traceback,
        max_restarts=arguments.max_restarts,
        seconds_to_end=SECONDS_TO_SHUT_DOWN if config.checkpoint.dir is None else SECONDS_TO_SAVE,
    )


def _read(arguments: argparse.Namespace) -> TrainConfig:
    config = read_config(arguments.config, arguments.overrides)
    if arguments.nproc is not None:
        MeshShape.parse(config.layout).check_world_size(arguments.nproc)
    if arguments.max_restarts and (config.checkpoint.dir is None or config.checkpoint.resume == "never"):
        raise ConfigError(
            f"--max-restarts {arguments.max_restarts}",
            why="the run would start again from step 0: it does not resume from a checkpoint",
            fix="set checkpoint.dir, and leave checkpoint.resume at auto",
        )
    return config


def _train(config: TrainConfig) -> None:
    if (ranks_per_machine := int(os.environ.get("LOCAL_WORLD_SIZE") or 0)) and os.environ.get("RANK") == "0":
        warn_of_crossing(config, ranks_per_machine)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")  # unset, it warns about forks
    from shardwise.cli.training import train  # torch and transformers are slow to import

    train(config)
