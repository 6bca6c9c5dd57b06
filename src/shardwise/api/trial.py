"""Trying a split: a twin is trained on simulated ranks and held against the whole one, in milliseconds."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from shardwise.comm.simulated import SimulatedGroup, run_ranks
from shardwise.errors import ShardwiseError, UnsupportedError
from shardwise.layers.canonical import canonical_tensor
from shardwise.layers.registry import registry_of
from shardwise.plan.options import ParallelSpec
from shardwise.plan.sequence import NoStackError
from shardwise.plan.spec import Plan
from shardwise.proof.draws import Draws, Redraws, set_dropout
from shardwise.proof.objective import objective_of
from shardwise.proof.simulate import SimulatedMesh
from shardwise.proof.twins import make_batch, settle
from shardwise.split.apply import apply_plan
from shardwise.split.decide import decide_split
from shardwise.split.facts import read_facts
from shardwise.train.gradients import track_gradients

__all__ = ["Trial", "Verdict"]

_LOSS = 1e-4
_GRADIENT = 1e-3
_GRADIENT_FLOOR = 1e-6
_DROPOUT = 0.2
_REASON = 200  # letters of an error that are kept


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What trying a plan showed.

    Attributes:
        passed: whether loss and every gradient are the full model's, with padding and dropout too.
        reason: why not.
        module: FQN of the innermost module that was running where it failed, "" where nothing did.
        lacks_stack: whether there was no list of layers along whose sequence to split.
        num_collectives: what one rank's forward and backward communicated, where it passed.
    """

    passed: bool
    reason: str = ""
    module: str = ""
    lacks_stack: bool = False
    num_collectives: int = 0


class Trial:
    """A twin, its batches, and what the full one computes of them.

    Args:
        build: makes the twin; called for every rank, because modules may keep what they computed.
        batch: its inputs with labels.
        parts: number of simulated ranks.
        others: further batches, such as one with padding.
        single: a batch of one row, for a run in training mode with dropout, whose masks are compared; there is none
            where the full twin does not run so, or draws nothing.

    Raises:
        UnsupportedError: it computes other numbers when it runs again.
    """

    def __init__(
        self,
        build: Callable[[], nn.Module],
        batch: Mapping[str, Any],
        *,
        parts: int,
        others: Sequence[Mapping[str, Any]] = (),
        single: Mapping[str, Any] | None = None,
    ) -> None:
        self.build, self.batch, self.parts = build, batch, parts
        self._truths = [_Truth.of(build, each) for each in (batch, *others)]
        first, again = self._truths[0], _Truth.of(build, batch)
        if abs(again.loss - first.loss) > _LOSS:
            raise UnsupportedError(
                f"{type(build()).__name__} computes something else every time it runs",
                why=f"its forward draws random numbers in eval mode too: a loss of {first.loss:.6f}, then "
                f"{again.loss:.6f};\nno split can be held against numbers that change",
                fix="give rules of your own, or use tp_size 1",
            )
        self.gradients = first.gradients
        self._single = single if single is not None and self._drops(single) else None

    @classmethod
    def of(cls, twin: PreTrainedModel, *, parts: int) -> Trial:
        """Of a twin that has not run yet: with a batch, one with padding where it takes a mask, and with dropout."""
        batch, padded = (make_batch(twin, seed=0, padding=padding) for padding in ("none", "right"))
        settle(twin, batch)
        is_padded = any(not torch.equal(value, padded[name]) for name, value in batch.items())
        single = make_batch(twin, batch_size=1, seed=0)
        return cls(copied(twin), batch, parts=parts, others=(padded,) if is_padded else (), single=single)

    def inputs(self) -> dict[str, Any]:
        """The batch anew: some models write into what they are given."""
        return _copied(self.batch)

    def run(self, plan: Plan, *, sequence_parallel: bool = False) -> Verdict:
        """Trains the twin one step, split by `plan`, and compares; then with padding, and with dropout."""
        found: list[int] = []
        for truth in self._truths:
            results = self._split(plan, truth.batch, sequence_parallel=sequence_parallel)
            if isinstance(results, Verdict):
                return results
            found.append(results[0].num_collectives)
            reason = next(filter(None, map(truth.difference, results)), "")
            if reason:
                return Verdict(passed=False, reason=reason if len(found) == 1 else f"with padding: {reason}")
        reason = self._run_dropping(plan, sequence_parallel=sequence_parallel) if self._single is not None else ""
        return Verdict(passed=not reason, reason=reason, num_collectives=found[0])

    def _run_dropping(self, plan: Plan, *, sequence_parallel: bool) -> str:
        """As `run`, in training mode: what is wrong there, in words."""
        assert self._single is not None
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            results = self._split(plan, self._single, sequence_parallel=sequence_parallel, drops=True)
            if isinstance(results, Verdict):
                return f"in training mode: {results.reason}"
            redraws = Redraws([result.draws for result in results])
            truth = _Truth.of(self._build_dropping, self._single, redraws)
        if any(not torch.equal(result.random_state, results[0].random_state) for result in results):
            redraws.problems.append("ranks leave the common stream of random numbers at different places")
        problems = redraws.problems or list(filter(None, map(truth.difference, results)))
        return f"with dropout: {problems[0]}" if problems else ""

    def _build_dropping(self) -> nn.Module:
        model = self.build()
        set_dropout(model, _DROPOUT)
        return model.train()

    def _drops(self, batch: Mapping[str, Any]) -> bool:
        """Whether the full twin runs in training mode, and draws there."""
        draws = Draws()
        with torch.random.fork_rng(devices=[]):
            try:
                _Truth.of(self._build_dropping, batch, draws)
            except Exception:  # noqa: BLE001 - the model's own code fails in any way where it wants other inputs to train
                return False
        return bool(draws.values)

    def _split(
        self, plan: Plan, batch: Mapping[str, Any], *, sequence_parallel: bool, drops: bool = False
    ) -> list[_Result] | Verdict:
        """What each rank computes of the batch; the verdict where it fails."""
        models: list[nn.Module] = []

        def rank(group: SimulatedGroup) -> _Result:
            model = self._build_dropping() if drops else self.build()
            models.append(model)
            mesh, draws = SimulatedMesh(group), Draws()
            decided = decide_split(plan, model, read_facts(model), mesh.shape, sequence_parallel=sequence_parallel)
            gradients = track_gradients(model, apply_plan(model, mesh, decided, ParallelSpec()))
            with draws if drops else nullcontext():
                loss = objective_of(model(**_copied(batch)))
            with gradients.together():
                loss.backward()
                num_collectives = group.num_exchanges
            return _Result(
                loss=float(loss.detach()),
                gradients=_whole_gradients(model),
                num_collectives=num_collectives,
                draws=draws.values,
                random_state=torch.get_rng_state(),
            )

        try:
            return run_ranks(rank, self.parts)
        except ShardwiseError as error:
            lacks_stack = isinstance(error, NoStackError)
            reason = " ".join(str(error).split())[:_REASON]
            return Verdict(passed=False, reason=reason, lacks_stack=lacks_stack, module=_running(error, models))
        except Exception as error:  # noqa: BLE001 - the model's own code fails in any way on a wrong split
            reason = f"{type(error).__name__}: {str(error)[:_REASON]}"
            return Verdict(passed=False, reason=reason, module=_running(error, models))


@dataclass(frozen=True, kw_only=True)
class _Result:
    """What one rank computed, communicated and drew, and where its stream of random numbers is afterwards."""

    loss: float
    gradients: Mapping[str, Tensor]
    num_collectives: int
    draws: Sequence[Tensor]
    random_state: Tensor


@dataclass(frozen=True, kw_only=True)
class _Truth:
    """A batch, and what the full twin computes of it."""

    batch: Mapping[str, Any]
    loss: float
    gradients: Mapping[str, Tensor]

    @classmethod
    def of(
        cls, build: Callable[[], nn.Module], batch: Mapping[str, Any], mode: AbstractContextManager[Any] | None = None
    ) -> _Truth:
        """Args: mode: under which the forward runs."""
        model = build()
        with mode or nullcontext():
            loss = objective_of(model(**_copied(batch)))
        loss.backward()
        gradients = {name: value.grad for name, value in model.named_parameters() if value.grad is not None}
        return cls(batch=batch, loss=float(loss.detach()), gradients=gradients)

    def difference(self, found: _Result) -> str:
        """What a rank computed otherwise, in words."""
        if not abs(found.loss - self.loss) <= _LOSS:
            return f"loss {found.loss:.6f} instead of {self.loss:.6f}"
        for name, expected in self.gradients.items():
            error = float((found.gradients[name] - expected).abs().max()) if expected.numel() else 0.0
            allowed = _GRADIENT * float(expected.abs().max()) + _GRADIENT_FLOOR if expected.numel() else 0.0
            if not error <= allowed:
                return f"gradient of {name} off by {error:.1e}, {allowed:.1e} allowed"
        return ""


def _copied(batch: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value.clone() if isinstance(value, Tensor) else value for name, value in batch.items()}


def _running(error: BaseException, models: Sequence[nn.Module]) -> str:
    """FQN of the innermost module whose code was running when the error was raised."""
    names = {id(module): name for model in models for name, module in model.named_modules()}
    found, trace = "", error.__traceback__
    while trace is not None:
        found = names.get(id(trace.tb_frame.f_locals.get("self")), found)
        trace = trace.tb_next
    return found


def _whole_gradients(model: nn.Module) -> dict[str, Tensor]:
    registry = registry_of(model)
    found = {}
    for name, parameter in model.named_parameters():
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        whole = canonical_tensor(gradient, registry.entry(name).layout, registry.mesh)
        assert whole is not None
        found[name] = whole
    return found


def copied(model: nn.Module) -> Callable[[], nn.Module]:
    """Builds copies of a model that has not run yet."""
    return lambda: copy.deepcopy(model)
