"""Random numbers of tiny models: seeding all streams, setting dropout, and detecting draws."""

import copy
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy
import torch
from torch import nn

from shardwise.runtime.modes import dropout_chances, is_in_backward
from shardwise.tiny.inputs import clone_batch, loss_or_surrogate

_DROPOUT = 0.2

_NO_MASKS = ("attention", "rnn", "lstm", "gru", "aten::random_")
"""In the names of operations that drop nothing on the CPU where they are one operation; and of that which draws seeds
(see [Note: random numbers] in `shardwise.runtime.context`)."""


def draws_shared(func: Any, kwargs: Any) -> bool:
    """Whether an operation draws from torch's default generator."""
    return (
        (kwargs or {}).get("generator") is None
        and torch.Tag.nondeterministic_seeded in func.tags
        and not any(name in func.name() for name in _NO_MASKS)
        and not is_in_backward()
    )


def training_copy(model: nn.Module, batch: Mapping[str, Any], *, drops: bool = True) -> nn.Module | None:
    """A copy of a model without dropout, in training mode with dropout.

    In the model's own mode if it cannot be trained on `batch` with dropout or `drops` is False; None if it cannot be
    trained at all.
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
