"""How a causal language model uses its labels: where its loss looks for them, and whether the logits depend on them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from shardwise.errors import UnsupportedError
from shardwise.runtime.adapters import find_model
from shardwise.runtime.arguments import Arguments, edit_arguments

__all__ = ["LabelUse", "check_label_use", "claims_to_shift", "label_use_of", "note_label_use", "shifts_labels"]

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
    """Lets `model`, and copies of it, carry what is known, and refuse to be trained where it sees its targets."""
    model.__dict__[_ATTRIBUTE] = use

    def refuse_training(module: nn.Module, arguments: Arguments) -> None:
        if arguments.get("labels") is not None and module.training and torch.is_grad_enabled():
            check_label_use(module)

    if use.sees_target:
        edit_arguments(model, refuse_training)


def label_use_of(model: nn.Module) -> LabelUse | None:
    """What is known of the model, or of one that it wraps."""
    return next((module.__dict__[_ATTRIBUTE] for module in model.modules() if _ATTRIBUTE in module.__dict__), None)


def check_label_use(model: nn.Module) -> None:
    """Raises `UnsupportedError` where training the model would teach it nothing."""
    use = label_use_of(model)
    if use is not None and use.sees_target:
        decoder = "is_decoder=True in its config, or " if hasattr(getattr(model, "config", None), "is_decoder") else ""
        raise UnsupportedError(
            f"training {type(model).__name__} to predict tokens that it sees",
            why="its loss compares each position with the token after it, and its attention looks at that token",
            fix=f"use {decoder}a class with a loss of its own, such as auto_class=AutoModelForMaskedLM",
        )


def claims_to_shift(model: nn.Module) -> bool:
    """Whether the model's class says that its loss compares each position with the label after it."""
    is_causal = type(model).__name__ in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
    is_encoder_decoder = getattr(getattr(model, "config", None), "is_encoder_decoder", False)
    return getattr(model, "loss_type", None) == "ForCausalLM" or (is_causal and not is_encoder_decoder)


def shifts_labels(model: nn.Module) -> bool:
    """Whether the model's loss does, as far as is known."""
    use = label_use_of(model)
    return claims_to_shift(find_model(model)) if use is None else use.shifts
