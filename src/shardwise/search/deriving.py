"""Deriving a plan: a tiny model is watched, its blocks are tried kind by kind, the best plan that passes wins."""

from __future__ import annotations

import copy
import functools
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import nn
from transformers import PreTrainedModel

from shardwise.errors import PlanError, UnsupportedError
from shardwise.parallel.declared_plans import vocabulary_plan
from shardwise.plan.decision import SplitPlan
from shardwise.plan.resolve import resolve
from shardwise.plan.rule import UNREACHED
from shardwise.plan.spec import Plan
from shardwise.probe.trial import Trial, Verdict, failures_explained
from shardwise.probe.tried_model import build_tried_model, is_small, trial_of
from shardwise.runtime.modes import has_dropout
from shardwise.search.fuse_reductions import fuse_reductions
from shardwise.search.generalize import generalize
from shardwise.search.given_full import num_stacks, repaired
from shardwise.search.influence import find_row_products
from shardwise.search.real_sizes import RealSizes
from shardwise.search.refusal import no_plan_error, problem_of, split_share, with_reasons
from shardwise.search.rules import Block, find_blocks
from shardwise.search.sequence_rules import sequence_plans
from shardwise.search.trace import Run, watch
from shardwise.search.widen_regions import widen_regions
from shardwise.sharding.placement import Split

__all__ = ["Derivation", "derive_plan"]

logger = logging.getLogger("shardwise.plan")

_WELL_SPLIT = 0.9
_MAX_REPAIRED, _MAX_REPAIRS = 8, 24  # plans along the sequence, and steps in which each is repaired


@dataclass(frozen=True, kw_only=True)
class Derivation:
    """What deriving found.

    Attributes:
        problem: what to raise where next to nothing of the layers is split.
    """

    plan: Plan
    problem: PlanError | None = None


@dataclass(frozen=True, kw_only=True)
class _Passed:
    """A plan that passed, the part of the layers that it splits, and what a step of the tiny model communicates."""

    plan: Plan
    share: float
    num_collectives: int

    @property
    def rank(self) -> tuple[float, int, float]:
        """The best plan splits most; among those that split the layers well, it communicates least."""
        return min(self.share, _WELL_SPLIT), -self.num_collectives, self.share


def derive_plan(model: nn.Module, declared: Plan, *, tp_size: int, sequence_parallel: bool = False) -> Derivation:
    """Finds the rules that split most of `model` and compute what it computes, tried on simulated ranks.

    Args:
        model: a transformers model, real or meta, unsplit.
        declared: what is known already; kept where it passes.

    Raises:
        PlanError: no plan at all passes, or the model's code fails where it is tried; names the module.
        UnsupportedError: no tiny model of the model can be built.
    """
    name = type(model).__name__
    if not isinstance(model, PreTrainedModel):
        raise UnsupportedError(f"{name} is no transformers model", why="no tiny model of it can be built")

    def explain(verdict: Verdict) -> PlanError:
        return PlanError(
            f"{name} cannot be planned over tp={tp_size}",
            at=verdict.module or None,
            why=verdict.reason,
            fix="use tp_size 1, or give rules of your own",
        )

    with failures_explained(explain):
        own_size = is_small(model)
        tiny = build_tried_model(model, tp_size=tp_size)
        trial = trial_of(tiny, tp_size=tp_size, drops=has_dropout(model))
        facts = trial.facts
        search = _Search(tiny, trial, portable=not own_size, sequence_parallel=sequence_parallel)
        best, verdicts = search.best(declared)
        if best is not None and not own_size:
            confirm = functools.cache(functools.partial(RealSizes(model, tp_size=tp_size).run, tiny=tiny))
            if not confirm(best.plan, sequence_parallel=sequence_parallel).passed:  # the best that fits, then
                trial.confirm = confirm
                best, verdicts = search.best(declared)
        if best is None:
            raise no_plan_error(name, verdicts, tp_size=tp_size, sequence_parallel=sequence_parallel)
        reached = trial.gradients.keys()
        unseen = {fqn: UNREACHED for fqn, *_ in facts.parameters() if fqn not in reached}
        plan = with_reasons(best.plan, facts, search.reasons | unseen, tp_size=tp_size)
        problem = problem_of(name, plan, facts, reached, tp_size=tp_size)
        return Derivation(plan=generalize(plan, tiny, model), problem=problem)


class _Search:
    """Plans worth a try on a tiny model: what is declared, what is declared and more, what is derived alone.

    Args:
        portable: whether plans must fit models of other sizes than the tiny model's.

    Attributes:
        reasons: FQNs of parameters for which no split passed, to why; filled on the way.
    """

    def __init__(self, tiny: nn.Module, trial: Trial, *, portable: bool, sequence_parallel: bool) -> None:
        self._tiny, self._trial, self._facts = tiny, trial, trial.facts
        self._portable, self._sequence_parallel = portable, sequence_parallel
        self._resolve = functools.partial(resolve, facts=trial.facts, tp_size=trial.tp_size)
        self._in_training = False  # whether parts of plans are tried with padding and dropout, too
        self.reasons: dict[str, str] = {}

    def best(self, declared: Plan) -> tuple[_Passed | None, list[Verdict]]:
        """The best plan that passes, and what trying each showed."""
        self._in_training = False
        best, verdicts = self._run(declared)
        if any(verdict.in_training for verdict in verdicts):  # find out which of its parts it was
            self._in_training = True
            second, more = self._run(declared)
            verdicts += more
            best = max((each for each in (best, second) if each is not None), key=lambda each: each.rank, default=None)
        return best, verdicts

    def _run(self, declared: Plan) -> tuple[_Passed | None, list[Verdict]]:
        best: _Passed | None = None
        verdicts: list[Verdict] = []
        for plan in self._plans(declared):
            try:
                split = self._resolve(plan)
            except PlanError as error:
                verdicts.append(Verdict(passed=False, reason=error.summary))
                continue
            share = split_share(each for fqn, each in split.parameters.items() if self._facts.layer_of(fqn) is not None)
            if best is not None and min(share, _WELL_SPLIT) < min(best.share, _WELL_SPLIT):
                continue
            for candidate, verdict in self._tried(plan):
                verdicts.append(verdict)
                if verdict.passed:
                    found = _Passed(plan=candidate, share=share, num_collectives=verdict.num_collectives)
                    best = found if best is None else max(best, found, key=lambda each: each.rank)
                    break
            if best is not None and best.share >= _WELL_SPLIT and not _gathers(self._resolve(best.plan)):
                break
        return best, verdicts

    def _tried(self, plan: Plan) -> Iterator[tuple[Plan, Verdict]]:
        """The variants of `plan` and what trying each showed; behind them those along the sequence, repaired."""
        run = functools.partial(self._trial.run, sequence_parallel=self._sequence_parallel, in_training=True)
        failed: dict[tuple[str, str], tuple[Plan, Verdict]] = {}  # the first of those that fail alike
        for candidate in self._variants(plan):
            verdict = run(candidate)
            failed.setdefault((verdict.module, verdict.reason), (candidate, verdict))
            yield candidate, verdict
        if self._sequence_parallel:
            first = list(failed.values())[:_MAX_REPAIRED]
            tried = [each for start in first for each in repaired(*start, self._facts, trial=run, limit=_MAX_REPAIRS)]
            yield from sorted(
                tried, key=lambda each: (not each[1].passed, -num_stacks(each[0]), each[1].num_collectives)
            )

    def _plans(self, declared: Plan) -> Iterator[Plan]:
        """The plans, `declared` first where it passes."""
        passes = bool(declared.rules) and self._try(declared).passed
        if passes:
            yield declared
        blocks = self._blocks()
        if passes:
            planned = self._resolve(declared).parameters
            covered = {fqn for fqn, each in planned.items() if isinstance(each.placement, Split)}
            yield declared | self._all_that_pass([block for block in blocks if not block.parameters & covered])
        vocabulary = self._vocabulary()
        yield vocabulary | self._all_that_pass(blocks)
        yield vocabulary

    def _try(self, plan: Plan) -> Verdict:
        return self._trial.run(plan, in_training=self._in_training)

    def _blocks(self) -> list[Block]:
        """What the tiny model's graph shows; nothing where its own code fails while it is watched."""
        tp_size = self._trial.tp_size
        try:
            products, layers = find_row_products(self._eager, self._trial.inputs(), tp_size=tp_size)
            return find_blocks(self._tiny, self._facts, products, layers, tp_size=tp_size)
        except Exception as error:  # noqa: BLE001 - the model's own code fails in any way on inputs that are watched
            self._note_unwatched(error)
            return []

    def _note_unwatched(self, error: Exception) -> None:
        reason = f"its model cannot be watched: {type(error).__name__}: {str(error)[:200]}"
        logger.warning("%s: %s", type(self._tiny).__name__, reason)
        self.reasons |= dict.fromkeys((fqn for fqn, *_ in self._facts.parameters()), reason)

    def _variants(self, plan: Plan) -> Iterator[Plan]:
        """The forms of `plan` to try: with fewer regions, or as it is; with the sequence split."""
        facts, tp_size = self._facts, self._trial.tp_size
        widened = widen_regions(plan, facts, tp_size=tp_size)
        both = dict.fromkeys((widened, plan))
        fused = [fuse_reductions(each, facts, self._uncut.layers, tp_size=tp_size) for each in both]
        for each in dict.fromkeys((fused[0], widened, *fused[1:], plan)):
            if self._sequence_parallel:
                yield from sequence_plans(each, facts, self._uncut, tp_size=tp_size)
            else:
                yield each

    @functools.cached_property
    def _eager(self) -> nn.Module:
        """A copy with eager attention and experts, whose graph shows every dependence."""
        eager = copy.deepcopy(self._tiny)
        for choose in ("set_attn_implementation", "set_experts_implementation"):
            try:
                getattr(eager, choose)("eager")
            except (AttributeError, ValueError):  # it has no such choice: what it has is what is watched
                continue
        return eager

    @functools.cached_property
    def _uncut(self) -> Run:
        try:
            return watch(self._eager, self._trial.inputs(), thorough=True)
        except Exception as error:  # noqa: BLE001 - as above
            self._note_unwatched(error)
            return Run()

    def _vocabulary(self) -> Plan:
        """Embedding and head split by vocabulary, or the one of them that can be."""
        both = vocabulary_plan(self._facts)
        for rules in (both.rules, *((rule,) for rule in both.rules)):
            if rules and self._try(Plan(tuple(rules))).passed:
                return Plan(tuple(rules))
        return Plan(())

    def _all_that_pass(self, blocks: Sequence[Block]) -> Plan:
        found = Plan(())
        for alike in _kinds(blocks):
            found |= self._first_that_passes(alike)
        return found

    def _first_that_passes(self, alike: Sequence[Block]) -> Plan:
        """The rules of blocks of one kind with the first guess that passes; none where no guess does."""
        plans = [[plan for plan in block.plans if self._fits(plan)] for block in alike]
        reason = ""
        tried: set[Plan] = set()
        for index in range(max(map(len, plans)) if all(plans) else 0):
            together = Plan(())
            for guesses in plans:
                together |= guesses[min(index, len(guesses) - 1)]
            if together in tried:
                continue
            tried.add(together)
            verdict = self._try(together)
            if verdict.passed:
                return together
            reason = reason or f"no split passes: {verdict.reason}"  # the best guess says most
        reason = reason or "its sections are of unequal size, which a rule cannot say for other sizes yet"
        names = sorted(frozenset[str]().union(*(block.parameters for block in alike)))
        logger.info("%s and so on stay replicated: %s", ", ".join(names[:3]), reason)
        self.reasons |= dict.fromkeys(names, reason)
        return Plan(())

    def _fits(self, plan: Plan) -> bool:
        """Whether the plan may be used for a model of the size that is asked for."""
        return not self._portable or all(rule.is_for_any_size for rule in plan.rules)


def _gathers(split: SplitPlan) -> bool:
    """Whether linears of a plan gather outputs or split full inputs, as no block with rows and columns needs to."""
    return any(region.edge == "gather" for region in split.regions) or "rowwise_split_input" in split.modules.values()


def _kinds(blocks: Sequence[Block]) -> list[list[Block]]:
    """Blocks of the same kind in the layers of one stack, which are tried together: they may depend on each other."""
    kinds: dict[tuple[str, tuple[str, ...]], list[Block]] = {}
    for block in blocks:
        kinds.setdefault((block.layer.rpartition(".")[0], block.key), []).append(block)
    return list(kinds.values())
