"""The adapter that a run trains: its keys are those of `peft.LoraConfig`, each checked before anything starts."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterator
from typing import Any

from pydantic import PydanticUserError, TypeAdapter, ValidationError

from shardwise.cli.config_file import Problems
from shardwise.errors import did_you_mean, one_line
from shardwise.lora.inject import read_adapter_config
from shardwise.lora.library import peft
from shardwise.train.run_config import Problem, TrainConfig
from shardwise.weights.kinds import check_no_checkpoint

__all__ = ["adapter_of", "check_adapter", "describe_adapter", "export_mode"]

_OWN_KEYS = ("path", "export")
_EXPORTS = ("only", "with_base", "merged")


def adapter_of(config: TrainConfig) -> Any:
    """What `load` takes as `adapter`: a config of PEFT's, or the place of an adapter; None where none is trained."""
    settings = config.adapter
    if settings is None:
        return None
    if "path" in settings:
        return settings["path"]
    return peft().LoraConfig(**{"task_type": "CAUSAL_LM", **_lora_values(settings)})


def export_mode(config: TrainConfig) -> str | None:
    """What is exported of a model with an adapter; None where none is trained."""
    return None if config.adapter is None else config.adapter.get("export", "only")


def describe_adapter(config: TrainConfig) -> dict[str, Any]:
    """What must be the same when a run goes on."""
    return {key: value for key, value in (config.adapter or {}).items() if key != "export"}


def check_adapter(config: TrainConfig) -> list[Problem]:
    """Everything wrong with `adapter` that needs no model."""
    settings, problems = config.adapter, Problems()
    if settings is None:
        return problems
    with problems.of("adapter"):
        peft()
    if problems:
        return problems
    problems += _check_own(config, settings)
    lora = _lora_values(settings)
    if "path" in settings:
        if isinstance(settings["path"], str):
            with problems.of("adapter.path"):
                check_no_checkpoint(settings["path"], what="an adapter")
                read_adapter_config(settings["path"])
        problems += [
            Problem(f"adapter.{key}", "is decided by the adapter at adapter.path", "leave it out") for key in lora
        ]
        return problems
    keys = {item.name for item in dataclasses.fields(peft().LoraConfig) if item.init}
    problems += [
        Problem(f"adapter.{key}", f"peft.LoraConfig has no such key{did_you_mean(key, [*keys, *_OWN_KEYS])}")
        for key in lora
        if key not in keys
    ]
    types = typing.get_type_hints(peft().LoraConfig)
    problems += [problem for key in keys & lora.keys() for problem in _check_type(key, lora[key], types[key])]
    if lora.get("inference_mode"):
        problems.append(Problem("adapter.inference_mode", "is true, which would train nothing", "leave it out"))
    if not problems:
        try:
            adapter_of(config)
        except (ValueError, TypeError) as error:
            problems.append(Problem("adapter", one_line(error)))
    return problems


def _check_own(config: TrainConfig, settings: dict[str, Any]) -> list[Problem]:
    problems = []
    if "path" in settings and not (isinstance(settings["path"], str) and settings["path"]):
        what = f"is {settings['path']!r}, must be a directory or hub id"
        problems.append(Problem("adapter.path", what))
    if "export" in settings:
        mode = settings["export"]
        if mode not in _EXPORTS:
            what = f"is {mode!r}, must be {', '.join(_EXPORTS[:-1])} or {_EXPORTS[-1]}"
            problems.append(Problem("adapter.export", what + did_you_mean(str(mode), _EXPORTS)))
        elif config.export is None:
            problems.append(
                Problem("adapter.export", f"is {mode}, and nothing is exported", "name a directory with export")
            )
    return problems


def _lora_values(settings: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in settings.items() if key not in _OWN_KEYS}


def _check_type(key: str, value: Any, wanted: Any) -> Iterator[Problem]:
    """The problem of a value that is not of the type of peft's key, as pydantic says it."""
    try:
        TypeAdapter(wanted).validate_python(value, strict=True)
    except ValidationError as error:
        messages = dict.fromkeys(item["msg"] for item in error.errors())
        yield Problem(f"adapter.{key}", f"{'; or: '.join(messages)}, not {value!r}")
    except PydanticUserError:  # a type that pydantic does not know
        return
