"""The arguments of `Parallelizer.parallelize`: checked, and those that change nothing."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from shardwise.compat.warned import warn_once
from shardwise.errors import ConfigError
from shardwise.mesh import Mesh

__all__ = ["check_arguments"]


def check_arguments(
    model: nn.Module,
    mesh: Mesh,
    *,
    device: torch.device | str | None,
    kv_size_multiplier: int | None,
    input_names: Any,
    num_microbatches: int,
    zero1: bool,
    ranks_at_a_time: int,
) -> None:
    """Raises `ConfigError` where one is none of those documented; warns once of what changes nothing."""
    if device is not None and torch.device(device).type != mesh.device.type:
        raise ConfigError(f"device is {device}, but ranks compute on {mesh.device.type}", fix="leave device out")
    if type(num_microbatches) is not int or num_microbatches < 1:
        raise ConfigError(
            f"pipeline_parallel_num_microbatches is {num_microbatches!r}", fix="use an integer of at least 1"
        )
    if type(ranks_at_a_time) is not int:
        raise ConfigError(f"num_local_ranks_per_step is {ranks_at_a_time!r}", fix="use an integer; -1 means all ranks")
    if kv_size_multiplier is not None:
        _check_heads(model, kv_size_multiplier, mesh.size("tp"))
    if input_names is not None:
        _check_inputs(model, input_names)
    if zero1:
        warn_once("parallelize: pipeline_parallel_use_zero1_optimizer changes nothing: gradients are averaged once")


def _check_heads(model: Any, multiplier: int, tp: int) -> None:
    text = model.config.get_text_config()
    heads: Any = getattr(text, "num_key_value_heads", None) or getattr(text, "num_attention_heads", tp)
    smallest = tp // math.gcd(heads, tp)
    if type(multiplier) is not int or multiplier < 1 or heads * multiplier % tp:
        raise ConfigError(
            f"kv_size_multiplier is {multiplier!r}",
            why=f"{heads} key/value heads so many times do not divide among {tp} ranks",
            fix=f"use a multiple of {smallest}, or leave it out",
        )
    if multiplier != smallest:
        warn_once("parallelize: kv_size_multiplier changes nothing: ranks hold the key/value heads that they need")


def _check_inputs(model: nn.Module, names: Any) -> None:
    listed = [names] if isinstance(names, str) else names
    groups = listed.values() if isinstance(listed, Mapping) else [listed]
    known = inspect.signature(model.forward).parameters
    unknown = [each for group in groups for each in ([group] if isinstance(group, str) else group) if each not in known]
    if unknown and not isinstance(names, Mapping):
        raise ConfigError(f"pipeline_parallel_input_names has {unknown[0]!r}, which is no input of the model")
    warn_once("parallelize: pipeline_parallel_input_names changes nothing: stages take all inputs")
