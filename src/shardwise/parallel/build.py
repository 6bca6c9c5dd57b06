"""Building a transformers model on the meta device, from a directory, a hub id or a config."""

from __future__ import annotations

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
from shardwise.weights.staging import disk_errors

__all__ = [
    "as_dtype",
    "build_meta_model",
    "model_class_of",
    "named_class",
    "num_positions",
    "read_class_config",
    "read_config",
    "read_generation_config",
]


def as_dtype(dtype: torch.dtype | str | None) -> torch.dtype | None:
    """The dtype that a user names; None for "auto", or for none.

    Raises:
        ConfigError: torch has no such dtype.
    """
    if dtype is None or dtype == "auto" or isinstance(dtype, torch.dtype):
        return None if isinstance(dtype, str) else dtype
    found = getattr(torch, dtype, None) if isinstance(dtype, str) else None
    if not isinstance(found, torch.dtype):
        raise ConfigError(f"unknown dtype {dtype!r}", fix='use a torch dtype or its name, such as "bfloat16"')
    return found


def read_config(
    source: str | os.PathLike[str] | Mapping[str, Any], options: Mapping[str, Any]
) -> tuple[PreTrainedConfig, dict[str, Any]]:
    """The config at `source`, changed by those of `options` that are config values, and the options left.

    Args:
        source: a directory with a config.json, a .json file, a hub id, or the values themselves.

    Raises:
        LoadError: there is no config, or transformers cannot read it.
    """
    where = _config_place(options)
    rest = {name: value for name, value in options.items() if name not in HUB_OPTIONS}
    what = f"transformers cannot read the model config {'values' if isinstance(source, Mapping) else repr(source)}"
    with _reading(what, fix="correct the values, or take the config of another checkpoint of the kind"):
        if isinstance(source, Mapping):
            return AutoConfig.for_model(**source), rest
        _check_file(source, where)
        config, unused = AutoConfig.from_pretrained(os.fspath(source), return_unused_kwargs=True, **where, **rest)
    return config, unused


def read_class_config(
    config_class: Any,
    source: str | os.PathLike[str],
    config: PreTrainedConfig | str | os.PathLike[str] | None,
    where: Mapping[str, Any],
    options: Mapping[str, Any],
) -> tuple[PreTrainedConfig, dict[str, Any]]:
    """As `read_config`, as `from_pretrained` of a model class does it: by that class's own config class, which may be
    that of a part of what is at `source`.

    Args:
        config: instead of the one at `source`: a config, or the place of one.
        where: those of `HUB_OPTIONS` that are given.

    Raises:
        LoadError: there is no config, or transformers cannot read it.
    """
    if isinstance(config, PreTrainedConfig):
        return config, dict(options)
    where = _config_place(where)
    place = source if config is None else config
    _check_file(place, where)
    what = f"{config_class.__name__} cannot read the model config {os.fspath(place)!r}"
    with _reading(what, fix="use the model class of this checkpoint"):
        found, rest = config_class.from_pretrained(os.fspath(place), return_unused_kwargs=True, **where, **options)
    return found, rest


def _config_place(options: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the options that say where a config is: weights have variants, configs none."""
    return {name: options[name] for name in HUB_OPTIONS if name in options and name != "variant"}


@contextmanager
def _reading(what: str, *, fix: str) -> Iterator[None]:
    """Says what could not be read: a config's class refuses its values with errors of many kinds."""
    try:
        yield
    except LoadError:
        raise
    except Exception as error:
        raise LoadError(what, why=one_line(error), fix=fix) from error


def _check_file(source: str | os.PathLike[str], where: dict[str, Any]) -> None:
    """Raises `LoadError` where `source` names no hub id, and there is no config at it."""
    path = Path(source)
    if path.suffix != ".json":
        directory = locate_source(source, **{name: value for name, value in where.items() if name != "subfolder"})
        if directory is None:
            return
        path = directory / (where.get("subfolder") or "") / "config.json"
    with disk_errors(f"cannot read {path}"):
        if path.exists():
            return
    check_no_checkpoint(source)
    why = "there is no such file" if path == Path(source) else "the directory has no config.json"
    fix = "point at a directory that save_pretrained wrote"
    raise LoadError(f"no model config at {os.fspath(source)!r}", why=why, fix=fix)


def named_class(config: PreTrainedConfig) -> Any:
    """The model class that a config names in `architectures`: the first one that transformers has for such a config.
    None where it names none.
    """
    for name in config.architectures or ():
        model_class: Any = getattr(transformers, name, None)
        is_model = isinstance(model_class, type) and issubclass(model_class, PreTrainedModel)
        if is_model and isinstance(config, model_class.config_class or object):
            return model_class
    return None


def model_class_of(config: PreTrainedConfig) -> Any:
    """The class of a model where the user names none: the one that its config names in `architectures`, or else, and
    where that is the causal language model of its type, `AutoModelForCausalLM`.

    Raises:
        UnsupportedError: the config names no class, and transformers has no causal language model of its type.
    """
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
    """An instance of `auto_class` for `config` whose parameters take no memory.

    Args:
        auto_class: a transformers auto class or model class; `model_class_of` the config where None.
        options: keyword arguments of the model class (`attn_implementation`, …).

    Raises:
        UnsupportedError: the class does not serve this config, or refuses the options.
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
    except Exception as error:  # foreign constructors fail in any way; the cause is passed on
        fixes = {
            ImportError: "install what is missing, or pass another attn_implementation, such as sdpa",
            RuntimeError: "correct the sizes in the config",
        }
        fits = "pass the auto_class that fits the checkpoint, such as transformers.AutoModel, and options it takes"
        raise UnsupportedError(
            f"{getattr(chosen, '__name__', chosen)} cannot build a model of type {config.model_type!r}",
            why=f"{type(error).__name__}: {str(error).strip()}".splitlines()[0],
            fix=next((fix for kind, fix in fixes.items() if isinstance(error, kind)), fits),
        ) from error
    _empty(model)
    model.eval()
    return model


def _empty(model: nn.Module) -> None:
    """Puts on the meta device what `torch.FloatTensor` and its like made elsewhere: memory that holds nothing yet."""
    moved: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, value in module._parameters.items():
            if value is not None and not value.is_meta:
                empty = nn.Parameter(value.detach().to("meta"), requires_grad=value.requires_grad)
                module._parameters[name] = moved.setdefault(value, empty)


def num_positions(config: PreTrainedConfig) -> int | None:
    """How many positions the model has, None where it sets no limit."""
    found = getattr(config.get_text_config(), "max_position_embeddings", None)
    return found if isinstance(found, int) and found > 0 else None


def read_generation_config(model: PreTrainedModel, source: str | os.PathLike[str], options: dict[str, Any]) -> None:
    """Gives the model the generation config beside its weights, if one does.

    Raises:
        LoadError: what is there is no generation config.
    """
    if not model.can_generate():
        return
    what = f"transformers cannot read the generation_config.json of {os.fspath(source)!r}"
    with _reading(what, fix="remove it, or copy or download it again"):
        try:
            model.generation_config = GenerationConfig.from_pretrained(os.fspath(source), **_config_place(options))
        except OSError:  # most checkpoints have none: the model's defaults stand
            if os.path.lexists(Path(source) / (options.get("subfolder") or "") / "generation_config.json"):
                raise
