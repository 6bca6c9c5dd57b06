"""The random numbers that ranks draw, put together so that the full model draws the same: dropout compared exactly.

A rank draws masks for what it computes: of its own heads, of its own part of the sequence, or of what all ranks compute
alike. Masks of parts join to the mask of the full tensor; those of what is computed alike must be equal. The full model
that is given them must come to the same loss and gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from shardwise.stages.absent import Absent
from shardwise.stages.model import Stages
from shardwise.stages.run import StageRun
from shardwise.tiny.random import draws_shared

__all__ = ["RecordRandom", "ReplayRandom", "in_microbatch_order"]

_FEW = 16
"""Parts with fewer elements may well be equal by chance."""

_UNEQUAL = "ranks draw differently for what they compute alike"


class RecordRandom(TorchDispatchMode):
    """Records what is drawn inside, in forward; what recomputation in backward draws again is not.

    Args:
        stages: of a pipeline; what is drawn while code of other stages runs is not recorded either.

    Attributes:
        forwards: the drawn tensors in order, of a stage those of each of its forwards.
    """

    def __init__(self, stages: Stages | None = None) -> None:
        super().__init__()
        self.forwards: list[list[Tensor]] = [[]] if stages is None else []
        self._stages = stages
        self._run: StageRun | None = None

    @property
    def values(self) -> list[Tensor]:
        """All of them."""
        return [value for drawn in self.forwards for value in drawn]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        run = None if self._stages is None else self._stages.current
        if run is not None and run is not self._run and not run.is_foreign:
            self.forwards.append([])
            self._run = run
        is_own = self._stages is None or (run is not None and not run.is_foreign)
        if is_own and isinstance(out, Tensor) and not isinstance(out, Absent) and draws_shared(func, kwargs):
            self.forwards[-1].append(out.detach().clone())
        return out


def in_microbatch_order(stages: Sequence[Sequence[Sequence[Tensor]]]) -> list[Tensor]:
    """What the stages of a pipeline drew, one a rank, as the unsplit model draws it: one microbatch after the other.

    Args:
        stages: what each drew, by its forwards.
    """
    return [value for forwards in zip(*stages, strict=True) for drawn in forwards for value in drawn]


class ReplayRandom(TorchDispatchMode):
    """Gives the full model what the ranks drew, put together.

    Args:
        ranks: what `RecordRandom` recorded on each.
        states: each rank's random state after it has drawn; none where it does not matter.

    Attributes:
        problems: draws that cannot be put together, in words.
        unequal: draws that differ where ranks compute alike, in words; the first rank's are used. They explain results
            that differ, and are harmless otherwise: DeBERTa drops from positions that no attention reads.
    """

    def __init__(self, ranks: Sequence[Sequence[Tensor]], states: Sequence[Tensor]) -> None:
        super().__init__()
        self.problems: list[str] = []
        self.unequal: list[str] = []
        self._ranks = ranks
        self._place = 0
        if len({len(drawn) for drawn in ranks}) > 1:
            self.problems.append(f"ranks draw {' and '.join(str(len(drawn)) for drawn in ranks)} times")
        if any(not torch.equal(state, states[0]) for state in states):
            self.problems.append("ranks leave the common stream of random numbers at different places")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if not draws_shared(func, kwargs) or not isinstance(out, Tensor):
            return out
        place, self._place = self._place, self._place + 1
        parts = [drawn[place] for drawn in self._ranks if place < len(drawn)]
        found = _joined(parts, out.shape) if len(parts) == len(self._ranks) else "the full model draws more often"
        if isinstance(found, Tensor):
            out.copy_(found)
        elif found == _UNEQUAL:
            out.copy_(parts[0])
            self.unequal.append(f"draw {place + 1} of {list(out.shape)}: {found}")
        else:
            self.problems.append(f"draw {place + 1} of {list(out.shape)}: {found}")
        return out

    @property
    def faults(self) -> list[str]:
        """What is wrong with the draws where the results differ."""
        return self.problems or self.unequal

    @property
    def num_draws(self) -> int:
        """How often the full model has drawn."""
        return self._place


def _joined(parts: Sequence[Tensor], shape: Sequence[int]) -> Tensor | str:
    """What the full model draws where ranks drew `parts`, or what is wrong with them."""
    shapes = [list(part.shape) for part in parts]
    differing = {
        dim for each in shapes for dim in range(len(shape)) if len(each) != len(shape) or each[dim] != shape[dim]
    }
    if not differing:
        same = all(torch.equal(part, parts[0]) for part in parts)
        return parts[0] if same else _UNEQUAL
    (dim, *others) = differing
    if others or sum(each[dim] for each in shapes) < shape[dim]:
        return f"ranks draw {' and '.join(map(str, shapes))}, which are no parts of it"
    if min(part.numel() for part in parts) >= _FEW and all(torch.equal(part, parts[0]) for part in parts):
        return "ranks draw the same for parts of their own"
    return torch.cat(list(parts), dim).narrow(dim, 0, shape[dim])
