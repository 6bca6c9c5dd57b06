"""Adapters into an unsplit model on the meta device, as PEFT puts them there."""

from __future__ import annotations

import copy
import os
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from shardwise.errors import ConfigError, LoadError, UnsupportedError
from shardwise.lora.library import peft

__all__ = ["inject", "inject_alike", "read_adapter_config"]

_PLAIN_INITS = (True, False, "gaussian", "orthogonal")


def read_adapter_config(adapter: Any) -> Any:
    """The config of an adapter that is to be trained: a copy of one, or what lies in an adapter's directory.

    Args:
        adapter: a PEFT config, a directory that PEFT or we wrote, or a hub id.

    Raises:
        ConfigError: it is neither.
        LoadError: there is no readable config.
    """
    library = peft()
    if isinstance(adapter, library.PeftConfig):
        return copy.deepcopy(adapter)
    if not isinstance(adapter, str | os.PathLike):
        raise ConfigError(
            f"an adapter cannot be a {type(adapter).__name__}",
            fix="pass a peft.LoraConfig, or the directory of an adapter",
        )
    place = os.fspath(adapter)
    if Path(place).is_dir() and not (Path(place) / "adapter_config.json").is_file():
        raise LoadError(f"no adapter in {place!r}", why="the directory has no adapter_config.json")
    try:
        config = library.PeftConfig.from_pretrained(place)
    except Exception as error:  # a missing repository, a damaged file, values that its class refuses
        raise LoadError(f"no adapter config at {place!r}", why=" ".join(str(error).split())[:300]) from error
    config.inference_mode = False
    return config


def inject(model: PreTrainedModel, adapter: Any) -> nn.Module:
    """The PEFT model around an unsplit meta model, with the adapter's modules in it.

    Args:
        adapter: as in `read_adapter_config`.

    Raises:
        ConfigError: the config fits no module of the model, or is wrong.
        UnsupportedError: the adapter's first values need the full weights.
    """
    config = read_adapter_config(adapter)
    _check_init(config, from_file=isinstance(adapter, str | os.PathLike))
    try:
        with torch.device("meta"):
            wrapped: nn.Module = peft().get_peft_model(model, config)
    except (ValueError, TypeError, RuntimeError, AttributeError) as error:
        raise ConfigError(
            f"the adapter does not fit {type(model).__name__}",
            why=" ".join(str(error).split())[:400],
            fix="name modules of this model in target_modules",
        ) from error
    return wrapped.eval()


def inject_alike(model: nn.Module, other: nn.Module) -> nn.Module:
    """Puts adapters into `other`, a smaller model of the same architecture, as they are in `model`; of any values."""
    library = peft()
    for name, given in getattr(model, "peft_config", {}).items():
        config = copy.deepcopy(given)
        config.init_lora_weights, config.inference_mode = False, False
        if getattr(config, "layers_to_transform", None) is not None:
            config.layers_to_transform = config.layers_pattern = None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            other = library.inject_adapter_in_model(config, other, adapter_name=name)
    return other.eval()


def _check_init(config: Any, *, from_file: bool) -> None:
    init = getattr(config, "init_lora_weights", True)
    needs = "use_dora" if getattr(config, "use_dora", False) else ""
    if not from_file and init not in _PLAIN_INITS:
        needs = f"init_lora_weights={init!r}"
    if needs:
        raise UnsupportedError(
            f"an adapter with {needs}, loaded into a split model",
            why="it is computed from full weights, of which each rank reads its part",
            fix="give shardwise.parallelize a model that has it, peft.get_peft_model(model, config), on every rank",
        )
