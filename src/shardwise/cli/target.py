"""What `plan` and `verify` are pointed at: a model, or the configuration of a run."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shardwise.cli.config import read_config
from shardwise.errors import ConfigError
from shardwise.plan.options import ParallelSpec
from shardwise.topology.shape import MeshShape
from shardwise.train.config import TrainConfig

__all__ = ["Target", "add_arguments", "find_target"]


@dataclass(frozen=True, kw_only=True)
class Target:
    """A model with the way it is to be split.

    Attributes:
        model: a model directory, a hub id, or a transformers configuration.
        shape: the layout.
        spec: what is asked for beside them.
        run: the configuration of a run, where one was named.
    """

    model: Any
    shape: MeshShape
    spec: ParallelSpec
    run: TrainConfig | None = None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments that `find_target` reads."""
    parser.add_argument(
        "model", metavar="MODEL", help="model directory, hub id, config.json, or the YAML file of a run"
    )
    parser.add_argument(
        "--layout", metavar="LAYOUT", help="ranks along each axis, such as tp2 (a run's file names its own)"
    )
    parser.add_argument("--sequence-parallel", action="store_true", help="also split activations along the sequence")


def find_target(arguments: argparse.Namespace) -> Target:
    """The model and layout that the command line names; options go over what a run's file says.

    Raises:
        ConfigError: there is no layout, or the run's file has problems.
        LoadError: the file is not there or not readable.
        MeshError: the layout is malformed.
    """
    from shardwise.cli.models import spec_of  # torch and transformers are slow to import
    from shardwise.split.build import read_config as read_model_config

    model: Any = str(arguments.model)
    layout, spec, config = arguments.layout, ParallelSpec(), None
    suffix = Path(model).suffix
    if suffix in (".yaml", ".yml"):
        config = read_config(Path(model))
        model, layout, spec = config.model.path or config.model.config, layout or config.layout, spec_of(config)
    if suffix == ".json" or (config is not None and config.model.path is None):
        model = read_model_config(model, {})[0]
    if layout is None:
        raise ConfigError("no layout is given", fix="add one, such as --layout tp2")
    if arguments.sequence_parallel:
        spec = replace(spec, sequence_parallel=True)
    return Target(model=model, shape=MeshShape.parse(layout), spec=spec, run=config)
