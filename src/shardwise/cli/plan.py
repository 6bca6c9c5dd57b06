"""`shardwise plan`: prints what each rank holds, before anything is loaded."""

import argparse
import re
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

from shardwise.cli.config_file import add_overrides, read_config
from shardwise.data.config import TaskName
from shardwise.errors import ConfigError, as_error
from shardwise.estimate.cuts import schedule_for
from shardwise.estimate.memory import Card
from shardwise.plan.options import ParallelSpec, Precision, Recompute
from shardwise.schedule.timeline import chrome_trace, describe_schedule, draw_svg, timeline
from shardwise.topology.shape import MeshShape
from shardwise.train.run_config import TrainConfig

HELP = """\
Print how a model is split: the rule for every parameter and its origin, what each rank holds, and which parameters are
replicated and why. Reads the model's configuration, not its weights.

  shardwise plan path/or/hub-id --layout tp2
  shardwise plan path/or/hub-id --layout fsdp8.tp4 --batch 2x4096 --compute bfloat16 --recompute full
  shardwise plan path/or/hub-id --layout pp4 --timeline steps.svg
  shardwise plan run.yaml layout=tp4 batch_size=32

--timeline draws one step of the pipeline, assuming that all stages take the same time.

--batch adds the memory of one microbatch, from a forward on fake tensors. The default for a run is its own batch size.
--card says whether that fits, and what would make it fit; the default is the memory of the first GPU, if there is one.
"""


def add_target(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments that `find_target` reads."""
    about = "model directory, hub id, config.json, or the YAML file of a run"
    parser.add_argument("model", metavar="MODEL", help=about)
    add_overrides(parser)
    about = "ranks along each axis, such as tp2 (default for a run: its own)"
    parser.add_argument("--layout", metavar="LAYOUT", help=about)
    parser.add_argument("--sequence-parallel", action="store_true", help="also split activations along the sequence")
    tasks = get_args(TaskName)
    about = f"which of its model classes: {', '.join(tasks)} (default: the one that the model names)"
    parser.add_argument("--task", choices=tasks, metavar="TASK", help=about)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `shardwise plan`."""
    add_target(parser)
    parser.add_argument("--batch", metavar="ROWSxTOKENS", help="size of one microbatch on a data rank, such as 2x4096")
    parser.add_argument("--card", metavar="SIZE", help="say whether a step fits this memory, such as 80GB")
    parser.add_argument("--compute", metavar="DTYPE", help="dtype of forward and backward, such as bfloat16")
    parser.add_argument("--recompute", metavar="MODE", help="none, full, attention, selective or alternate")
    about = "draw one step of the pipeline to this file: .svg, or .json for Perfetto"
    parser.add_argument("--timeline", type=Path, metavar="FILE", help=about)
    parser.add_argument("--adapter", metavar="DIRECTORY", help="a PEFT adapter to train on the frozen model")


def run(arguments: argparse.Namespace) -> int:
    """Runs the command; returns its exit code."""
    card = None if arguments.card is None else read_card(arguments.card)
    model, shape, spec, config = find_target(arguments)
    if arguments.timeline is not None:
        _check_timeline(arguments.timeline, shape)
    from shardwise.api.describing import describe  # torch and transformers are slow to import
    from shardwise.cli.inputs import adapter_of
    from shardwise.cli.models import find_gpu, microbatch_of
    from shardwise.cli.tasks import class_of

    auto_class, batch, num_microbatches, adapter = class_of(config, arguments.task), None, None, arguments.adapter
    if config is not None:
        batch, num_microbatches = microbatch_of(config, shape)
        adapter = adapter or adapter_of(config)
    if arguments.batch is not None:
        sizes = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", arguments.batch)
        if sizes is None:
            raise ConfigError(f"cannot read --batch {arguments.batch}", fix="write rows x tokens, such as 2x4096")
        batch = int(sizes[1]), int(sizes[2])
    if arguments.compute is not None:
        spec = replace(spec, precision=Precision(compute=arguments.compute))
    if arguments.recompute is not None:
        spec = replace(spec, recompute=Recompute(mode=arguments.recompute))
    options = {"auto_class": auto_class, "batch": batch, "num_microbatches": num_microbatches, "adapter": adapter}
    print(describe(model, shape, card=card or find_gpu(), **options, **vars(spec)))
    if arguments.timeline is not None:
        _draw_step(arguments.timeline, shape, spec, num_microbatches)
    return 0


def read_card(text: str) -> Card:
    """Returns the device that `--card` describes."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?(GB|GiB)", text)
    if found is None:
        raise ConfigError(f"cannot read --card {text}", fix="write its memory, such as 80GB or 79.1GiB")
    return Card(f"{found[1]} {found[2]}", int(float(found[1]) * {"GB": 10**9, "GiB": 2**30}[found[2]]))


def _check_timeline(file: Path, shape: MeshShape) -> None:
    if shape.pp_size == 1:
        raise ConfigError(f"--timeline with the layout {shape}", why="it has no pipeline", fix="use a layout with pp")
    if file.suffix not in (".svg", ".json"):
        raise ConfigError(f"--timeline {file} is neither .svg nor .json", fix="write --timeline steps.svg")


def _draw_step(file: Path, shape: MeshShape, spec: ParallelSpec, num_microbatches: int | None) -> None:
    """Draws a step of the pipeline to `file`, and prints it."""
    drawn = timeline(schedule_for(spec.pipeline, shape, num_microbatches))
    text = draw_svg(drawn) if file.suffix == ".svg" else chrome_trace({"step": drawn})
    with as_error(ConfigError, f"--timeline {file} cannot be written", OSError):
        file.write_text(text, encoding="utf-8")
    print(f"\n{describe_schedule(drawn)}")


def read_target(arguments: argparse.Namespace) -> tuple[MeshShape, TrainConfig | None]:
    """Returns the layout of `find_target`, and the run. Imports no torch, which wrong arguments need not wait for."""
    model, layout, config = str(arguments.model), arguments.layout, None
    if Path(model).suffix in (".yaml", ".yml"):
        config = read_config(Path(model), arguments.overrides)
        layout = layout or config.layout
    elif arguments.overrides:
        why = "key=value changes a key of a run, and this is not the YAML file of a run"
        raise ConfigError(f"{arguments.overrides[0]} after {model}", why=why, fix="use an option, such as --layout tp2")
    if layout is None:
        raise ConfigError("no layout is given", fix="add one, such as --layout tp2")
    return MeshShape.parse(layout), config


def find_target(arguments: argparse.Namespace) -> tuple[Any, MeshShape, ParallelSpec, TrainConfig | None]:
    """Returns the target of `plan` and `verify`: the model (a directory, a hub id or a transformers config), the
    layout, the other options, and the run if its file was named. Options of the command line override the file's.
    """
    shape, config = read_target(arguments)
    from shardwise.cli.data import load_tokenizer
    from shardwise.cli.models import spec_of  # torch and transformers are slow to import
    from shardwise.cli.tasks import read_model_config
    from shardwise.parallel.build import read_config as read_config_values

    source: Any = str(arguments.model)
    spec = ParallelSpec()
    if config is not None:
        source, spec = config.model.path, spec_of(config)
        if source is None:
            source = read_model_config(config, load_tokenizer(config))
    elif Path(source).suffix == ".json":
        source = read_config_values(source, {})[0]
    if arguments.sequence_parallel:
        spec = replace(spec, sequence_parallel=True)
    return source, shape, spec, config
