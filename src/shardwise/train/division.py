"""What keeps a batch from being divided among microbatches and data ranks: then it is an error, not another number."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from shardwise.data.batch import IGNORED
from shardwise.errors import UnsupportedError
from shardwise.loss.label_use import check_divides, shifts_labels
from shardwise.runtime.adapters import find_model

__all__ = ["Division"]


class Division:
    """The division of the batches of a model into `num_parts`.

    Raises:
        UnsupportedError: what the model computes of a row depends on other rows.
    """

    def __init__(self, model: nn.Module, num_parts: int, device: torch.device) -> None:
        check_divides(model, num_parts)
        self._model, self._num_parts, self._device = find_model(model), num_parts, device
        self._norms = [each for each in model.modules() if isinstance(each, _BatchNorm) and num_parts > 1]
        self._tried: Any = None
        for norm in self._norms:
            norm.register_forward_pre_hook(self._refuse_training)

    def check(self, batch: Mapping[str, Any]) -> None:
        """Raises `UnsupportedError` where the model, as it is now, computes something else of parts than of the batch.
        Every rank comes to the same. Batch norms of what sees or hears are no fault where `batch` is text alone: those
        that run raise then.
        """
        if self._num_parts == 1:
            return
        what = f"a batch in {self._num_parts} parts"
        if any(isinstance(value, Tensor) and value.is_floating_point() for value in batch.values()):
            for norm in self._norms:
                self._refuse_training(norm)
        own, config = getattr(self._model, "_loss_function", None), getattr(self._model, "config", None)
        if (
            getattr(self._model, "loss_type", None) == "ForCTC"
            and getattr(config, "ctc_loss_reduction", "mean") != "mean"
        ):
            raise UnsupportedError(
                f"{what}, with a loss that is a sum over rows",
                why="a step's loss is the mean over its parts",
                fix='set config.ctc_loss_reduction = "mean"',
            )
        if own is not None and own is not self._tried and not _is_mean(own, self._model, self._device):
            raise UnsupportedError(
                f"{what}, with a loss_function that is no mean over targets",
                why="tried on random logits: class weights, or a sum, which targets alone do not put together",
                fix="use one microbatch, no fsdp and no ddp (with pp call the model), or a mean over labels but -100",
            )
        self._tried = own

    def _refuse_training(self, norm: nn.Module, *_: Any) -> None:
        if norm.training:
            name = type(self._model).__name__
            raise UnsupportedError(
                f"a batch in {self._num_parts} parts, of a {name} with batch norms in training mode",
                why="they take the mean and variance of a part, and every data rank would keep others",
                fix="put them in eval mode after model.train(): for each in model.modules() that is one, each.eval()",
            )


def _is_mean(loss_function: Callable[..., Any], model: Any, device: torch.device) -> bool:
    """Whether a loss of token logits is a mean over targets, tried on random ones; True where it takes others."""
    size = getattr(getattr(model.config, "get_text_config", lambda: model.config)(), "vocab_size", 2)
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(4, 6, size, generator=generator).to(device)
    labels = torch.randint(size, (4, 6), generator=generator).to(device)
    labels[1:3] = torch.arange(6) % size  # what has a weight of its own is often there
    labels[0, 1:5] = labels[3, 3:] = IGNORED

    def loss(rows: slice) -> tuple[Tensor, int]:
        target = labels[rows, 1:] if shifts_labels(model) else labels[rows]
        count = int((target != IGNORED).sum())
        return loss_function(logits=logits[rows].clone(), labels=labels[rows].clone(), vocab_size=size), count

    try:
        with torch.no_grad():
            found, (full, total) = [loss(slice(0, 1)), loss(slice(1, 4))], loss(slice(None))
            return math.isclose(sum(float(each) * count for each, count in found) / total, float(full), rel_tol=1e-4)
    except Exception:  # noqa: BLE001 - the caller's own code, which may take other arguments
        return True
