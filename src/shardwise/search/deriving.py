"""Derives a plan: watches a tiny model, tries its blocks by kind, and takes the best plan that passes."""

import copy
import functools
import itertools
import logging
import operator
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import torch
from torch import nn
from transformers import PreTrainedModel

from shardwise.errors import PlanError, UnsupportedError, listed
from shardwise.plan.decision import SplitPlan, split_share
from shardwise.plan.resolve import resolve
from shardwise.plan.rule import UNREACHED, ParameterRule, RegionRule, Rule
from shardwise.plan.spec import Plan, star_numbers
from shardwise.plan.structure import ModelFacts, is_within, parent_of, upwards
from shardwise.probe.trial import Trial, Verdict, build_tried_model, is_small, reraise_as, trial_of
from shardwise.runtime.modes import has_dropout
from shardwise.search.generalize import RealSizes, generalize
from shardwise.search.influence import depends, find_row_products, gradients_of, is_nonzero, weighted_sum
from shardwise.search.rules import Block, find_blocks, sequence_plans
from shardwise.search.trace import Layer, ModuleCall, watch
from shardwise.sharding.placement import Split

_EDGES = ("region", "region_output", "aside")
_LEAST = 0.05  # of the layers' elements that must be split: with less of it, ranks hold copies of one model
_MAX_SHOWN = 8


@dataclass(frozen=True, kw_only=True, eq=False)
class Candidate:
    """A plan and its decision: `split` is `plan`, with the user's rules on top, resolved for `facts`."""

    plan: Plan
    split: SplitPlan
    facts: ModelFacts

    @functools.cached_property
    def share(self) -> float:
        """Share of the elements in layers that belong to split parameters."""
        layers = self.split.parameters.items()
        return split_share(planned for fqn, planned in layers if self.facts.layer_of(fqn) is not None)


def widen_regions(candidate: Candidate) -> Plan:
    """Moves the edges of regions that end at their output, or are in a list of experts, to the module around them.

    Other splits inside become part of the region: one collective in each direction instead of one each, and tokens are
    routed on the full sequence, the same on every rank. A layer or a list itself is no such module.
    """
    plan, facts, widened = candidate.plan, candidate.facts, []
    for region in candidate.split.tensor.regions:
        block = parent_of(region.fqn if region.edge == "output" else _list_around(region.fqn, facts))
        if block and facts.modules[block].kind != "list" and block not in facts.layers and block not in widened:
            widened.append(block)
    if not widened:
        return plan
    blocks = [RegionRule(block, "region_output", "structure", "its parts add up to one sum") for block in widened]
    kept = [rule for rule in plan.rules if rule.style not in _EDGES or not is_within(rule.pattern, widened)]
    return Plan(tuple(blocks)) | Plan(tuple(kept))


def _list_around(module: str, facts: ModelFacts) -> str:
    """Returns the outermost list inside of a layer that contains `module`; "" if there is none."""
    lists = [name for name in upwards(parent_of(module)) if facts.modules[name].kind == "list"]
    return next((name for name in reversed(lists) if facts.layer_of(name)), "")


def fuse_reductions(candidate: Candidate, layers: Sequence[Layer]) -> Plan:
    """Adds rules that replace two reductions of one layer by one if the layer only adds their results."""
    plan, split = candidate.plan, candidate.split
    rules: list[Rule] = []
    for layer in layers:
        leaving = [call for call in layer.calls if _is_left(call.fqn, split, layer.fqn)]
        for first, second in _added(leaving, layer):
            kind, style = (
                (ParameterRule, "rowwise") if first.fqn in split.tensor.modules else (RegionRule, "region_output")
            )
            name = second.fqn.removeprefix(f"{layer.fqn}.")
            reason = f"the layer adds it to what {name} computes: one sum for both"
            rules.append(kind(first.fqn, f"{style}_into({name})", source="structure", reason=reason))
    return plan | Plan(tuple(rules)) if rules else plan


def _is_left(module: str, split: SplitPlan, layer: str) -> bool:
    """Returns whether a region ends at `module`: its output is reduced, or it is a row-split module of a region."""
    if not is_within(parent_of(module), (layer,)):
        return False
    summed = [
        region.fqn for region in split.tensor.regions if region.edge == "output" and is_within(module, (region.fqn,))
    ]
    return module in summed if summed else split.tensor.modules.get(module) == "rowwise"


def _added(calls: Sequence[ModuleCall], layer: Layer) -> Iterator[tuple[ModuleCall, ModuleCall]]:
    """Yields calls, each with the next call whose output the layer's outputs depend on in the same way."""
    count = Counter(call.fqn for call in calls)
    unique = [call for call in calls if count[call.fqn] == 1 and call.outputs and call.inputs]
    total = weighted_sum([value for value in layer.outputs if value.grad_fn is not None])
    for first, second in itertools.pairwise(unique):
        ours, theirs = gradients_of(total, [first.outputs[0], second.outputs[0]])
        if ours is None or theirs is None or ours.numel() != theirs.numel() or not is_nonzero(ours):
            continue
        is_same = torch.allclose(ours.flatten(), theirs.flatten(), rtol=1e-5, atol=1e-7)
        if is_same and not depends(second.inputs, first.outputs[:1]):
            yield first, second


logger = logging.getLogger("shardwise.plan")

_WELL_SPLIT = 0.9
NO_RULES = Plan(())


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A model for which a plan is searched, its tiny model, and the trial that runs plans on the tiny model."""

    model: PreTrainedModel
    tiny: PreTrainedModel
    trial: Trial


def build_subject(model: nn.Module, *, num_parts: int, is_deep: bool = False) -> Subject:
    """Builds the tiny model on which plans for `model` are tried.

    Args:
        is_deep: give the tiny model as many layers as `model`, not only some of every kind.
    """
    name = type(model).__name__
    if not isinstance(model, PreTrainedModel):
        raise UnsupportedError(f"{name} is no transformers model", why="no tiny model of it can be built")
    with reraise_as(functools.partial(unplanned_error, name, num_parts)):
        tiny = build_tried_model(model, num_parts=num_parts, **({"num_layers": None} if is_deep else {}))
        return Subject(model=model, tiny=tiny, trial=trial_of(tiny, num_parts=num_parts, drops=has_dropout(model)))


def search_plan(subject: Subject, declared: Plan, *, sequence_parallel: bool = False, given: Plan = NO_RULES) -> Plan:
    """Finds the plan that splits most of a model and computes the same as the unsplit model on simulated ranks.

    Args:
        declared: known rules; the result includes them if they pass.
        given: the user's rules that match the tiny model. Every plan is tried with them on top, not in the result.
    """
    model, tiny, trial = subject.model, subject.tiny, subject.trial
    name, num_parts = type(model).__name__, trial.num_parts
    with reraise_as(functools.partial(unplanned_error, name, num_parts)):
        search = _Search(subject, given=given, sequence_parallel=sequence_parallel)
        best, verdicts = search.best(declared)
        text = trial if best else trial_of(tiny, num_parts=num_parts, drops=has_dropout(model), with_media=False)
        if text.batch.keys() < trial.batch.keys():
            logger.warning("%s is planned from text alone: with images or sound no plan passes", name)
            subject = replace(subject, trial=text)
            return search_plan(subject, declared, sequence_parallel=sequence_parallel, given=given)
        if best is None and given.rules and _Search(subject, sequence_parallel=sequence_parallel).best(declared)[0]:
            raise given_rules_error(name, verdicts, num_parts=num_parts)
        if best is None:
            raise no_plan_error(name, verdicts, num_parts=num_parts, sequence_parallel=sequence_parallel)
        reached = trial.gradients.keys()
        unseen = {fqn: UNREACHED for fqn, *_ in trial.facts.parameters() if fqn not in reached}
        reasons = search.reasons | unseen
        if not given.rules:
            check_share(name, best, reasons, reached)
        return generalize(with_reasons(best, reasons), tiny, model)


def check_given_rules(subject: Subject, plan: Plan, given: Plan, *, sequence_parallel: bool = False) -> None:
    """Tries a proved plan with the user's rules on top."""
    name, num_parts = type(subject.model).__name__, subject.trial.num_parts
    with reraise_as(functools.partial(unplanned_error, name, num_parts)):
        verdict = subject.trial.run(plan | given, sequence_parallel=sequence_parallel)
    if not verdict.passed:
        raise given_rules_error(name, [verdict], num_parts=num_parts)


class _Search:
    """Candidates for a tiny model: the declared plan, the declared plan with derived rules, derived rules alone.

    The rules of each kind of block are tried on the tiny model alone. If the best plan does not fit the model's real
    sizes, the search repeats with each kind also tried at these sizes, which shows the part that fails. `reasons` has
    the parameters for which no split passed.
    """

    def __init__(self, subject: Subject, *, given: Plan = NO_RULES, sequence_parallel: bool) -> None:
        self._tiny, self._trial, self._facts = subject.tiny, subject.trial, subject.trial.facts
        self._given, self._sequence_parallel = given, sequence_parallel
        self._model = None if is_small(subject.model) else subject.model  # else it is its own tiny model
        self._real_sizes: RealSizes | None = None
        self._at_real_sizes = False
        self._candidates: dict[Plan, Candidate] = {}
        self.reasons: dict[str, str] = {}

    def best(self, declared: Plan) -> tuple[Candidate | None, list[Verdict]]:
        """Returns the best plan that passes, and the verdicts on all plans tried."""
        best, verdicts = self._run(declared)
        if best is not None and not self._fits_real_sizes(best.plan).passed:
            self._at_real_sizes = True
            return self._run(declared)
        return best, verdicts

    def _run(self, declared: Plan) -> tuple[Candidate | None, list[Verdict]]:
        """The plan that splits most; among plans that split the layers well, the one that communicates least."""
        best: Candidate | None = None
        best_rank = (0.0, 0, 0.0)
        verdicts: list[Verdict] = []
        for plan in self._plans(declared):
            try:
                candidate = self._candidate(plan)
            except PlanError as error:
                verdicts.append(Verdict(passed=False, reason=error.summary))
                continue
            share = candidate.share
            if best is not None and min(share, _WELL_SPLIT) < best_rank[0]:
                continue
            for variant in self._variants(candidate):
                verdict = self._try(variant, sequence_parallel=self._sequence_parallel)
                verdicts.append(verdict)
                if verdict.passed:
                    rank = (min(share, _WELL_SPLIT), -verdict.num_collectives, share)
                    if best is None or rank > best_rank:
                        best, best_rank = self._candidate(variant), rank
                    break
            if best is not None and best_rank[2] >= _WELL_SPLIT and not _gathers(best.split):
                break
        return best, verdicts

    def _candidate(self, plan: Plan) -> Candidate:
        if plan not in self._candidates:
            split = resolve(plan | self._given, self._facts, num_parts=self._trial.num_parts)
            self._candidates[plan] = Candidate(plan=plan, split=split, facts=self._facts)
        return self._candidates[plan]

    def _try(self, plan: Plan, *, sequence_parallel: bool = False) -> Verdict:
        verdict = self._trial.run(plan | self._given, sequence_parallel=sequence_parallel)
        if verdict.passed and self._at_real_sizes:
            at_real_sizes = self._fits_real_sizes(plan)
            return verdict if at_real_sizes.passed else at_real_sizes
        return verdict

    def _fits_real_sizes(self, plan: Plan) -> Verdict:
        if self._model is None:
            return Verdict(passed=True)
        self._real_sizes = self._real_sizes or RealSizes(self._model, num_parts=self._trial.num_parts)
        return self._real_sizes.run(plan, tiny=self._tiny, sequence_parallel=self._sequence_parallel)

    def _plans(self, declared: Plan) -> Iterator[Plan]:
        """Yields the plans, `declared` first if it passes."""
        blocks, _ = self._watched
        if declared.rules and self._try(declared).passed:
            yield declared
            planned = self._candidate(declared).split.parameters
            covered = {fqn for fqn, each in planned.items() if isinstance(each.placement, Split)}
            yield declared | self._all_that_pass([block for block in blocks if not block.parameters & covered])
        vocabulary = self._vocabulary()
        yield vocabulary | self._all_that_pass(blocks)
        yield vocabulary

    @functools.cached_property
    def _watched(self) -> tuple[list[Block], list[Layer]]:
        """The blocks in the tiny model's graph, and the layers of a run without cuts; empty if its code fails."""
        num_parts, eager = self._trial.num_parts, _eager(self._tiny)
        try:
            products, layers = find_row_products(eager, self._trial.batch, num_parts=num_parts)
            blocks = find_blocks(self._tiny, self._facts, products, layers, num_parts=num_parts)
            return blocks, watch(eager, self._trial.batch, thorough=True)
        except Exception as error:  # noqa: BLE001 - the model's own code fails in any way on inputs that are watched
            reason = f"its model cannot be watched: {type(error).__name__}: {str(error)[:200]}"
            logger.warning("%s: %s", type(self._tiny).__name__, reason)
            self.reasons |= dict.fromkeys((fqn for fqn, *_ in self._facts.parameters()), reason)
            return [], []

    def _variants(self, candidate: Candidate) -> Iterator[Plan]:
        """Yields the forms of a plan to try: with fewer regions, or unchanged; with the sequence split."""
        _, layers = self._watched
        widened = self._candidate(widen_regions(candidate))
        first, *others = (fuse_reductions(each, layers) for each in dict.fromkeys((widened, candidate)))
        for plan in dict.fromkeys((first, widened.plan, *others, candidate.plan)):
            if self._sequence_parallel:
                yield from sequence_plans(plan, self._candidate(plan).split, self._facts, layers)
            else:
                yield plan

    def _vocabulary(self) -> Plan:
        """Returns the rules that split embedding and head by vocabulary, or the one of them that passes."""
        both = vocabulary_plan(self._facts)
        choices = [both, *(Plan((rule,)) for rule in both.rules)]
        return next((plan for plan in choices if plan.rules and self._try(plan).passed), NO_RULES)

    def _all_that_pass(self, blocks: Sequence[Block]) -> Plan:
        """The rules of all kinds of blocks that pass. Blocks of one kind in a stack may depend on each other."""
        kinds: dict[tuple[str, tuple[str, ...]], list[Block]] = {}
        for block in blocks:
            kinds.setdefault((block.layer.rpartition(".")[0], block.key), []).append(block)
        return functools.reduce(operator.or_, map(self._first_that_passes, kinds.values()), NO_RULES)

    def _first_that_passes(self, alike: Sequence[Block]) -> Plan:
        """Returns the rules of blocks of one kind with the first guess that passes; none if no guess does."""
        is_tiny = self._model is None  # else plans must work at the requested model's sizes
        plans = [
            [plan for plan in block.plans if is_tiny or all(rule.is_for_any_size for rule in plan.rules)]
            for block in alike
        ]
        reason, num_guesses = "", max(map(len, plans)) if all(plans) else 0
        guesses = ([own[min(index, len(own) - 1)] for own in plans] for index in range(num_guesses))
        for together in dict.fromkeys(functools.reduce(operator.or_, guess) for guess in guesses):
            verdict = self._try(together)
            if verdict.passed:
                return together
            reason = reason or f"no split passes: {verdict.reason}"  # the best guess says most
        reason = reason or "its sections are of unequal size, which a rule cannot say for other sizes yet"
        names = sorted(frozenset[str]().union(*(block.parameters for block in alike)))
        logger.info("%s and so on stay replicated: %s", ", ".join(names[:3]), reason)
        self.reasons |= dict.fromkeys(names, reason)
        return NO_RULES


def _eager(tiny: PreTrainedModel) -> nn.Module:
    """Returns a copy with eager attention and experts, whose graph shows every dependence."""
    eager = copy.deepcopy(tiny)
    for choose in ("set_attn_implementation", "set_experts_implementation"):
        with suppress(AttributeError, ValueError):  # it has no such choice: what it has is what is watched
            getattr(eager, choose)("eager")
    return eager


def _gathers(split: SplitPlan) -> bool:
    """Whether linears of a plan gather outputs or split full inputs, which blocks with columns and rows do not need."""
    return (
        any(region.edge == "gather" for region in split.tensor.regions)
        or "rowwise_split_input" in split.tensor.modules.values()
    )


def vocabulary_plan(facts: ModelFacts) -> Plan:
    """Returns the plan that splits input and output embeddings by vocabulary, which declared plans often omit."""
    reason = "embeddings split by vocabulary, of any size"
    rules = []
    if facts.embedding and facts.modules[facts.embedding].kind == "embedding":
        rules.append(ParameterRule(facts.embedding, "embedding_rowwise", source="structure", reason=reason))
    if facts.head and facts.modules[facts.head].kind == "linear":
        rules.append(ParameterRule(facts.head, "colwise_gather_output", source="structure", reason=reason))
    return Plan(tuple(rules))


def with_reasons(candidate: Candidate, reasons: Mapping[str, str]) -> Plan:
    """Returns the candidate's plan with a reason for each matrix in layers that no rule names."""
    rules = [
        ParameterRule(fqn, "replicate", source="structure", reason=reasons[fqn])
        for fqn, planned in candidate.split.parameters.items()
        if fqn in reasons
        and planned.rule.source == "facts"
        and len(planned.shape) > 1
        and candidate.facts.layer_of(fqn) is not None
    ]
    return candidate.plan | Plan(tuple(rules))


def check_share(name: str, candidate: Candidate, reasons: Mapping[str, str], reached: Collection[str]) -> None:
    """Raises `PlanError` if the best plan splits almost no part of layers. `reached`: parameters with a gradient."""
    parameters, layer_of = candidate.split.parameters, candidate.facts.layer_of
    used = [planned for fqn, planned in parameters.items() if layer_of(fqn) is not None and fqn in reached]
    share = split_share(used)
    if share > _LEAST:
        return
    matrices = [planned for planned in used if len(planned.shape) > 1 and not isinstance(planned.placement, Split)]
    unseen = "no product in its layer needs just a part of it"
    why = _lines(
        (planned.fqn, reasons.get(planned.fqn, unseen if planned.rule.source == "facts" else planned.rule.reason))
        for planned in matrices
    )
    example = f'{{"{star_numbers(matrices[0].fqn)}": "split(0)"}}' if matrices else '{"layers.*.up_proj": "colwise"}'
    raise PlanError(
        f"cannot split {name} over tp={candidate.split.num_parts}: "
        f"{f'only {share:.1%}' if share else 'nothing'} of its layers can be split",
        why=why or "it has no layers: items of a ModuleList that hold matrices which the forward uses",
        fix=f"write rules of your own, such as plan={example} (styles: shardwise.plan.spec.STYLES),\n"
        "and prove them with shardwise.verify(..., plan=...); or use a layout without tp",
    )


def unplanned_error(name: str, num_parts: int, verdict: Verdict) -> PlanError:
    """Returns the error for the model `name`, whose code fails in trials."""
    return PlanError(
        f"{name} cannot be planned over tp={num_parts}",
        at=verdict.module or None,
        why=verdict.reason,
        fix="use a layout without tp, or give rules of your own",
    )


def no_plan_error(name: str, verdicts: Sequence[Verdict], *, num_parts: int, sequence_parallel: bool) -> PlanError:
    """Returns the error for the model `name`, for which no plan passed."""
    informative = [each for each in verdicts if not each.lacks_stack] or verdicts
    at = star_numbers(next((each.module for each in informative if each.module), ""))
    where, fix = f"over tp={num_parts}", "use a layout without tp"
    if sequence_parallel:
        where, fix = "along the sequence", "run without sequence parallelism (sequence_parallel=False)"
    example = f', such as plan={{"{at}": "whole_sequence"}}' if at and sequence_parallel else ""
    return PlanError(
        f"{name} cannot be split {where}: no declared or derived plan computes what the unsplit model does; "
        f"{len(verdicts)} were tried",
        at=at or None,
        why=_lines((each.module or "the model", each.reason) for each in informative if each.reason),
        fix=f"{fix}, or give rules of your own{example} (styles: shardwise.plan.spec.STYLES)",
    )


def given_rules_error(name: str, verdicts: Sequence[Verdict], *, num_parts: int) -> PlanError:
    """Returns the error for user rules with which no plan passes, although one passes without them."""
    failed = next(verdict for verdict in verdicts if not verdict.passed)
    return PlanError(
        f"the rules given for {name} give other results than the unsplit model over tp={num_parts}",
        at=failed.module or None,
        why=failed.reason,
        fix="correct the rules, or leave them out: a plan without them passes",
    )


def _lines(found: Iterable[tuple[str, str]]) -> str:
    """Returns one line per reason, with the names that have it."""
    names: dict[str, dict[str, None]] = {}
    for name, reason in found:
        names.setdefault(reason, {})[star_numbers(name)] = None
    shown = list(names.items())[:_MAX_SHOWN]
    return "\n".join(f"{listed(list(of), _MAX_SHOWN)}: {reason}" for reason, of in shown)
