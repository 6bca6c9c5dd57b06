"""Cost of a token in forward and backward, in floating-point operations, by a stated formula."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class TokenWork:
    """Number of weight and attention elements that one token is multiplied with, for model FLOPs.

    # [Note: model FLOPs]
    A trained weight costs 6 operations per token: a multiplication and an addition each for the forward, the gradient
    of its input, and its own gradient. A frozen weight costs 4. Attention of H query heads with Q features each, over T
    keys, costs 12 H Q T per layer: scores and weighted sums, forward and backward. So a token in a row of T tokens
    costs 6 N + 12 L H Q T in a model of L layers and N weights that multiply. These are matrices (of experts only those
    that a token uses) and the head, tied or not, but not the embedding lookup. Causal attention counts in full, as
    elsewhere (PaLM, appendix B); a sliding window counts the keys in it. Recomputation, padding and communication do
    not count, so that model FLOPs over the device's peak (MFU) compare different ways to train.

    Attributes:
        trained: elements of trained weights that multiply.
        frozen: elements of frozen weights that multiply.
        attention: features of all query and value heads, H (Q + V), of every attention, with its window or None.
    """

    trained: int = 0
    frozen: int = 0
    attention: tuple[tuple[int, int | None], ...] = ()

    def flops(self, seq_length: int) -> int:
        """Operations of forward and backward per token of a row of `seq_length` tokens: [Note: model FLOPs]."""
        seen = sum(features * min(seq_length, window or seq_length) for features, window in self.attention)
        return 6 * self.trained + 4 * self.frozen + 6 * seen
