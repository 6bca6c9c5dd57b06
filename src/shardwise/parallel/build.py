"""Builds a transformers model on the meta device from a directory, a hub id or a config."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import AutoConfig, GenerationConfig, PreTrainedConfig, PreTrainedModel

from shardwise.errors import ConfigError, LoadError, UnsupportedError, one_line
from shardwise.weights.kinds import check_no_checkpoint
from shardwise.weights.locate import HUB_OPTIONS, locate_source


def as_dtype(dtype: torch.dtype | str | None) -> torch.dtype | None:
    """The torch dtype for a user's name; None for "auto" or None."""
    if dtype is None or dtype == "auto" or isinstance(dtype, torch.dtype):
        return None if isinstance(dtype, str) else dtype
    found = getattr(torch, dtype, None) if isinstance(dtype, str) else None
    if not isinstance(found, torch.dtype):
        raise ConfigError(f"unknown dtype {dtype!r}", fix='use a torch dtype or its name, such as "bfloat16"')
    return found


def read_config(
    source: str | os.PathLike[str] | Mapping[str, Any], options: Mapping[str, Any], config_class: Any = AutoConfig
) -> tuple[PreTrainedConfig, dict[str, Any]]:
    """Reads the config at `source` and applies the config values among `options`. Returns the config and the other
    options.

    Args:
        source: a directory with a config.json, a .json file, a hub id, or the values themselves.
        config_class: class that reads the config. A class for a part of the model reads the config of that part.
    """
    where = _config_place(options)
    rest = {name: value for name, value in options.items() if name not in HUB_OPTIONS}
    if isinstance(source, Mapping):
        with _reading("config values"):
            return AutoConfig.for_model(**source), rest
    if not os.path.isfile(source):  # noqa: PTH113 - pathlib raises: a name too long
        locate_source(source, **{name: value for name, value in where.items() if name != "subfolder"})
        check_no_checkpoint(source)
    with _reading(f"config {os.fspath(source)!r}"):
        found: Any = config_class.from_pretrained(os.fspath(source), return_unused_kwargs=True, **where, **rest)
        return found


def _config_place(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options that say where a config is. `variant` is none of them: configs have no variants."""
    return {name: options[name] for name in HUB_OPTIONS if name in options and name != "variant"}


@contextmanager
def _reading(what: str) -> Iterator[None]:
    """Context manager: converts errors of config classes to a `LoadError` that says what could not be read."""
    try:
        yield
    except Exception as error:
        raise LoadError(
            f"transformers cannot read the model {what}",
            why=one_line(error),
            fix="correct it, or point at a directory that save_pretrained wrote",
        ) from error


def named_class(config: PreTrainedConfig) -> Any:
    """The first class in the config's `architectures` that transformers has for this config; None if there is none."""
    for name in config.architectures or ():
        model_class: Any = getattr(transformers, name, None)
        is_model = isinstance(model_class, type) and issubclass(model_class, PreTrainedModel)
        if is_model and isinstance(config, model_class.config_class or object):
            return model_class
    return None


def model_class_of(config: PreTrainedConfig) -> Any:
    """Default class of a model: the class in the config's `architectures`, else `AutoModelForCausalLM`."""
    causal, named = transformers.AutoModelForCausalLM, named_class(config)
    if type(config) in causal._model_mapping:
        return causal if named in (None, causal._model_mapping[type(config)]) else named
    if named is not None:
        return named
    if causal.__name__ in (getattr(config, "auto_map", None) or {}):
        return causal
    raise UnsupportedError(
        f"no class is known for a model of type {config.model_type!r}",
        why="transformers has no causal language model of this type, and `architectures` in the config names no class",
        fix="pass auto_class, such as transformers.AutoModel, or name the class in the config",
    )


def build_meta_model(
    config: PreTrainedConfig, auto_class: Any, *, dtype: torch.dtype | None, options: dict[str, Any]
) -> PreTrainedModel:
    """Builds an instance of `auto_class` for `config` on the meta device.

    Args:
        auto_class: a transformers auto class or model class; None: `model_class_of` the config.
        options: keyword arguments of the model class (`attn_implementation`, …).
    """
    chosen = model_class_of(config) if auto_class is None else auto_class
    build = getattr(chosen, "from_config", None) or getattr(chosen, "_from_config", None)
    if build is None:
        raise UnsupportedError(
            f"auto_class {chosen!r} is no transformers class", fix="pass an auto class or a model class of transformers"
        )
    if getattr(config, "quantization_config", None) is not None:
        raise UnsupportedError(
            f"a quantized model ({type(config).__name__} with quantization_config)",
            why="quantized weights cannot be split yet",
            fix="load the checkpoint it was quantized from",
        )
    try:
        with torch.device("meta"):
            model = build(config, **({} if dtype is None else {"dtype": dtype}), **options)
    except Exception as error:  # foreign constructors fail in any way
        raise UnsupportedError(
            f"{getattr(chosen, '__name__', chosen)} cannot build a model of type {config.model_type!r}",
            why=f"{type(error).__name__}: {one_line(error, limit=300)}",
            fix="pass the auto_class that fits the checkpoint, such as AutoModel, and options that it takes",
        ) from error
    _empty(model)
    model.eval()
    return model


def _empty(model: nn.Module) -> None:
    """Moves tensors to the meta device that `torch.FloatTensor` and similar constructors made on the CPU."""
    moved: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, value in module._parameters.items():
            if value is not None and not value.is_meta:
                empty = nn.Parameter(value.detach().to("meta"), requires_grad=value.requires_grad)
                module._parameters[name] = moved.setdefault(value, empty)


def num_positions(config: PreTrainedConfig) -> int | None:
    """Maximum number of positions of the model; None if it has no limit."""
    found = getattr(config.get_text_config(), "max_position_embeddings", None)
    return found if isinstance(found, int) and found > 0 else None


def read_generation_config(model: PreTrainedModel, source: str | os.PathLike[str], options: dict[str, Any]) -> None:
    """Reads the generation config beside the weights into the model, if there is one."""
    if not model.can_generate():
        return
    try:
        model.generation_config = GenerationConfig.from_pretrained(os.fspath(source), **_config_place(options))
    except Exception as error:  # an OSError where there is none, as in most checkpoints: the model's defaults stand
        path = Path(source) / (options.get("subfolder") or "") / "generation_config.json"
        if not isinstance(error, OSError) or os.path.lexists(path):
            raise LoadError(
                f"cannot read the generation_config.json of {os.fspath(source)!r}", why=str(error)
            ) from error
