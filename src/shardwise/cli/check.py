"""`shardwise check`: every problem of a run at once, before it starts."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from shardwise.cli.config_file import Problems, parse_config
from shardwise.errors import ConfigError, counted
from shardwise.topology.machines import describe_crossing
from shardwise.topology.shape import MeshShape
from shardwise.train.run_config import Problem, TrainConfig

__all__ = ["HELP", "add_arguments", "check_run", "run"]

HELP = """\
Check a training run without starting it, and list every problem at once:

  - names and types of its keys, and the files and packages that it needs;
  - whether the number of ranks fits the layout, and whether batches divide among the ranks;
  - whether the model, with its adapter, can be split that way, and can keep packed documents apart;
  - whether the first prompts or messages of the data can be read.

Warns if tensor parallelism crosses machines, which works but is slow. The exit code is 1 if there is a problem.

  shardwise check run.yaml
  shardwise check run.yaml layout=tp8 --world-size 64
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `shardwise check`."""
    parser.add_argument("config", type=Path, metavar="CONFIG.yaml", help="the run, as for `shardwise train`")
    # Without a default argparse calls them required.
    parser.add_argument("overrides", nargs="*", default=None, metavar="key=value", help="keys to set over the file's")
    parser.add_argument(
        "--world-size", type=int, metavar="N", help="ranks the run will have (default: what the layout needs)"
    )
    parser.add_argument(
        "--ranks-per-machine", type=int, default=8, metavar="N", help="how many of them stand together (default: 8)"
    )


def run(arguments: argparse.Namespace) -> int:
    """Runs the command; returns its exit code."""
    if arguments.ranks_per_machine < 1:
        raise ConfigError(f"--ranks-per-machine {arguments.ranks_per_machine}", fix="use 1 or more")
    config, problems = parse_config(arguments.config, arguments.overrides)
    problems = check_run(config, earlier=problems, world_size=arguments.world_size)
    from shardwise.cli.run_checkpoints import check_saved  # torch, which `check_run` has imported

    with problems.of("checkpoint.dir"):
        check_saved(config.checkpoint)
    if not problems:
        shape = MeshShape.parse(config.layout)
        num_ranks = shape.world_size
        if (warning := describe_crossing(shape, arguments.ranks_per_machine)) is not None:
            print(f"warning: {warning}", file=sys.stderr)
        print(f"{arguments.config}: no problems found ({config.layout}, {counted(num_ranks, 'rank')})")
        return 0
    print(f"{arguments.config}: {counted(len(problems), 'problem')}")
    for number, problem in enumerate(problems, start=1):
        print(f"{number:>3}. {str(problem).replace(chr(10), chr(10) + '     ')}")
    return 1


def check_run(config: TrainConfig, *, earlier: Sequence[Problem] = (), world_size: int | None = None) -> Problems:
    """Everything wrong with a run, after the problems that are `known`, on `world_size` ranks if it is given."""
    from shardwise.cli.adapters import check_adapter  # torch and transformers are slow to import
    from shardwise.cli.inputs import check_inputs
    from shardwise.cli.models import check_model
    from shardwise.cli.places import check_outputs

    problems = Problems(earlier)
    broken = {problem.key for problem in earlier}
    if world_size is not None and "layout" not in broken:
        with problems.of("layout"):
            MeshShape.parse(config.layout).check_world_size(world_size)
    more = [*check_inputs(config), *check_adapter(config), *check_outputs(config)]
    problems += [problem for problem in more if problem.key not in broken]
    groups = {problem.key.split(".")[0] for problem in problems}
    if not groups & {"model", "pipeline", "adapter", "compilation"} and "layout" not in broken:
        with_data = not groups & {"data", "evaluation"}
        more = check_model(config, with_optimizer="optimizer" not in groups, with_data=with_data)
        problems += [
            problem for problem in more if problem.key not in broken and problem not in problems
        ]  # which have defaults
    return problems
