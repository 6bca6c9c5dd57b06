"""Combines the ranks' random numbers for the full model, so that dropout is compared exactly.

A rank draws masks for its own heads, for its own part of the sequence, or for replicated computations. Masks of parts
are concatenated to the mask of the full tensor; masks of replicated computations must be equal. With these masks the
full model must have the same loss and gradients.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from shardwise.stages.absent import Absent
from shardwise.stages.model import Stages
from shardwise.stages.run import StageRun
from shardwise.tiny.models import draws_shared

_FEW = 16  # parts with fewer elements may well be equal by chance

_UNEQUAL = "ranks draw differently for what they compute alike"


class RecordRandom(TorchDispatchMode):
    """Records the random tensors that a rank draws in forward. Recomputation in backward is not recorded.

    Args:
        stages: this rank's stages of a pipeline. Only draws of layers that this rank's stages compute are
            recorded. None without a pipeline.

    Attributes:
        forwards: without stages, one list of all drawn tensors in order; with stages, one list for every forward of a
            stage, in the order in which they ran.
    """

    def __init__(self, stages: Stages | None = None) -> None:
        super().__init__()
        self.forwards: list[list[Tensor]] = [[]] if stages is None else []
        self._stages = stages
        self._run: StageRun | None = None

    @property
    def values(self) -> list[Tensor]:
        """All recorded tensors."""
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


class ReplayRandom(TorchDispatchMode):
    """Replaces each random draw of the full model by the ranks' recorded draws, joined to the full shape.

    Args:
        ranks: the tensors that `RecordRandom` recorded on each rank.
        states: each rank's generator state after its draws, which must be equal; empty if they need not be.

    Attributes:
        problems: draws that cannot be joined, in words.
        unequal: draws of the full shape that differ between ranks, in words; the first rank's are used. If the results
            differ too, this is the reason. If the results are equal, none depends on these draws.
        num_draws: number of draws of the full model.
    """

    def __init__(self, ranks: Sequence[Sequence[Tensor]], states: Sequence[Tensor]) -> None:
        super().__init__()
        self.problems: list[str] = []
        self.unequal: list[str] = []
        self._ranks = ranks
        self.num_draws = 0
        if len({len(drawn) for drawn in ranks}) > 1:
            self.problems.append(f"ranks draw {' and '.join(str(len(drawn)) for drawn in ranks)} times")
        if any(not torch.equal(state, states[0]) for state in states):
            self.problems.append("ranks leave the common stream of random numbers at different places")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if not draws_shared(func, kwargs) or not isinstance(out, Tensor):
            return out
        place, self.num_draws = self.num_draws, self.num_draws + 1
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
        """The problems with the draws, if the results differ."""
        return self.problems or self.unequal


def _joined(parts: Sequence[Tensor], shape: Sequence[int]) -> Tensor | str:
    """Returns the full model's draw for the ranks' draws `parts`, or the problem with them."""
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
