"""`shardwise check`: every problem of a run at once, before it starts."""

from __future__ import annotations

import argparse
from pathlib import Path

from shardwise.cli.config import parse_config
from shardwise.errors import MeshError
from shardwise.topology.shape import MeshShape
from shardwise.train.config import Problem, TrainConfig

__all__ = ["HELP", "add_arguments", "run"]

HELP = """\
Look a training run over without starting it: spelling and types of its keys, files and packages it needs, whether the
ranks fill the layout, whether batches divide among them, and whether the model can be split that way. Lists every
problem at once; the exit code is 1 if there is one.

  shardwise check run.yaml
  shardwise check run.yaml layout=tp8 --world-size 64
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `shardwise check`."""
    parser.add_argument("config", type=Path, metavar="CONFIG.yaml", help="the run, as for `shardwise train`")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="keys to set over the file's")
    parser.add_argument(
        "--world-size", type=int, metavar="N", help="ranks the run will have (default: what the layout needs)"
    )
    parser.add_argument("--traceback", action="store_true", help="show where in the code an error arose")


def run(arguments: argparse.Namespace) -> int:
    """Runs the command; returns its exit code."""
    config, problems = parse_config(arguments.config, arguments.overrides)
    broken = {problem.key for problem in problems}
    if "layout" not in broken:
        problems += _check_world_size(config, arguments.world_size)
    from shardwise.cli.inputs import check_inputs, check_outputs  # torch is slow to import

    found = [*check_inputs(config), *check_outputs(config)]
    problems += [problem for problem in found if problem.key not in broken]
    if "layout" not in broken and not any(problem.key.split(".")[0] == "model" for problem in problems):
        from shardwise.cli.models import check_model

        is_sound = not any(problem.key.startswith("optimizer") for problem in problems)
        problems += check_model(config, with_optimizer=is_sound)
    if not problems:
        num_ranks = MeshShape.parse(config.layout).world_size
        print(f"{arguments.config}: no problems found ({config.layout}, {num_ranks} ranks)")
        return 0
    print(f"{arguments.config}: {len(problems)} problem{'s' if len(problems) > 1 else ''}")
    for number, problem in enumerate(problems, start=1):
        print(f"{number:>3}. {str(problem).replace(chr(10), chr(10) + '     ')}")
    return 1


def _check_world_size(config: TrainConfig, world_size: int | None) -> list[Problem]:
    if world_size is None:
        return []
    try:
        MeshShape.parse(config.layout).check_world_size(world_size)
    except MeshError as error:
        return [Problem("layout", f"{error.summary} ({error.why})" if error.why else error.summary, error.fix or "")]
    return []
