"""The adapter that a run trains: the keys of `peft.LoraConfig`, or the path of an adapter."""

from __future__ import annotations

from typing import Any

from shardwise.errors import ConfigError, did_you_mean, one_line
from shardwise.lora.library import peft
from shardwise.train.run_config import Problem, TrainConfig

__all__ = ["adapter_of", "check_adapter", "describe_adapter", "export_mode"]

_OWN_KEYS = ("path", "export")
_EXPORTS = ("only", "with_base", "merged")


def adapter_of(config: TrainConfig) -> Any:
    """The `adapter` argument of `load`: a PEFT config, or the path of an adapter; None without an adapter.

    Raises:
        ConfigError: PEFT is not installed, or refuses the keys.
    """
    settings = config.adapter
    if settings is None:
        return None
    if "path" in settings:
        return settings["path"]
    values = {key: value for key, value in settings.items() if key not in _OWN_KEYS}
    try:
        return peft().LoraConfig(**{"task_type": "CAUSAL_LM", **values})
    except (TypeError, ValueError) as error:
        raise ConfigError("peft.LoraConfig refuses these keys", why=one_line(error)) from error


def export_mode(config: TrainConfig) -> str | None:
    """The `adapter=` argument of `export_pretrained` for a model with an adapter; None for a model without one."""
    return None if config.adapter is None else config.adapter.get("export", "only")


def describe_adapter(config: TrainConfig) -> dict[str, Any]:
    """The settings that must not change when a run resumes."""
    return {key: value for key, value in (config.adapter or {}).items() if key != "export"}


def check_adapter(config: TrainConfig) -> list[Problem]:
    """Problems of `adapter` that PEFT does not find when the model is built."""
    settings, mode, problems = config.adapter or {}, export_mode(config), []
    if mode is not None and mode not in _EXPORTS:
        what = f"is {mode!r}, must be one of {', '.join(_EXPORTS)}{did_you_mean(str(mode), _EXPORTS)}"
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
