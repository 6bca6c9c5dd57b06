"""What a configuration points to: is it there, does it fit? Every problem is collected; nothing large is read."""

from __future__ import annotations

import functools
import importlib
import inspect
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from shardwise.cli.logs import check_tensorboard
from shardwise.cli.places import check_export, check_place, unexported
from shardwise.errors import LoadError, MeshError, ShardwiseError, did_you_mean
from shardwise.topology.shape import MeshShape
from shardwise.train.config import OptimizerConfig, Problem, TrainConfig
from shardwise.train.corpus import find_files
from shardwise.weights.locate import locate_source

__all__ = ["check_inputs", "check_outputs", "find_optimizer", "optimizer_arguments", "read_data_state"]


def check_inputs(config: TrainConfig) -> list[Problem]:
    """Everything wrong with the files, packages and classes that `config` names."""
    problems: list[Problem] = []
    if config.data.path is not None:
        problems += _caught("data.path", lambda: find_files(Path(str(config.data.path)), config.data.include))
    if config.evaluation.path is not None:
        found = Path(config.evaluation.path)
        problems += _caught("evaluation.path", lambda: find_files(found, config.data.include))
    if config.data.state is not None:
        state = config.data.state
        problems += _caught("data.state", lambda: read_data_state(state))
    if config.log.tensorboard:
        problems += _caught("log.tensorboard", check_tensorboard)
    for key, place in (("model.path", config.model.path), ("model.tokenizer", config.model.tokenizer)):
        if place is not None:
            problems += _caught(key, functools.partial(locate_source, place))
    if isinstance(config.model.config, str) and not Path(config.model.config).is_file():
        problems.append(Problem("model.config", f"there is no file {config.model.config}"))
    if isinstance(config.model.config, dict):
        problems += _check_model_config(config.model.config)
    problems += _check_compilation(config.compilation.backend)
    problems += _check_memory(config)
    return problems + _check_optimizer(config.optimizer)


def check_outputs(config: TrainConfig) -> list[Problem]:
    """Everything wrong with the places that the run writes to. Makes them and writes there, in one process of a run."""
    problems = []
    for key, directory in (("log.dir", config.log.dir), ("data.cache_dir", config.data.cache_dir)):
        if directory is not None:
            problems += _caught(key, functools.partial(check_place, directory))
    if config.export is not None:
        problems += _caught("export", functools.partial(check_export, config.export))
        if not problems and Path(config.export).is_dir() and any(Path(config.export).iterdir()):
            what = f"the directory {config.export} is not empty"
            problems.append(Problem("export", what, "remove it or name another; nothing is overwritten"))
        if not problems and unexported(config.log.dir).exists():
            what = f"{unexported(config.log.dir)} holds the weights that an earlier run could not export"
            problems.append(Problem("log.dir", what, "move them, or name another directory"))
    return problems


def read_data_state(place: str) -> dict[str, int]:
    """What a run wrote to `place` of where its reading of the data stood.

    Raises:
        LoadError: there is no such file, or it holds something else.
    """
    try:
        state = json.loads(Path(place).read_text(encoding="utf-8"))
    except OSError as error:
        raise LoadError(f"cannot read {place}", why=str(error)) from error
    except ValueError as error:
        raise LoadError(f"{place} is not JSON", why=str(error)) from error
    is_state = isinstance(state, dict) and "num_batches_read" in state
    if not (is_state and all(type(value) is int and value >= 0 for value in state.values())):
        raise LoadError(f"{place} does not say where reading stood", fix="name the data_state.json of an earlier run")
    return state


def find_optimizer(name: str) -> type[torch.optim.Optimizer] | None:
    """The class called `name` in torch.optim, or at the dotted path `name`; None where there is none."""
    module, _, last = name.rpartition(".")
    try:
        found = getattr(importlib.import_module(module or "torch.optim"), last, None)
    except ImportError:
        return None
    return found if inspect.isclass(found) and issubclass(found, torch.optim.Optimizer) else None


def optimizer_arguments(config: OptimizerConfig, cls: type[torch.optim.Optimizer]) -> dict[str, Any]:
    """The arguments `cls` is built with. A weight decay of 0 is left out where the class has none."""
    arguments = {"lr": config.lr, "weight_decay": config.weight_decay, **config.options}
    if config.weight_decay == 0 and "weight_decay" not in inspect.signature(cls).parameters:
        del arguments["weight_decay"]
    return arguments


def _caught(key: str, check: Callable[[], object]) -> list[Problem]:
    try:
        check()
    except ShardwiseError as error:
        why = f" ({error.why})" if error.why else ""
        return [Problem(key, error.summary + why, error.fix or "")]
    return []


def _check_model_config(given: dict[str, Any]) -> list[Problem]:
    from transformers import CONFIG_MAPPING

    model_type = str(given.get("model_type"))
    if model_type not in CONFIG_MAPPING:
        close = did_you_mean(model_type, CONFIG_MAPPING)
        return [Problem("model.config.model_type", f"transformers knows no {model_type!r}{close}")]
    default = CONFIG_MAPPING[model_type]()
    values = default.to_dict()
    known = [*values, *getattr(default, "attribute_map", {}), *inspect.signature(type(default)).parameters]
    problems = []
    for key, value in given.items():
        if key not in known:  # transformers keeps any key it is given, so a misspelt one would silently do nothing
            problems.append(Problem(f"model.config.{key}", f"unknown key of {model_type}{did_you_mean(key, known)}"))
        elif type(value) is type(normal := values.get(key)) is int and value < 0 < normal and not key.endswith("_id"):
            problems.append(Problem(f"model.config.{key}", f"is {value}, must not be negative"))
    return problems


def _check_optimizer(config: OptimizerConfig) -> list[Problem]:
    cls = find_optimizer(config.name)
    if cls is None:
        names = [name for name, value in vars(torch.optim).items() if inspect.isclass(value)]
        return [
            Problem("optimizer.name", f"there is no optimizer class {config.name!r}{did_you_mean(config.name, names)}")
        ]
    closure = inspect.signature(cls.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        return [
            Problem("optimizer.name", f"{config.name} evaluates the loss itself, which a distributed step cannot serve")
        ]
    known = inspect.signature(cls).parameters
    arguments = optimizer_arguments(config, cls)
    takes_all = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in known.values())
    unknown = [] if takes_all else [key for key in arguments if key not in known]
    return [
        Problem(
            f"optimizer.{key}" if key in ("lr", "weight_decay") else f"optimizer.options.{key}",
            f"{config.name} has no such argument{did_you_mean(key, known)}",
        )
        for key in unknown
    ] or _try_optimizer(cls, arguments)


def _try_optimizer(cls: type[torch.optim.Optimizer], arguments: dict[str, Any]) -> list[Problem]:
    """What the class says to a step of a small parameter: values it refuses, gradients it cannot use."""
    parameter = torch.nn.Parameter(torch.zeros(2, 2))
    parameter.grad = torch.ones(2, 2)
    try:
        cls([parameter], **arguments).step()
    except Exception as error:  # noqa: BLE001 - a class refuses in any way
        return [Problem("optimizer", str(error))]
    return []


def _check_memory(config: TrainConfig) -> list[Problem]:
    """A batch whose bare token ids and labels are more than this machine holds; what a step needs is far more."""
    try:
        num_rows = config.batch_size // MeshShape.parse(config.layout).data_size
    except MeshError:
        return []  # told elsewhere
    num_bytes = num_rows * config.data.seq_length * 2 * torch.int64.itemsize
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if num_bytes <= memory:
        return []
    what = f"is {config.batch_size:,}: the token ids of a rank alone take {num_bytes / 2**30:,.0f} GiB"
    return [Problem("batch_size", what, f"this machine has {memory / 2**30:,.0f} GiB")]


def _check_compilation(backend: str | None) -> list[Problem]:
    if backend is None:
        return []
    known = torch.compiler.list_backends(exclude_tags=())
    if backend in known:
        return []
    return [Problem("compilation.backend", f"torch.compile has no backend {backend!r}{did_you_mean(backend, known)}")]
