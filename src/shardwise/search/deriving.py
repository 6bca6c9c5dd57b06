"""Deriving a plan: a tiny model is watched, its blocks are tried kind by kind, the best plan that passes wins."""

from __future__ import annotations

import copy
import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from torch import nn
from transformers import PreTrainedModel

from shardwise.errors import PlanError, UnsupportedError
from shardwise.parallel.declared_plans import vocabulary_plan
from shardwise.plan.decision import SplitPlan
from shardwise.plan.resolve import resolve
from shardwise.plan.rule import UNREACHED
from shardwise.plan.spec import Plan
from shardwise.probe.trial import Trial, Verdict, reraise_as
from shardwise.probe.tried_model import build_tried_model, is_small, trial_of
from shardwise.runtime.modes import has_dropout
from shardwise.search.candidate import Candidate
from shardwise.search.fuse_reductions import fuse_reductions
from shardwise.search.generalize import generalize
from shardwise.search.influence import find_row_products
from shardwise.search.real_sizes import RealSizes
from shardwise.search.refusal import given_rules_error, no_plan_error, problem_of, with_reasons
from shardwise.search.rules import Block, find_blocks
from shardwise.search.sequence_rules import sequence_plans
from shardwise.search.trace import Run, watch
from shardwise.search.widen_regions import widen_regions
from shardwise.sharding.placement import Split

__all__ = ["Derivation", "Subject", "build_subject", "check_given_rules", "derive_plan", "search_plan"]

logger = logging.getLogger("shardwise.plan")

_WELL_SPLIT = 0.9
_EVAL, _TRAINING, _REAL_SIZES = range(3)  # judges of a plan, each with those before it
NO_RULES = Plan(())
PASSED = Verdict(passed=True)


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A model whose plan is searched for, and trials of a tiny model like it."""

    model: PreTrainedModel
    tiny: PreTrainedModel
    trial: Trial


@dataclass(frozen=True, kw_only=True)
class Derivation:
    """The plan that a search found.

    Attributes:
        problem: the error to raise where the plan splits next to nothing of the layers.
    """

    plan: Plan
    problem: PlanError | None = None


@dataclass(frozen=True, kw_only=True)
class _Passed:
    """A candidate that passed.

    Attributes:
        share: the part of the layers that the plan splits of which it is a variant.
        num_collectives: what a step of the tiny model communicates.
    """

    candidate: Candidate
    share: float
    num_collectives: int

    @property
    def rank(self) -> tuple[float, int, float]:
        """The best plan splits most; among those that split the layers well, it communicates least."""
        return min(self.share, _WELL_SPLIT), -self.num_collectives, self.share


def build_subject(model: nn.Module, *, tp_size: int, is_deep: bool = False) -> Subject:
    """Builds what plans for `model` are tried on.

    Args:
        model: a transformers model, real or meta, unsplit.
        is_deep: whether the tiny model has as many layers as `model`, not just some of every kind.

    Raises:
        PlanError: the tiny model does not run unsplit; names the module.
        UnsupportedError: no tiny model can be built, or it computes other numbers every time.
    """
    name = type(model).__name__
    if not isinstance(model, PreTrainedModel):
        raise UnsupportedError(f"{name} is no transformers model", why="no tiny model of it can be built")
    with reraise_as(functools.partial(_unplanned, name, tp_size)):
        tiny = build_tried_model(model, tp_size=tp_size, **({"num_layers": None} if is_deep else {}))
        return Subject(model=model, tiny=tiny, trial=trial_of(tiny, tp_size=tp_size, drops=has_dropout(model)))


def derive_plan(
    model: nn.Module, declared: Plan, *, tp_size: int, sequence_parallel: bool = False, given: Plan = NO_RULES
) -> Derivation:
    """Builds a subject and searches for its plan: `build_subject`, then `search_plan`."""
    subject = build_subject(model, tp_size=tp_size)
    return search_plan(subject, declared, sequence_parallel=sequence_parallel, given=given)


def search_plan(
    subject: Subject, declared: Plan, *, sequence_parallel: bool = False, given: Plan = NO_RULES
) -> Derivation:
    """Finds the rules that split most of a model and compute what it computes, tried on simulated ranks.

    Args:
        declared: rules that are known already; the result has them where they pass.
        given: rules of the user that fit the tiny model. Every plan is tried with them on top, and the result is
            without them.

    Raises:
        PlanError: no plan passes, or the model's code fails where it is tried; names the module.
    """
    model, tiny, trial = subject.model, subject.tiny, subject.trial
    name, tp_size = type(model).__name__, trial.tp_size
    with reraise_as(functools.partial(_unplanned, name, tp_size)):
        search = _Search(subject, given=given, sequence_parallel=sequence_parallel)
        best, verdicts = search.best(declared)
        if best is None and given.rules and _Search(subject, sequence_parallel=sequence_parallel).best(declared)[0]:
            raise given_rules_error(name, verdicts, tp_size=tp_size)
        if best is None:
            raise no_plan_error(name, verdicts, tp_size=tp_size, sequence_parallel=sequence_parallel)
        reached = trial.gradients.keys()
        unseen = {fqn: UNREACHED for fqn, *_ in trial.facts.parameters() if fqn not in reached}
        reasons = search.reasons | unseen
        problem = None if given.rules else problem_of(name, best.candidate, reasons, reached)
        return Derivation(plan=generalize(with_reasons(best.candidate, reasons), tiny, model), problem=problem)


def check_given_rules(subject: Subject, plan: Plan, given: Plan, *, sequence_parallel: bool = False) -> None:
    """Tries a proved plan with rules of the user on top.

    Raises:
        PlanError: they compute something else than the unsplit model, or its code fails.
    """
    trial = subject.trial
    name = type(subject.model).__name__
    with reraise_as(functools.partial(_unplanned, name, trial.tp_size)):
        verdict = trial.run(plan | given, sequence_parallel=sequence_parallel, in_training=True)
    if not verdict.passed:
        raise given_rules_error(name, [verdict], tp_size=trial.tp_size)


def _unplanned(name: str, tp_size: int, verdict: Verdict) -> PlanError:
    return PlanError(
        f"{name} cannot be planned over tp={tp_size}",
        at=verdict.module or None,
        why=verdict.reason,
        fix="use tp_size 1, or give rules of your own",
    )


class _Search:
    """Plans worth a try on a tiny model: what is declared, what is declared and more, what is derived alone.

    Parts of plans (the rules of one kind of block) are tried by the cheapest judge that may do: one step in eval mode.
    Whole plans are tried with padding and dropout, too. Where one fails by these, or the best one at the model's own
    sizes, all is searched again with parts tried so, too: only that shows which part it is.

    Args:
        given: rules of the user, which go on top of every plan that is tried.

    Attributes:
        reasons: FQNs of parameters for which no split passed, to why; filled on the way.
    """

    def __init__(self, subject: Subject, *, given: Plan = NO_RULES, sequence_parallel: bool) -> None:
        self._tiny, self._trial, self._facts = subject.tiny, subject.trial, subject.trial.facts
        self._given, self._sequence_parallel = given, sequence_parallel
        self._model = None if is_small(subject.model) else subject.model  # else it is its own tiny model
        self._level = _EVAL
        self._candidates: dict[Plan, Candidate] = {}
        self.reasons: dict[str, str] = {}

    def best(self, declared: Plan) -> tuple[_Passed | None, list[Verdict]]:
        """Returns the best plan that passes, and what trying each showed."""
        best, verdicts = self._run(declared)
        if any(verdict.in_training for verdict in verdicts):
            self._level = _TRAINING
            second, more = self._run(declared)
            best = max(filter(None, (best, second)), key=lambda passed: passed.rank, default=None)
            verdicts += more
        if best is not None and not self._fits_real_sizes(best.candidate.plan).passed:
            self._level = _REAL_SIZES
            best, verdicts = self._run(declared)
        return best, verdicts

    def _run(self, declared: Plan) -> tuple[_Passed | None, list[Verdict]]:
        best: _Passed | None = None
        verdicts: list[Verdict] = []
        for plan in self._plans(declared):
            try:
                candidate = self._candidate(plan)
            except PlanError as error:
                verdicts.append(Verdict(passed=False, reason=error.summary))
                continue
            if best is not None and min(candidate.share, _WELL_SPLIT) < min(best.share, _WELL_SPLIT):
                continue
            for variant in self._variants(candidate):
                verdict = self._try(variant, max(self._level, _TRAINING), sequence_parallel=self._sequence_parallel)
                verdicts.append(verdict)
                if verdict.passed:
                    passed = _Passed(
                        candidate=self._candidate(variant),
                        share=candidate.share,
                        num_collectives=verdict.num_collectives,
                    )
                    best = passed if best is None else max(best, passed, key=lambda passed: passed.rank)
                    break
            if best is not None and best.share >= _WELL_SPLIT and not _gathers(best.candidate.split):
                break
        return best, verdicts

    def _candidate(self, plan: Plan) -> Candidate:
        if plan not in self._candidates:
            split = resolve(plan | self._given, self._facts, tp_size=self._trial.tp_size)
            self._candidates[plan] = Candidate(plan=plan, split=split, facts=self._facts)
        return self._candidates[plan]

    def _try(self, plan: Plan, level: int, *, sequence_parallel: bool = False) -> Verdict:
        verdict = self._trial.run(
            plan | self._given, sequence_parallel=sequence_parallel, in_training=level >= _TRAINING
        )
        return self._fits_real_sizes(plan, verdict) if verdict.passed and level == _REAL_SIZES else verdict

    def _fits_real_sizes(self, plan: Plan, passed: Verdict = PASSED) -> Verdict:
        """Returns `passed`, or why the plan does not fit the sizes of the model."""
        if self._real_sizes is None:
            return passed
        verdict = self._real_sizes(plan, sequence_parallel=self._sequence_parallel)
        return passed if verdict.passed else verdict

    @functools.cached_property
    def _real_sizes(self) -> Callable[..., Verdict] | None:
        if self._model is None:
            return None
        real = RealSizes(self._model, tp_size=self._trial.tp_size)
        return functools.cache(functools.partial(real.run, tiny=self._tiny))

    def _plans(self, declared: Plan) -> Iterator[Plan]:
        """The plans, `declared` first where it passes."""
        passes = bool(declared.rules) and self._try(declared, self._level).passed
        blocks = self._blocks
        if passes:
            yield declared
            planned = self._candidate(declared).split.parameters
            covered = {fqn for fqn, each in planned.items() if isinstance(each.placement, Split)}
            yield declared | self._all_that_pass([block for block in blocks if not block.parameters & covered])
        vocabulary = self._vocabulary()
        yield vocabulary | self._all_that_pass(blocks)
        yield vocabulary

    @functools.cached_property
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

    def _variants(self, candidate: Candidate) -> Iterator[Plan]:
        """The forms of a plan to try: with fewer regions, or as it is; with the sequence split."""
        widened = self._candidate(widen_regions(candidate))
        both = dict.fromkeys((widened, candidate))
        first, *others = (fuse_reductions(each, self._uncut.layers) for each in both)
        for plan in dict.fromkeys((first, widened.plan, *others, candidate.plan)):
            if self._sequence_parallel:
                yield from sequence_plans(self._candidate(plan), self._uncut)
            else:
                yield plan

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
            if rules and self._try(Plan(tuple(rules)), self._level).passed:
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
            verdict = self._try(together, self._level)
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
        return self._model is None or all(rule.is_for_any_size for rule in plan.rules)


def _gathers(split: SplitPlan) -> bool:
    """Whether linears of a plan gather outputs or split full inputs, as no block with rows and columns needs to."""
    return any(region.edge == "gather" for region in split.regions) or "rowwise_split_input" in split.modules.values()


def _kinds(blocks: Sequence[Block]) -> list[list[Block]]:
    """Blocks of the same kind in the layers of one stack, which are tried together: they may depend on each other."""
    kinds: dict[tuple[str, tuple[str, ...]], list[Block]] = {}
    for block in blocks:
        kinds.setdefault((block.layer.rpartition(".")[0], block.key), []).append(block)
    return list(kinds.values())
