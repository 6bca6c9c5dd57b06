"""What is shown and written while a Trainer runs, once: by rank 0, to which the loss of all ranks is known."""

from __future__ import annotations

from typing import Any

from lightning.pytorch.callbacks import RichProgressBar, TQDMProgressBar
from lightning.pytorch.loggers import TensorBoardLogger

__all__ = ["ShardwiseRichProgressBar", "ShardwiseTQDMProgressBar", "ShardwiseTensorBoardLogger"]


class _WithLoss:
    """Shows, unless the module logs one itself, the loss of the last step, over all data ranks."""

    def get_metrics(self, trainer: Any, pl_module: Any) -> dict[str, Any]:
        """What stands behind the bar."""
        metrics: dict[str, Any] = super().get_metrics(trainer, pl_module)  # type: ignore[misc]  # of the bar beside this
        loss = getattr(trainer.strategy, "last_loss", None)
        if loss is not None and trainer.training and "loss" not in metrics:
            metrics["loss"] = float(loss)
        return metrics


class ShardwiseTQDMProgressBar(_WithLoss, TQDMProgressBar):
    """Lightning's `TQDMProgressBar`, shown by rank 0, with the loss of all ranks."""


class ShardwiseRichProgressBar(_WithLoss, RichProgressBar):
    """Lightning's `RichProgressBar`, shown by rank 0, with the loss of all ranks."""


class ShardwiseTensorBoardLogger(TensorBoardLogger):
    """Lightning's `TensorBoardLogger`, which rank 0 alone writes.

    What a module logs of its model's loss is that of all ranks, in every layout; see docs/lightning.md.
    """
