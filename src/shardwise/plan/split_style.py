"""The style `split(...)`: a parameter split along a named dim, for splits that no other style names.

split(0)                        dim 0, by the heads of its module, in plain runs outside of attention
split(1)                        dim 1 (a table of biases with one column per head)
split(0, sections=3)            dim 0 holds three equal sections, each split on its own
split(0; 0-16,64-80|16-32,80-96)  dim 0, exactly these elements on each rank (for one tp_size)
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from shardwise.errors import PlanError
from shardwise.sharding.boxes import Interval

_TEXT = re.compile(r"split\((\d+)(?:, sections=(\d+))?(?:; ([0-9,|-]+))?\)")


@dataclass(frozen=True)
class SplitStyle:
    """A parsed `split(...)` style.

    Attributes:
        num_sections: number of equal sections.
        pieces: the intervals of every rank, if given.
    """

    dim: int
    num_sections: int = 1
    pieces: tuple[tuple[Interval, ...], ...] | None = None

    def __str__(self) -> str:
        sections = f", sections={self.num_sections}" if self.num_sections > 1 else ""
        if self.pieces is None:
            return f"split({self.dim}{sections})"
        ranks = "|".join(",".join(f"{start}-{stop}" for start, stop in intervals) for intervals in self.pieces)
        return f"split({self.dim}; {ranks})"

    @classmethod
    def parse(cls, text: str) -> SplitStyle:
        """Parses the style.

        Raises:
            PlanError: it is malformed.
        """
        found = _TEXT.fullmatch(text)
        if found is None or (found[2] and found[3]):
            raise PlanError(
                f"cannot read the style {text!r}",
                why="it is no split of a dim",
                fix='write "split(0)", "split(0, sections=3)" or "split(0; 0-16,32-48|16-32,48-64)"',
            )
        pieces = None
        if found[3]:
            pieces = tuple(
                tuple((int(run.split("-")[0]), int(run.split("-")[1])) for run in rank.split(",") if run)
                for rank in found[3].split("|")
            )
        return cls(int(found[1]), int(found[2] or 1), pieces)
