"""`shardwise plan`: who owns what, before anything is loaded."""

from __future__ import annotations

import argparse

from shardwise.cli import target

__all__ = ["HELP", "add_arguments", "run"]

HELP = """\
Print how a model is split: the rule for every parameter and where it comes from, what each rank holds, and what stays
whole and why. Reads the model's configuration, not its weights.

  shardwise plan path/or/hub-id --layout tp2
  shardwise plan run.yaml
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `shardwise plan`."""
    target.add_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Runs the command; returns its exit code."""
    found = target.find_target(arguments)
    from shardwise.api.proving import describe  # torch and transformers are slow to import

    print(describe(found.model, found.shape, plan=found.plan or "auto", sequence_parallel=found.sequence_parallel))
    return 0
