"""`shardwise verify`: proof on a tiny model that a split computes the same numbers."""

import argparse
import os

from shardwise.cli.plan import add_target, find_target, read_target
from shardwise.ranks.rank import warm
from shardwise.train.run_config import num_microbatches_of

HELP = """\
Build a tiny model (same architecture, few and narrow layers), run it unsplit and split over CPU ranks, and compare
loss, logits, every gradient and the replicas. Prints a table; the exit code is 1 if anything differs.

  shardwise verify path/or/hub-id --layout tp2 --sequence-parallel
  shardwise verify path/or/hub-id --layout pp2.tp2 --adapter path/of/adapter
  shardwise verify run.yaml layout=pp2.tp2
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `shardwise verify`."""
    add_target(parser)
    parser.add_argument("--adapter", metavar="DIRECTORY", help="verify with a PEFT adapter of this config")


def run(arguments: argparse.Namespace) -> int:
    """Runs the command; returns its exit code."""
    read_target(arguments)  # errors first
    warm()  # the ranks' imports run beside ours
    model, shape, spec, config = find_target(arguments)
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # the ranks share the cores
    from shardwise.api.verifying import verify  # torch and transformers are slow to import
    from shardwise.cli.tasks import class_of

    num_microbatches = None if config is None else num_microbatches_of(config, shape)
    options = {"auto_class": class_of(config, arguments.task), "num_microbatches": num_microbatches}
    report = verify(model, shape, adapter=arguments.adapter, **options, **vars(spec))
    print(report)
    return 0 if report.passed else 1
