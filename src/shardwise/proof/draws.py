"""The random numbers that ranks draw, put together so that the full model draws the same: dropout compared exactly.

A rank draws masks for what it computes: of its own heads, of its own part of the sequence, or of what all ranks compute
alike. Masks of parts join to the mask of the full tensor; those of what is computed alike must be equal. The full model
that is given them must come to the same loss and gradients.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from shardwise.runtime.modes import is_in_backward
from shardwise.stages.absent import Absent
from shardwise.stages.model import Stages
from shardwise.stages.run import StageRun
from shardwise.tiny.objective import copied, objective_of

__all__ = ["Draws", "Redraws", "draws_in_backward", "in_order", "problems_of", "seeded", "set_dropout", "training_copy"]

_DROPOUT = 0.2

_FEW = 16
"""Parts with fewer elements may well be equal by chance."""

_UNEQUAL = "ranks draw differently for what they compute alike"

_NO_MASKS = ("attention", "rnn", "lstm", "gru", "aten::random_")
"""In the names of operations that drop nothing on the CPU where they are one operation; and of that which draws seeds
(see [Note: random numbers] in `shardwise.runtime.context`)."""


class Draws(TorchDispatchMode):
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
        if is_own and isinstance(out, Tensor) and not isinstance(out, Absent) and _draws(func, kwargs):
            self.forwards[-1].append(out.detach().clone())
        return out


def in_order(stages: Sequence[Sequence[Sequence[Tensor]]]) -> list[Tensor]:
    """What the stages of a pipeline drew, one a rank, as the unsplit model draws it: one microbatch after the other.

    Args:
        stages: what each drew, by its forwards.
    """
    return [value for forwards in zip(*stages, strict=True) for drawn in forwards for value in drawn]


class Redraws(TorchDispatchMode):
    """Gives the full model what the ranks drew, put together.

    Args:
        ranks: what `Draws` recorded on each.
        states: each rank's random state after it has drawn; none where it does not matter.
        chosen: the rank whose draws are taken where they differ.

    Attributes:
        problems: draws that cannot be put together, in words.
        unequal: those that differ where ranks compute alike, in words; see `problems_of`.
    """

    def __init__(self, ranks: Sequence[Sequence[Tensor]], states: Sequence[Tensor], *, chosen: int = 0) -> None:
        super().__init__()
        self.problems: list[str] = []
        self.unequal: list[str] = []
        self._ranks, self._chosen = ranks, chosen
        self._place = 0
        if len({len(drawn) for drawn in ranks}) > 1:
            self.problems.append(f"ranks draw {' and '.join(str(len(drawn)) for drawn in ranks)} times")
        if any(not torch.equal(state, states[0]) for state in states):
            self.problems.append("ranks leave the common stream of random numbers at different places")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if not _draws(func, kwargs) or not isinstance(out, Tensor):
            return out
        place, self._place = self._place, self._place + 1
        parts = [drawn[place] for drawn in self._ranks if place < len(drawn)]
        found = _joined(parts, out.shape) if len(parts) == len(self._ranks) else "the full model draws more often"
        if isinstance(found, Tensor):
            out.copy_(found)
        elif found == _UNEQUAL:
            out.copy_(parts[self._chosen])
            self.unequal.append(f"draw {place + 1} of {list(out.shape)}: {found}")
        else:
            self.problems.append(f"draw {place + 1} of {list(out.shape)}: {found}")
        return out

    def choosing(self, rank: int) -> Redraws:
        """The same, which takes that rank's draws where they differ."""
        return Redraws(self._ranks, (), chosen=rank)

    @property
    def num_ranks(self) -> int:
        """How many ranks drew."""
        return len(self._ranks)


def problems_of(
    given: Sequence[Redraws], found: Mapping[str, Tensor], train: Callable[[Sequence[Redraws]], Mapping[str, Tensor]]
) -> list[str]:
    """What is wrong with what ranks drew. Draws that differ where ranks compute alike count if the loss or a gradient
    depends on them: DeBERTa drops from embeddings of positions also where no attention reads them.

    Args:
        given: with which the full model has been trained.
        train: gives those it has with other draws.
    """
    problems = [problem for each in given for problem in each.problems]
    unequal = [problem for each in given for problem in each.unequal]
    if problems or not unequal:
        return problems
    for rank in range(1, max(each.num_ranks for each in given)):
        other = train([each.choosing(min(rank, each.num_ranks - 1)) for each in given])
        if any(not torch.equal(value, other[name]) for name, value in found.items()):
            return unequal
    return []


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


def _draws(func: Any, kwargs: Any, *, in_backward: bool = False) -> bool:
    """Whether an operation draws from the stream that a model's forward shares; not from a generator of its own.

    Args:
        in_backward: whether it must run in backward, else in forward.
    """
    return (
        (kwargs or {}).get("generator") is None
        and torch.Tag.nondeterministic_seeded in func.tags
        and not any(name in func.name() for name in _NO_MASKS)
        and is_in_backward() == in_backward
    )


class _DrawsAgain(TorchDispatchMode):
    found = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found |= _draws(func, kwargs, in_backward=True)
        return func(*args, **(kwargs or {}))


def draws_in_backward(model: nn.Module, batch: Mapping[str, Any]) -> bool:
    """Whether a model, trained with dropout, draws again in backward, by seeds that it has kept."""
    trained = copy.deepcopy(model).train()
    set_dropout(trained, _DROPOUT)
    try:
        with seeded(), _DrawsAgain() as again:
            objective_of(trained(**copied(batch))).backward()
    except Exception:  # noqa: BLE001 - the model's own code fails in any way where it wants other inputs to train
        return False
    return again.found


def training_copy(model: nn.Module, batch: Mapping[str, Any], *, drops: bool = True) -> nn.Module | None:
    """A copy of a model without dropout, in training mode with it; in the model's own mode where it cannot be trained
    on `batch` so or `drops` is False, and None where not even that.
    """
    for in_training in (True, False) if drops else (False,):
        made = copy.deepcopy(model)
        if in_training:
            set_dropout(made.train(), _DROPOUT)
        try:
            with seeded():
                objective_of(copy.deepcopy(made)(**copied(batch))).backward()
        except Exception:  # noqa: BLE001 - the model's own code fails in any way where it wants other inputs to train
            continue
        return made
    return None


@contextmanager
def seeded() -> Iterator[None]:
    """Inside, every stream of random numbers on the CPU starts from the same seed; afterwards they are as before."""
    states = numpy.random.get_state(), random.getstate()
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        numpy.random.seed(0)
        random.seed(0)
        try:
            yield
        finally:
            numpy.random.set_state(states[0])
            random.setstate(states[1])


def set_dropout(model: nn.Module, chance: float) -> None:
    """Sets every chance to drop, and noise on routers, that modules and configs know; not of layers."""
    configs = [getattr(module, "config", None) for module in model.modules()]
    for owner in {id(each): each for each in (*configs, *model.modules()) if each is not None}.values():
        for name, value in list(vars(owner).items()):
            if isinstance(value, float | int) and not isinstance(value, bool) and _is_chance(owner, name):
                setattr(owner, name, chance)


def _is_chance(owner: object, name: str) -> bool:
    if isinstance(owner, nn.Dropout) and name == "p":
        return True
    return ("drop" in name or "jitter" in name) and "layer" not in name.removesuffix("_layer")
