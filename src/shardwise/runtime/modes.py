"""Training and eval mode of a model's modules."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

__all__ = ["in_eval_mode"]


@contextmanager
def in_eval_mode(model: nn.Module) -> Iterator[None]:
    """Runs a block in eval mode; afterwards every module is in the mode it was in, frozen ones in eval mode too."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True
