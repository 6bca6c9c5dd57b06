"""Checks what a configuration names before the run starts: files, packages, and the directories that it writes to."""

import importlib.util
import inspect
import json
import os
import pkgutil
import shutil
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from shardwise.api.checkpoints import ADAPTER_MODES
from shardwise.cli.config_file import Problems
from shardwise.cli.data import find_dataset
from shardwise.cli.tasks import adapter_options, find_task
from shardwise.data.config import OF_TEXT, DataConfig, Problem, held_out, patterns_of, sources_of
from shardwise.data.corpus import find_files
from shardwise.data.tables import import_package
from shardwise.data.tasks import TASKS
from shardwise.errors import ConfigError, LoadError, ShardwiseError, as_error, did_you_mean
from shardwise.lora.inject import peft
from shardwise.plan.options import Compile
from shardwise.train.run_config import CompilationConfig, TrainConfig
from shardwise.weights.staging import is_url
from shardwise.weights.write import check_target

_OWN_KEYS = ("path", "export")


def check_inputs(config: TrainConfig) -> list[Problem]:
    """Returns the problems of the files and packages that `config` names. Reads nothing large."""
    model, data = config.model, config.data
    problems = Problems()
    is_text = True
    with suppress(ShardwiseError):  # `check_model` says what is wrong with the model
        is_text = TASKS[find_task(config)].encode is None
        other = {"columns": "text_key"} if is_text else dict.fromkeys(OF_TEXT, "columns")
        idle = [name for name in other if getattr(data, name) != getattr(DataConfig(), name)]
        problems += [Problem(f"data.{each}", "has no effect on this task", f"see data.{other[each]}") for each in idle]
    sources = [("data", source) for source in sources_of(data)]
    for key, read in (*sources, ("evaluation", held_out(data, config.evaluation))):
        if read.path is not None and (is_text or not Path(read.path).is_dir()):
            with problems.of(f"{key}.path"):
                find_files(Path(read.path), patterns_of(read))
        if read.dataset is not None:
            with problems.of(f"{key}.dataset"):
                find_dataset(read)
    if data.state is not None:
        with problems.of("data.state"):
            read_data_state(data.state)
    for number, name in enumerate(config.log.trackers):
        with problems.of(f"log.to[{number}]" if name in config.log.to else "log.tensorboard"):
            find_tracker(name)
    for number, place in enumerate(config.log.callbacks):
        with problems.of(f"log.callbacks[{number}]"):
            find_callback(place)
    if isinstance(model.config, str) and not Path(model.config).is_file():
        problems.append(Problem("model.config", f"there is no file {model.config}", "name a config.json"))
    if isinstance(model.config, dict):
        problems += _check_model_config(model.config)
    return problems


def check_outputs(config: TrainConfig) -> list[Problem]:
    """Returns the problems of the directories that the run writes to. Creates nothing."""
    problems = Problems()
    saved = config.checkpoint.dir
    for key, directory in (
        ("log.dir", config.log.dir),
        ("data.cache_dir", config.data.cache_dir),
        ("checkpoint.dir", saved),
        ("export", config.export),
    ):
        if directory is not None:
            with problems.of(key):
                check_place(directory)
    if saved is not None and (other := find_other_checkpoints(Path(saved))) is not None:
        weights = (
            f"; a run starts from its weights with model.path={other}" if (other / "config.json").is_file() else ""
        )
        fix = f"name another directory{weights}"
        problems.append(Problem("checkpoint.dir", f"{saved} holds a checkpoint of another system, {other.name}", fix))
    if config.export is None or problems:
        return problems
    if export_mode(config) != "only":
        with problems.of("export"):
            check_target(config.export)
    resumes = saved is not None and config.checkpoint.resume == "auto" and any(Path(saved).glob("*/manifest.json"))
    if not problems and not resumes and Path(config.export).is_dir() and any(Path(config.export).iterdir()):
        what = f"the directory {config.export} is not empty"
        problems.append(Problem("export", what, "remove it or name another; nothing is overwritten"))
    return problems


_OTHERS = ("trainer_state.json", "*.ckpt", ".metadata", "*.pt", "*.pth", "*model*.safetensors*", "*model*.bin*")
"""Files of the checkpoints of transformers' Trainer, Lightning, torch, DeepSpeed, Megatron and PEFT."""


def find_other_checkpoints(directory: Path) -> Path | None:
    """Returns the newest checkpoint of another system in a directory, or the directory itself if it is one; or None."""
    if not directory.is_dir() or any(directory.glob("*/manifest.json")):
        return None
    found = {file.parent for name in _OTHERS for depth in ("", "*/", "*/*/") for file in directory.glob(depth + name)}
    return max(found, key=lambda place: place.stat().st_mtime) if found else None


def check_place(directory: str, *, num_bytes: int = 0) -> None:
    """Raises `LoadError` if `directory` cannot be created or written, or has less than `num_bytes` of free space."""
    path = Path(directory)
    existing = next(parent for parent in (path, *path.parents) if parent.exists())
    if is_url(directory):
        why = "it is a URL"
    elif not existing.is_dir():
        why = f"{existing} is a file"
    elif not os.access(existing, os.W_OK):
        why = f"no permission to write in {existing}"
    elif (free := shutil.disk_usage(existing).free) < num_bytes:
        why = f"{num_bytes / 2**30:,.2f} GiB are needed, and {free / 2**30:,.2f} GiB are free"
    else:
        return
    raise LoadError(f"cannot write to {directory!r}", why=why, fix="name another directory")


def compilation_of(chosen: CompilationConfig, device: torch.device) -> Compile | None:
    """Returns the options of torch.compile on `device`; None without compilation."""
    automatic = "inductor" if device.type == "cuda" else None
    backend = automatic if chosen.backend == "auto" else chosen.backend
    if backend is None:
        return None
    return Compile(backend=backend, dynamic=chosen.dynamic, mode=chosen.mode, options=chosen.options or None)


def read_data_state(place: str) -> dict[str, int]:
    """Reads the data_state.json of an earlier run."""
    with as_error(LoadError, f"cannot read {place}", OSError, ValueError):
        state = json.loads(Path(place).read_text(encoding="utf-8"))
    if not isinstance(state, dict) or "num_batches_read" not in state:
        raise LoadError(f"{place} is not a data state", fix="name the data_state.json of an earlier run")
    return state


def find_optimizer(name: str) -> type[torch.optim.Optimizer]:
    """Returns the class `name` of torch.optim, or at that dotted path. Raises `ConfigError` if there is none."""
    try:
        value = pkgutil.resolve_name(name if "." in name else f"torch.optim.{name}")
    except (ImportError, AttributeError, ValueError):
        value = None
    if not (inspect.isclass(value) and issubclass(value, torch.optim.Optimizer)):
        names = [name for name, value in vars(torch.optim).items() if inspect.isclass(value)]
        raise ConfigError(f"there is no optimizer class {name!r}{did_you_mean(name, names)}")
    return value


def find_tracker(name: str) -> Any:
    """Returns accelerate's class of a tracker. Raises `ConfigError` if there is none, or its package is missing.

    TensorBoard needs no accelerate: torch writes its events. None stands for it.
    """
    if name == "tensorboard":
        if importlib.util.find_spec(name) is None:
            fix = "pip install tensorboard, or leave it out (train.jsonl has the same numbers)"
            raise ConfigError("the package tensorboard is not installed", fix=fix)
        return None
    fix = "pip install accelerate (train.jsonl has the same numbers)"
    tracking = import_package("accelerate.tracking", repr(name), fix=fix)
    known: dict[str, Any] = {str(key): value for key, value in tracking.LOGGER_TYPE_TO_CLASS.items()}
    if name not in known:
        raise ConfigError(
            f"accelerate has no tracker {name!r}{did_you_mean(name, known)}", why=f"it has {', '.join(sorted(known))}"
        )
    if name not in map(str, tracking.get_available_trackers()):
        raise ConfigError(f"the package of the tracker {name!r} is not installed", fix=f"pip install {name}")
    return known[name]


def find_callback(place: str) -> Any:
    """Returns the class at `module:Class`, also in the current directory. Raises `ConfigError` if none has `report`."""
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))
    fix = "write module:Class, such as my_callbacks:Plotter"
    with as_error(ConfigError, f"there is no class {place!r}", ImportError, AttributeError, ValueError, fix=fix):
        found = pkgutil.resolve_name(place)
    if not callable(getattr(found, "report", None)):
        raise ConfigError(f"{place} has no method report(record)")
    return found


def _check_model_config(settings: dict[str, Any]) -> list[Problem]:
    """Unknown keys of a model config: transformers accepts any key, so a misspelt one would have no effect."""
    from transformers import CONFIG_MAPPING

    model_type = str(settings.get("model_type"))
    if model_type not in CONFIG_MAPPING:
        close = did_you_mean(model_type, CONFIG_MAPPING)
        return [Problem("model.config.model_type", f"transformers has no model type {model_type!r}{close}")]
    default = CONFIG_MAPPING[model_type]()
    known = [*default.to_dict(), *getattr(default, "attribute_map", {}), *inspect.signature(type(default)).parameters]
    return [
        Problem(f"model.config.{key}", f"unknown key of {model_type}{did_you_mean(key, known)}")
        for key in settings
        if key not in known
    ]


def adapter_of(config: TrainConfig) -> Any:
    """Returns the `adapter` argument of `load`: a PEFT config, or the path of an adapter; None without an adapter."""
    settings = config.adapter
    if settings is None:
        return None
    if "path" in settings:
        return settings["path"]
    values = {key: value for key, value in settings.items() if key not in _OWN_KEYS}
    with as_error(ConfigError, "peft.LoraConfig refuses these keys", TypeError, ValueError):
        options = adapter_options(config)
        if "target_modules" in options:
            del values["target_modules"]
        for key, ours in {"peft_type": "LORA", "task_type": options.get("task_type")}.items():
            if (given := values.pop(key, ours)) != ours:
                raise ConfigError(f"adapter.{key} is {given}; a run trains {ours}", fix="leave it out")
        return peft().LoraConfig(**{**options, **values})


def export_mode(config: TrainConfig) -> str | None:
    """Returns the `adapter=` argument of `export_pretrained` for a model with an adapter; None without an adapter."""
    return None if config.adapter is None else config.adapter.get("export", "only")


def check_adapter(config: TrainConfig) -> list[Problem]:
    """Returns the problems of `adapter` that PEFT does not find when the model is built."""
    settings, mode, problems = config.adapter or {}, export_mode(config), []
    if mode is not None and mode not in ADAPTER_MODES:
        what = f"is {mode!r}, must be one of {', '.join(ADAPTER_MODES)}{did_you_mean(str(mode), ADAPTER_MODES)}"
        problems.append(Problem("adapter.export", what))
    elif "export" in settings and config.export is None:
        problems.append(Problem("adapter.export", f"is {mode}, but nothing is exported", "set export to a directory"))
    if "path" in settings:
        problems += [
            Problem(f"adapter.{key}", "is set by the adapter at adapter.path", "remove it")
            for key in settings
            if key not in _OWN_KEYS
        ]
    return problems
