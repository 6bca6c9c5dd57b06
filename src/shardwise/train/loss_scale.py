"""The factor of float16 losses."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["LossScale"]


@dataclass
class LossScale:
    """What float16 losses are multiplied by, so that small gradients do not vanish: halved where they overflow, doubled
    after `interval` steps in which they did not (as torch's GradScaler does).
    """

    value: float = 2.0**16
    interval: int = 2000
    good_steps: int = 0

    def update(self, *, overflowed: bool) -> None:
        """Notes how a step went."""
        self.good_steps = 0 if overflowed else self.good_steps + 1
        if overflowed:
            self.value /= 2
        elif self.good_steps == self.interval:
            self.value, self.good_steps = self.value * 2, 0
