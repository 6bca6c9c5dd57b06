"""Trying a split: a twin is trained on simulated ranks and held against the whole one, in milliseconds."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.comm.simulated import SimulatedGroup, run_ranks
from shardwise.errors import ShardwiseError, UnsupportedError
from shardwise.layers.canonical import canonical_tensor
from shardwise.layers.registry import registry_of
from shardwise.plan.options import ParallelSpec
from shardwise.plan.sequence import NoStackError
from shardwise.plan.spec import Plan
from shardwise.proof.objective import objective_of
from shardwise.proof.simulate import SimulatedMesh
from shardwise.split.apply import apply_plan
from shardwise.split.decide import decide_split
from shardwise.split.facts import read_facts
from shardwise.train.gradients import reduce_gradients

__all__ = ["Trial", "Verdict", "copied", "failed"]

_LOSS = 1e-4
_GRADIENT = 1e-3
_GRADIENT_FLOOR = 1e-6
_REASON = 200  # letters of an error that are kept


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What trying a plan showed.

    Attributes:
        passed: whether loss and every gradient are the whole model's.
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
    """A twin, its batch, and what the whole of it computes.

    Args:
        build: makes the twin; called for every rank, because modules may keep what they computed.
        batch: its inputs with labels.
        parts: number of simulated ranks.

    Attributes:
        confirm: what plans must pass besides, given as to `run`; None where nothing else is asked.

    Raises:
        UnsupportedError: it computes other numbers when it runs again.
    """

    def __init__(self, build: Callable[[], nn.Module], batch: Mapping[str, Any], *, parts: int) -> None:
        self.build, self.batch, self.parts = build, batch, parts
        self.confirm: Callable[..., Verdict] | None = None
        whole = build()
        loss = objective_of(whole(**self.inputs()))
        loss.backward()
        self.loss = float(loss.detach())
        again = float(objective_of(build()(**self.inputs())).detach())
        if abs(again - self.loss) > _LOSS:
            raise UnsupportedError(
                f"{type(whole).__name__} computes something else every time it runs",
                why=f"its forward draws random numbers in eval mode too: a loss of {self.loss:.6f}, then {again:.6f};\n"
                "no split can be held against numbers that change",
                fix="give rules of your own, or use tp_size 1",
            )
        self.gradients = {name: value.grad for name, value in whole.named_parameters() if value.grad is not None}

    def inputs(self) -> dict[str, Any]:
        """The batch anew: some models write into what they are given."""
        return {name: value.clone() if isinstance(value, Tensor) else value for name, value in self.batch.items()}

    def run(self, plan: Plan, *, sequence_parallel: bool = False) -> Verdict:
        """Trains the twin one step, split by `plan`, and compares."""

        def rank(group: SimulatedGroup) -> tuple[float, dict[str, Tensor], int]:
            model = self.build()
            mesh = SimulatedMesh(group)
            decided = decide_split(plan, model, read_facts(model), mesh.shape, sequence_parallel=sequence_parallel)
            apply_plan(model, mesh, decided, ParallelSpec())
            loss = objective_of(model(**self.inputs()))
            loss.backward()
            num_collectives = group.num_exchanges
            reduce_gradients(model)
            return float(loss.detach()), _whole_gradients(model), num_collectives

        try:
            results = run_ranks(rank, self.parts)
        except Exception as error:  # noqa: BLE001 - the model's own code fails in any way on a wrong split
            return failed(error)
        for loss, gradients, _ in results:
            reason = self._difference(loss, gradients)
            if reason:
                return Verdict(passed=False, reason=reason)
        passed = Verdict(passed=True, num_collectives=results[0][2])
        confirmed = passed if self.confirm is None else self.confirm(plan, sequence_parallel=sequence_parallel)
        return passed if confirmed.passed else confirmed

    def _difference(self, loss: float, gradients: Mapping[str, Tensor]) -> str:
        if not abs(loss - self.loss) <= _LOSS:
            return f"loss {loss:.6f} instead of {self.loss:.6f}"
        for name, expected in self.gradients.items():
            error = float((gradients[name] - expected).abs().max()) if expected.numel() else 0.0
            allowed = _GRADIENT * float(expected.abs().max()) + _GRADIENT_FLOOR if expected.numel() else 0.0
            if not error <= allowed:
                return f"gradient of {name} off by {error:.1e}, {allowed:.1e} allowed"
        return ""


def failed(error: Exception) -> Verdict:
    """The verdict on a plan with which running a model raised `error`."""
    text = " ".join(str(error).split())[:_REASON]
    reason = text if isinstance(error, ShardwiseError) else f"{type(error).__name__}: {text}"
    lacks_stack = isinstance(error, NoStackError)
    return Verdict(passed=False, reason=reason, lacks_stack=lacks_stack, module=_running(error))


def _running(error: BaseException) -> str:
    """FQN of the innermost module whose code was running when the error was raised, "" where none was."""
    running, trace = [], error.__traceback__
    while trace is not None:
        owner = trace.tb_frame.f_locals.get("self")
        running += [owner] if isinstance(owner, nn.Module) else []
        trace = trace.tb_next
    names = {id(module): name for name, module in running[0].named_modules()} if running else {}
    return next((names[id(module)] for module in reversed(running) if id(module) in names), "")


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
