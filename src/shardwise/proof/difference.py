"""How far a split model may be from the unsplit one, and how far it is."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Difference", "Tolerance"]


@dataclass(frozen=True, kw_only=True)
class Tolerance:
    """How far a split model may be from the unsplit one.

    Attributes:
        loss: absolute.
        logits: absolute.
        gradient: relative to the largest entry of the gradient in question, plus `gradient_floor` absolute.
        parameter: absolute, after the optimizer's steps.
    """

    loss: float = 1e-5
    logits: float = 1e-4
    gradient: float = 1e-4
    gradient_floor: float = 1e-6
    parameter: float = 1e-5


@dataclass(frozen=True, kw_only=True)
class Difference:
    """The largest difference found over named tensors: where, how large, and what would have been allowed.

    Attributes:
        num_compared: how many tensors were compared.
        num_draws: how many random tensors, dropout masks for instance, both models drew alike.
    """

    error: float
    allowed: float
    name: str = ""
    num_compared: int = 1
    num_draws: int = 0

    @property
    def passed(self) -> bool:
        """Whether it is allowed; NaN never is."""
        return self.error <= self.allowed
