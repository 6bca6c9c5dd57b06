"""Use of labels in causal language models: which label a position is compared with, and whether logits depend on it."""

import inspect
from dataclasses import dataclass

import torch
from torch import nn
from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from shardwise.errors import UnsupportedError
from shardwise.runtime.adapter_facts import find_model
from shardwise.runtime.arguments import Arguments, edit_arguments

_ATTRIBUTE = "_shardwise_label_use"


@dataclass(frozen=True, kw_only=True)
class LabelUse:
    """How a model uses its labels, found by running a tiny model of the architecture.

    Attributes:
        shifts: whether the loss compares each position with the next label.
        sees_target: whether `shifts` is true and the output at a position depends on the next token.
        divides: whether the result of a batch, including its loss, can be combined from the results of its parts.
    """

    shifts: bool
    sees_target: bool
    divides: bool = True


def note_label_use(model: nn.Module, use: LabelUse) -> None:
    """Attaches `use` to `model` and its copies. Makes a model that sees its targets refuse training."""
    model.__dict__[_ATTRIBUTE] = use

    def refuse_training(module: nn.Module, arguments: Arguments) -> None:
        if arguments.get("labels") is not None and module.training and torch.is_grad_enabled():
            check_label_use(module)

    if use.sees_target:
        edit_arguments(model, refuse_training)


def label_use_of(model: nn.Module) -> LabelUse | None:
    """Returns the `LabelUse` attached to the model or to a module inside it; None if there is none."""
    return next((module.__dict__[_ATTRIBUTE] for module in model.modules() if _ATTRIBUTE in module.__dict__), None)


def check_label_use(model: nn.Module) -> None:
    """Raises `UnsupportedError` if the model sees the tokens that it would be trained to predict."""
    use = label_use_of(model)
    if use is not None and use.sees_target:
        decoder = "is_decoder=True in its config, or " if hasattr(getattr(model, "config", None), "is_decoder") else ""
        raise UnsupportedError(
            f"training {type(model).__name__} to predict tokens that it sees",
            why="its loss compares each position with the token after it, and its attention looks at that token",
            fix=f"use {decoder}a class with a loss of its own, such as auto_class=AutoModelForMaskedLM",
        )


def may_divide(model: nn.Module) -> bool:
    """Returns whether batches may be computed in parts, as far as known."""
    use = label_use_of(model)
    return use is None or use.divides


def check_model_divides(model: nn.Module, num_parts: int) -> None:
    """Raises `UnsupportedError` if a batch must not be computed in `num_parts` parts."""
    if num_parts > 1 and not may_divide(model):
        raise UnsupportedError(
            f"batches of {type(find_model(model)).__name__} in {num_parts} parts",
            why="what it computes of a row depends on its place in the batch, or on other rows, or its loss leaves out "
            "other targets than labels of -100: tried on a tiny model",
            fix="use one microbatch and a layout without fsdp and ddp, or a config with which rows are independent",
        )


def claims_to_shift(model: nn.Module) -> bool:
    """Returns whether the model's class is a causal language model: its loss compares positions with the next label."""
    is_causal = type(model).__name__ in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
    return getattr(model, "loss_type", None) == "ForCausalLM" or (is_causal and not _is_encoder_decoder(model))


def may_shift(model: nn.Module) -> bool:
    """Returns whether the loss may shift labels, judged by the class. Only running the model tells."""
    return claims_to_shift(model) or says_nothing(model) or _shifts_by_loss(model)


def says_nothing(model: nn.Module) -> bool:
    """Returns whether a model takes targets although its class does not name its loss."""
    takes = inspect.signature(model.forward).parameters
    return getattr(model, "loss_type", "") is None and not takes.keys().isdisjoint(("labels", "start_positions"))


def _shifts_by_loss(model: nn.Module) -> bool:
    return LOSS_MAPPING.get(getattr(model, "loss_type", None)) is ForCausalLMLoss


def _is_encoder_decoder(model: nn.Module) -> bool:
    return getattr(getattr(model, "config", None), "is_encoder_decoder", False)


def shifts_labels(model: nn.Module) -> bool:
    """Returns whether the model's loss compares each position with the next label, as far as known."""
    use, inner = label_use_of(model), find_model(model)
    claims = claims_to_shift(inner) or (_shifts_by_loss(inner) and not _is_encoder_decoder(inner))
    return claims if use is None else use.shifts
