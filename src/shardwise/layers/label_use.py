"""How a causal language model uses its labels: where its loss looks for them, and whether they are in sight."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from shardwise.errors import UnsupportedError

__all__ = ["LabelUse", "check_label_use", "label_use_of", "note_label_use"]

_ATTRIBUTE = "_shardwise_label_use"


@dataclass(frozen=True, kw_only=True)
class LabelUse:
    """What a tiny model of the architecture shows.

    Attributes:
        shifts: whether the loss compares each position with the label after it.
        sees_target: whether it does, and what is computed at a position depends on the token after it.
    """

    shifts: bool
    sees_target: bool


def note_label_use(model: nn.Module, use: LabelUse) -> None:
    """Lets `model`, and copies of it, carry what is known."""
    model.__dict__[_ATTRIBUTE] = use


def label_use_of(model: nn.Module) -> LabelUse | None:
    """What is known of the model, or of one that it wraps."""
    return next((module.__dict__[_ATTRIBUTE] for module in model.modules() if _ATTRIBUTE in module.__dict__), None)


def check_label_use(model: nn.Module) -> None:
    """Raises `UnsupportedError` where training the model would teach it nothing."""
    use = label_use_of(model)
    if use is not None and use.sees_target:
        config = getattr(model, "config", None)
        decoder = "is_decoder=True in its config, or " if hasattr(config, "is_decoder") else ""
        raise UnsupportedError(
            f"training {type(model).__name__} to predict tokens that it sees",
            why="its loss compares each position with the token after it, and its attention looks at that token",
            fix=f"use {decoder}a class with a loss of its own, such as auto_class=AutoModelForMaskedLM",
        )
