"""What a token costs in forward and backward: floating-point operations, by a stated formula."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["TokenWork"]


@dataclass(frozen=True, kw_only=True)
class TokenWork:
    """Number of weight and attention elements that one token is multiplied with, for model FLOPs.

    # [Note: model FLOPs]
    A trained weight costs a token 6 operations (a multiplication and an addition in the forward, the same for the
    gradient of what came in and for its own), a frozen one 4. Attention of H query heads with Q features each, over T
    keys, costs 12 H Q T a layer: scores and sums, forward and backward. So a token of a row of T tokens costs
    6 N + 12 L H Q T in a model of L layers and N weights that multiply: matrices, of experts those that a token goes
    through; not the embedding that rows are looked up in, but the head, tied or not. Causal attention counts in full,
    as elsewhere (PaLM, appendix B), a window as what it sees. What is recomputed, padded or communicated counts
    nothing besides, so that model FLOPs over the device's peak (MFU) compare what different ways to train get done.

    Attributes:
        trained: elements of weights that multiply and are trained.
        frozen: elements of weights that multiply and are frozen.
        attention: features of all query and value heads, H (Q + V), of every attention, with its window or None.
    """

    trained: int = 0
    frozen: int = 0
    attention: tuple[tuple[int, int | None], ...] = ()

    def flops(self, seq_length: int) -> int:
        """Operations of forward and backward for each token of a row of `seq_length` tokens: [Note: model FLOPs]."""
        seen = sum(features * min(seq_length, window or seq_length) for features, window in self.attention)
        return 6 * self.trained + 4 * self.frozen + 6 * seen
