"""`parallel_cross_entropy` of logits split over the vocabulary."""

from torch import Tensor

from shardwise.compat.neuronx_distributed.parallel_layers.parallel_state import current_mesh
from shardwise.errors import ConfigError
from shardwise.loss.cross_entropy import LossOptions, cross_entropy_of_parts
from shardwise.runtime.context import Axis

__all__ = ["parallel_cross_entropy"]


def parallel_cross_entropy(
    vocab_parallel_logits: Tensor, target: Tensor, label_smoothing: float = 0.0, ignore_index: int = -100
) -> Tensor:
    """Returns the loss of every target, computed in float32; logits are not modified.

    Args:
        vocab_parallel_logits: `[..., vocabulary]`, per rank its part, divided like `torch.chunk`.
        target: int `[...]`, the same on every tp rank.
        ignore_index: targets whose loss and gradient are 0.

    Returns:
        Losses `[...]`, the same on every tp rank.

    Raises:
        ConfigError: `label_smoothing` is not between 0 and 1.

    Communicates: over tp, one all-reduce of one integer and one all-gather of three values per target and rank.
    """
    if not 0 <= label_smoothing <= 1:
        raise ConfigError(f"label_smoothing is {label_smoothing!r}", fix="use a number from 0 to 1")
    options = LossOptions(reduction="none", ignore_index=ignore_index, label_smoothing=label_smoothing)
    return cross_entropy_of_parts(vocab_parallel_logits, target, axis=Axis.of(current_mesh(), "tp"), options=options)
