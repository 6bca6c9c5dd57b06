"""`shardwise evaluate`: measures a model on held-out data."""

import argparse

from shardwise.cli.config_file import add_run, read_config
from shardwise.cli.launch import run_ranks
from shardwise.errors import ConfigError
from shardwise.topology.shape import MeshShape

HELP = """\
Measure the model of a run on the data at `evaluation.path`: its loss, and perplexity or the metrics of its task. The
model is that of the newest checkpoint in `checkpoint.dir`, the best one with `checkpoint.best`; without a checkpoint,
that of `model.path`.

  shardwise evaluate run.yaml
  shardwise evaluate run.yaml model.path=runs/first/model checkpoint.dir=null evaluation.path=other.jsonl layout=fsdp2
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `shardwise evaluate`."""
    add_run(parser)


def run(arguments: argparse.Namespace) -> int:
    """Runs the command; returns its exit code."""
    config = read_config(arguments.config, arguments.overrides)
    if config.evaluation.path is None:
        raise ConfigError("evaluation.path is missing", fix="name held-out data: evaluation.path=held.jsonl")

    def body() -> None:
        from shardwise.cli.training import evaluate  # torch and transformers are slow to import

        evaluate(config)

    num_ranks = MeshShape.parse(config.layout).world_size
    return run_ranks(arguments.words, body, num_ranks=num_ranks, show_traceback=arguments.traceback)
