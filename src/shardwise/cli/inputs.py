"""What a configuration points to: is it there, does it fit? Every problem is collected; nothing large is read."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import json
from pathlib import Path
from typing import Any

import torch

from shardwise.cli.config_file import Problems
from shardwise.cli.sources import import_datasets
from shardwise.data.config import held_out, patterns_of
from shardwise.data.corpus import find_files
from shardwise.errors import LoadError, did_you_mean
from shardwise.parallel.compiled import check_compilation
from shardwise.plan.options import Compile
from shardwise.train.run_config import CompilationConfig, OptimizerConfig, Problem, TrainConfig
from shardwise.weights.kinds import check_no_checkpoint
from shardwise.weights.locate import locate_source

__all__ = ["check_inputs", "compilation_of", "find_optimizer", "optimizer_arguments", "read_data_state"]


def check_inputs(config: TrainConfig) -> list[Problem]:
    """Everything wrong with the files, packages and classes that `config` names."""
    model, data = config.model, config.data
    problems = Problems()
    for key, read in (("data.path", data), ("evaluation.path", held_out(data, config.evaluation))):
        if read.path is not None:
            with problems.of(key):
                find_files(Path(read.path), patterns_of(read))
    if data.dataset is not None:
        with problems.of("data.dataset"):
            import_datasets(data)
    if data.state is not None:
        with problems.of("data.state"):
            read_data_state(data.state)
    if config.log.tensorboard and importlib.util.find_spec("tensorboard") is None:
        fix = "pip install tensorboard, or set it to false (train.jsonl has the same numbers)"
        problems.append(Problem("log.tensorboard", "is true, but the package tensorboard is not installed", fix))
    for key, place in (("model.path", model.path), ("model.tokenizer", model.tokenizer)):
        if place is not None:
            with problems.of(key):
                check_no_checkpoint(place)
                locate_source(place)
    if isinstance(model.config, str) and not Path(model.config).is_file():
        problems.append(Problem("model.config", f"there is no file {model.config}", "name a config.json"))
    if isinstance(model.config, dict):
        problems += _check_model_config(model.config)
    with problems.of("compilation"):
        check_compilation(compilation_of(config.compilation, torch.device("cuda")))
    return [*problems, *_check_optimizer(config.optimizer)]


def compilation_of(chosen: CompilationConfig, device: torch.device) -> Compile | None:
    """What is asked for of torch.compile on such a device."""
    backend = chosen.backend
    if backend == "auto":
        backend = "inductor" if device.type == "cuda" else None
    if backend is None:
        return None
    return Compile(
        backend=backend,
        dynamic=chosen.dynamic,
        mode=chosen.mode,
        options=chosen.options or None,
    )


def read_data_state(place: str) -> dict[str, int]:
    """What a run wrote to `place` of where its reading of the data stood.

    Raises:
        LoadError: there is no such file, or it holds something else.
    """
    try:
        with Path(place).open(encoding="utf-8") as file:
            state = json.loads(file.read(2**16))  # another file may have no end
    except (OSError, ValueError) as error:
        raise LoadError(f"cannot read {place}", why=str(error)) from error
    is_state = isinstance(state, dict) and "num_batches_read" in state
    if not (is_state and all(type(value) is int and value >= 0 for value in state.values())):
        raise LoadError(f"{place} does not say where reading stood", fix="name the data_state.json of an earlier run")
    return state


def find_optimizer(name: str) -> type[torch.optim.Optimizer] | None:
    """The class called `name` in torch.optim, or at the dotted path `name`; None where there is none."""
    module, _, last = name.rpartition(".")
    try:
        value = getattr(importlib.import_module(module or "torch.optim"), last, None)
    except (ImportError, TypeError, ValueError):  # of a name that begins with a point, or that has a NUL
        return None
    return value if inspect.isclass(value) and issubclass(value, torch.optim.Optimizer) else None


def optimizer_arguments(config: OptimizerConfig, cls: type[torch.optim.Optimizer]) -> dict[str, Any]:
    """The arguments `cls` is built with. A weight decay of 0 is left out where the class has none."""
    arguments = {"lr": config.lr, "weight_decay": config.weight_decay, **config.options}
    if config.weight_decay == 0 and "weight_decay" not in inspect.signature(cls).parameters:
        del arguments["weight_decay"]
    return arguments


def _check_model_config(settings: dict[str, Any]) -> list[Problem]:
    from transformers import CONFIG_MAPPING

    model_type = str(settings.get("model_type"))
    if model_type not in CONFIG_MAPPING:
        close = did_you_mean(model_type, CONFIG_MAPPING)
        return [Problem("model.config.model_type", f"transformers knows no {model_type!r}{close}")]
    default = CONFIG_MAPPING[model_type]()
    values = default.to_dict()
    accepted = [*values, *getattr(default, "attribute_map", {}), *inspect.signature(type(default)).parameters]
    problems = []
    for key, value in settings.items():
        if key not in accepted:  # transformers keeps any key it is given, so a misspelt one would silently do nothing
            problems.append(Problem(f"model.config.{key}", f"unknown key of {model_type}{did_you_mean(key, accepted)}"))
        elif type(value) is type(normal := values.get(key)) is int and value < 0 < normal and not key.endswith("_id"):
            problems.append(Problem(f"model.config.{key}", f"is {value}, must not be negative"))
    return problems


def _check_optimizer(config: OptimizerConfig) -> list[Problem]:
    """Whether there is such a class, with arguments of these names; the rehearsal builds it with their values."""
    cls = find_optimizer(config.name)
    if cls is None:
        names = [name for name, value in vars(torch.optim).items() if inspect.isclass(value)]
        what = f"there is no optimizer class {config.name!r}{did_you_mean(config.name, names)}"
        return [Problem("optimizer.name", what)]
    closure = inspect.signature(cls.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        what = f"{config.name} evaluates the loss itself, which a distributed step cannot serve"
        return [Problem("optimizer.name", what)]
    accepted = inspect.signature(cls).parameters
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in accepted.values()):
        return []
    keys = [(f"optimizer.options.{key}", key) for key in config.options]
    for number, group in enumerate(config.groups):  # torch takes any key of a group
        keys += [(f"optimizer.groups[{number}].{key}", key) for key in group if key not in ("params", "max_dims")]
    return [
        Problem(place, f"{config.name} has no such argument{did_you_mean(key, accepted)}")
        for place, key in keys
        if key not in accepted
    ]
