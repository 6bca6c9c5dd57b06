"""Builds tiny models: models of a real architecture, small enough to prove a split on in seconds.

```python
config = shrink_config(AutoConfig.from_pretrained(path))
model = build_tiny_model(config, AutoModelForCausalLM, seed=0)
loss = model(**make_batch(model, seed=0)).loss
```
"""

import copy
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from shardwise.errors import UnsupportedError
from shardwise.runtime.modes import dropout_chances, is_in_backward
from shardwise.tiny.families import sub_configs
from shardwise.tiny.inputs import Padding, clone_batch, loss_or_surrogate, make_batch
from shardwise.tiny.shrink import shrink_config

_DROPOUT = 0.2

_NO_MASKS = ("attention", "rnn", "lstm", "gru", "aten::random_")
"""In the names of operations that drop nothing on the CPU where they are one operation; and of that which draws seeds
(see [Note: random numbers] in `shardwise.runtime.context`)."""


def draws_shared(func: Any, kwargs: Any) -> bool:
    """Returns whether an operation draws from torch's default generator."""
    return (
        (kwargs or {}).get("generator") is None
        and torch.Tag.nondeterministic_seeded in func.tags
        and not any(name in func.name() for name in _NO_MASKS)
        and not is_in_backward()
    )


def training_copy(model: nn.Module, batch: Mapping[str, Any], *, drops: bool = True) -> nn.Module | None:
    """Copies a model that has no dropout, and turns dropout on in the copy, in training mode.

    The copy keeps the model's own mode if it cannot train on `batch` with dropout, or if `drops` is False. Returns None
    if it cannot be trained at all.
    """
    for in_training in (True, False) if drops else (False,):
        made = copy.deepcopy(model)
        if in_training:
            set_dropout(made.train(), _DROPOUT)
        try:
            with fork_all_rng():
                loss_or_surrogate(copy.deepcopy(made)(**clone_batch(batch))).backward()
        except Exception:  # noqa: BLE001 - the model's own code fails in any way where it wants other inputs to train
            continue
        return made
    return None


@contextmanager
def fork_all_rng() -> Iterator[None]:
    """Context manager: seeds every random stream on the CPU equally, and restores their states afterwards."""
    states = numpy.random.get_state(), random.getstate()
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        numpy.random.seed(0)
        random.seed(0)
        try:
            yield
        finally:
            numpy.random.set_state(states[0])
            random.setstate(states[1])


def set_dropout(model: nn.Module, chance: float) -> None:
    """Sets every dropout probability and router noise in modules and configs; not layer drop."""
    configs = [getattr(module, "config", None) for module in model.modules()]
    for owner in {id(each): each for each in (*configs, *model.modules()) if each is not None}.values():
        for name in list(dropout_chances(owner)):
            if "layer" not in name.removesuffix("_layer"):
                setattr(owner, name, chance)


__all__ = ["Padding", "build_tiny_model", "make_batch", "perturb_parameters", "set_runnable_mode", "shrink_config"]

MOST_ELEMENTS = 2**28  # A tiny model with more elements was not shrunk: some size stands in a field that no rule knows
_MATRIX_NOISE = 0.05  # standard deviations; large enough that every term shows in loss and gradients
_VECTOR_NOISE = 0.05
_STATE_NOISE = 0.02


def build_tiny_model(config: PreTrainedConfig, cls: Any, *, seed: int) -> PreTrainedModel:
    """Returns a model of `config` on the CPU in float32 with random, nonconstant weights; equal for equal seeds.

    Args:
        cls: a model class, or an auto class such as `AutoModelForCausalLM`.
    """
    config = _config_for(cls, config)
    make = cls if isinstance(cls, type) and issubclass(cls, PreTrainedModel) else cls.from_config
    _check_size(make, config, cls)
    with torch.random.fork_rng(devices=[]), _uninitialized_as_nan():
        torch.default_generator.manual_seed(seed)  # not the devices': one rank plans, all drop alike
        try:
            model = make(config)
        except Exception as error:  # foreign constructors fail in any way; the cause is passed on
            raise UnsupportedError(
                f"no tiny model of {config.model_type!r}", at=cls.__name__, why=f"{type(error).__name__}: {error}"
            ) from error
    model = model.float()
    perturb_parameters(model, torch.Generator().manual_seed(seed))
    return model


def _config_for(cls: Any, config: PreTrainedConfig) -> PreTrainedConfig:
    """Returns the part of `config` for `cls`: text heads of multimodal models take the text configuration."""
    wanted = getattr(cls, "config_class", None)
    if wanted is None or isinstance(config, wanted):
        return config
    return next((part for part in sub_configs(config) if isinstance(part, wanted)), config)


def _check_size(make: Callable[[PreTrainedConfig], nn.Module], config: PreTrainedConfig, cls: Any) -> None:
    """Raises `UnsupportedError` if the model, built on the meta device, is not small."""
    try:
        with torch.device("meta"), torch.random.fork_rng(devices=[]):
            model = make(copy.deepcopy(config))
    except Exception:  # noqa: BLE001 - some constructors need values; what is wrong with others shows on the CPU
        return
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    if (total := sum(sizes.values())) > MOST_ELEMENTS:
        largest = max(sizes, key=lambda name: sizes[name])
        raise UnsupportedError(
            f"no tiny model of {config.model_type!r}",
            at=cls.__name__,
            why=f"it would hold {total:,} elements, as a size in its config is not known to be one; the largest is\n"
            f"{largest} {[*model.get_parameter(largest).shape]}",
        )


@contextmanager
def _uninitialized_as_nan() -> Iterator[None]:
    """Context manager: `torch.empty` returns NaN, which shows values that a model never initializes."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def set_runnable_mode(model: nn.Module, batch: Mapping[str, Any]) -> nn.Module:
    """Sets a tiny model to eval mode, or to training mode if its backward runs only there."""
    for mode in (model.eval, model.train):
        mode()
        trial = copy.deepcopy(model)
        try:
            loss_or_surrogate(trial(**clone_batch(batch))).backward()
        except (AssertionError, RuntimeError, ValueError, TypeError):
            continue
        return model
    return model.eval()


@torch.no_grad()
def perturb_parameters(model: nn.Module, generator: torch.Generator) -> None:
    """Adds noise to all trained parameters and to zero buffers that checkpoints hold (router corrections)."""
    for parameter in model.parameters():
        if parameter.requires_grad and parameter.is_floating_point():
            _add_noise(parameter, generator)
    saved = model.state_dict(keep_vars=True)
    for name, buffer in model.named_buffers():
        if name in saved and buffer.is_floating_point() and not buffer.count_nonzero():
            _add_noise(buffer, generator)


def _add_noise(value: Tensor, generator: torch.Generator) -> None:
    value.nan_to_num_(0.0, posinf=0.0, neginf=0.0)
    is_constant = value.numel() == 0 or bool((value == value.flatten()[0]).all())
    if value.dim() > 1:
        scale = _MATRIX_NOISE
    else:  # a vector that varies holds rates or decays of a state space, which bear less
        scale = _VECTOR_NOISE if is_constant else _STATE_NOISE
    value.add_(torch.randn(value.shape, generator=generator, dtype=value.dtype) * scale)
