"""`shardwise plan`: who owns what, before anything is loaded."""

from __future__ import annotations

import argparse
from dataclasses import replace

from shardwise.cli import target
from shardwise.errors import ConfigError
from shardwise.plan.options import Precision, Recompute

__all__ = ["HELP", "add_arguments", "run"]

HELP = """\
Print how a model is split: the rule for every parameter and where it comes from, what each rank holds, and what stays
whole and why. Reads the model's configuration, not its weights.

  shardwise plan path/or/hub-id --layout tp2
  shardwise plan path/or/hub-id --layout fsdp8.tp4 --batch 2x4096 --compute bfloat16 --recompute full
  shardwise plan run.yaml

With --batch (a run's file says it itself) a forward on fake tensors also tells what a rank holds between forward and
backward of one microbatch.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `shardwise plan`."""
    target.add_arguments(parser)
    parser.add_argument("--batch", metavar="ROWSxTOKENS", help="one microbatch of a data rank, such as 2x4096")
    parser.add_argument("--compute", metavar="DTYPE", help="dtype of forward and backward, such as bfloat16")
    parser.add_argument("--recompute", metavar="MODE", help="none, full, attention or selective")


def run(arguments: argparse.Namespace) -> int:
    """Runs the command; returns its exit code."""
    found = target.find_target(arguments)
    from shardwise.api.describing import describe  # torch and transformers are slow to import

    spec, batch = found.spec, None
    if found.run is not None:
        rows = found.run.batch_size // (found.shape.data_size * found.run.num_microbatches)
        batch = max(1, rows), found.run.data.seq_length  # --layout may need more rows
    if arguments.batch is not None:
        batch = _read_batch(arguments.batch)
    if arguments.compute is not None:
        spec = replace(spec, precision=Precision(compute=arguments.compute))
    if arguments.recompute is not None:
        spec = replace(spec, recompute=Recompute(mode=arguments.recompute))
    print(describe(found.model, found.shape, batch=batch, **vars(spec)))
    return 0


def _read_batch(text: str) -> tuple[int, int]:
    num_rows, times, seq_length = text.partition("x")
    if not (times and num_rows.isdigit() and seq_length.isdigit() and int(num_rows) and int(seq_length)):
        raise ConfigError(f"--batch {text} is no microbatch", fix="write rows x tokens, such as --batch 2x4096")
    return int(num_rows), int(seq_length)
