"""What a rank says of itself from time to time: its step, and where its work is."""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType

__all__ = ["Beat", "find_place", "place_of_thread"]

# Whoever waits or computes, it is the code outside these that says what for.
_INNER = ("torch", "shardwise.comm", "transformers.utils")


@dataclass(frozen=True, kw_only=True)
class Beat:
    """One beat of a rank.

    Attributes:
        count: one more at every beat.
        step: the training steps it has begun.
        collective: the function of `torch.distributed` that its work is in, "" where it computes.
        where: file, line and function.
        ended: "", or how it ended: "left" the mesh, or "failed".
        order: of ends, from 1.
        text: the error it failed with.
    """

    count: int = 0
    step: int = 0
    collective: str = ""
    where: str = "its first lines"
    ended: str = ""
    order: int = 0
    text: str = ""

    def __str__(self) -> str:
        return f"step {self.step}, {self.collective + ' at ' if self.collective else ''}{self.where}"

    @property
    def place(self) -> tuple[int, str, str]:
        """What changes when its work goes on."""
        return self.step, self.collective, self.where

    def to_json(self) -> str:
        """As text that `from_json` reads."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Beat:
        """The beat that `to_json` wrote; one of a rank that has not begun where there is no text."""
        return cls(**json.loads(text)) if text else cls()


def place_of_thread(thread: int) -> tuple[str, str]:
    """Where a thread of this process is: the collective it is in, and the place."""
    frame = sys._current_frames().get(thread)
    return find_place(traceback.walk_stack(frame)) if frame is not None else ("", "its last lines")


def find_place(frames: Iterable[tuple[FrameType, int]]) -> tuple[str, str]:
    """The collective and the place that frames, the innermost first, with their lines, represent."""
    collective = ""
    for frame, line in frames:
        module = str(frame.f_globals.get("__name__", ""))
        if module.startswith("torch.distributed") and not module.endswith("c10d_logger"):
            collective = collective or frame.f_code.co_name
        if not module.startswith(_INNER) and not _is_standard(module):
            path = Path(frame.f_code.co_filename)
            return collective, f"{path.parent.name}/{path.name}:{line} in {frame.f_code.co_name}"
    return collective, "unknown code"


def _is_standard(module: str) -> bool:
    return module != "__main__" and module.partition(".")[0] in sys.stdlib_module_names
