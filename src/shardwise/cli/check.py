"""`shardwise check`: lists every problem of a run before it starts."""

import argparse
import sys
from collections.abc import Sequence

from shardwise.cli.config_file import Problems, add_run, parse_config
from shardwise.cli.plan import read_card
from shardwise.data.config import Problem
from shardwise.errors import ConfigError, counted
from shardwise.topology.shape import MeshShape, describe_crossing
from shardwise.train.run_config import TrainConfig

HELP = """\
Check a training run without starting it, and list every problem at once:

  - names and types of its keys, and the files and packages that it needs;
  - whether the number of ranks fits the layout, and whether batches divide among the ranks;
  - whether the model, with its adapter, can be split that way, and can separate packed documents;
  - whether the first prompts or messages of the data can be read;
  - with --card, whether a step of its batch size fits a device.

Warns if tensor parallelism crosses machines, which works but is slow. The exit code is 1 if there is a problem.

  shardwise check run.yaml
  shardwise check run.yaml layout=tp8 --world-size 64 --card 80GB
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `shardwise check`."""
    add_run(parser)
    about = "number of ranks the run will have (default: what the layout needs)"
    parser.add_argument("--world-size", type=int, metavar="N", help=about)
    parser.add_argument("--card", metavar="SIZE", help="say whether a step fits this much memory, such as 80GB")
    about = "number of ranks per machine (default: 8)"
    parser.add_argument("--ranks-per-machine", type=int, default=8, metavar="N", help=about)


def run(arguments: argparse.Namespace) -> int:
    """Runs the command; returns its exit code."""
    if arguments.ranks_per_machine < 1:
        raise ConfigError(f"--ranks-per-machine is {arguments.ranks_per_machine}", fix="use 1 or more")
    card = None if arguments.card is None else read_card(arguments.card)
    config, known = parse_config(arguments.config, arguments.overrides)
    problems = check_run(config, known=known, world_size=arguments.world_size)
    from shardwise.api.checkpoints import load_checkpoint
    from shardwise.cli.models import check_memory
    from shardwise.cli.run_checkpoints import check_saved  # torch, which `check_run` has imported

    with problems.of("checkpoint.dir"):
        check_saved(config)
    with problems.of("optimizer.state"):
        if config.optimizer.state is not None:
            load_checkpoint(config.optimizer.state)
    if card is not None and not problems:
        problems += check_memory(config, card)
    if not problems:
        warn_of_crossing(config, arguments.ranks_per_machine)
        num_ranks = MeshShape.parse(config.layout).world_size
        print(f"{arguments.config}: no problems found ({config.layout}, {counted(num_ranks, 'rank')})")
        return 0
    print(f"{arguments.config}: {counted(len(problems), 'problem')}")
    for number, problem in enumerate(problems, start=1):
        print(f"{number:>3}. {str(problem).replace(chr(10), chr(10) + '     ')}")
    return 1


def warn_of_crossing(config: TrainConfig, ranks_per_machine: int) -> None:
    """Warns if tensor parallelism crosses machines."""
    if (warning := describe_crossing(MeshShape.parse(config.layout), ranks_per_machine)) is not None:
        print(f"warning: {warning}", file=sys.stderr)


def check_run(config: TrainConfig, *, known: Sequence[Problem] = (), world_size: int | None = None) -> Problems:
    """Returns every problem of a run: those already `known`, whose keys have their defaults in `config`, and all
    others.

    Args:
        world_size: number of ranks that the run will have; None: what the layout needs.
    """
    from shardwise.cli.inputs import check_adapter, check_inputs, check_outputs  # torch is slow to import
    from shardwise.cli.models import check_model

    problems = Problems(known)
    if world_size is not None and "layout" not in problems.affected():
        with problems.of("layout"):
            MeshShape.parse(config.layout).check_world_size(world_size)
    problems.add([*check_inputs(config), *check_adapter(config), *check_outputs(config)])
    groups = {key.split(".")[0] for key in problems.affected()}
    if not groups & {"model", "adapter"} and "layout" not in {problem.key for problem in known}:
        problems.add(check_model(config))
    return problems
