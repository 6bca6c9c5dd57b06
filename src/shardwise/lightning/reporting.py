"""Progress bars and loggers of a run: rank 0 alone shows and writes, with the loss of all ranks."""

from typing import Any

from lightning.pytorch.callbacks import RichProgressBar, TQDMProgressBar
from lightning.pytorch.loggers import TensorBoardLogger


class _WithLoss:
    """Shows the last step's loss over all data ranks, unless the module logs one itself."""

    def get_metrics(self, trainer: Any, pl_module: Any) -> dict[str, Any]:
        """Metrics beside the bar."""
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
    """Lightning's `TensorBoardLogger`, written only by rank 0.

    A model's loss that a module logs is the loss of all ranks, in every layout; see docs/lightning.md.
    """
