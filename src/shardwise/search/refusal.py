"""Candidate plans, reasons for unsplit parameters, and errors if too little can be split."""

import functools
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from shardwise.errors import PlanError
from shardwise.plan.decision import SplitPlan, split_share
from shardwise.plan.rule import ParameterRule
from shardwise.plan.spec import Plan, star_numbers
from shardwise.plan.structure import ModelFacts
from shardwise.probe.trial import Verdict
from shardwise.sharding.placement import Split

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


def with_reasons(candidate: Candidate, reasons: Mapping[str, str]) -> Plan:
    """The candidate's plan with a reason (by FQN: why no split passed) for each matrix in layers that no rule names."""
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
    """Raises if the best plan splits almost nothing of the layers. `reached`: the parameters that have a gradient."""
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
    """Error for the model `name`, whose code fails in trials."""
    return PlanError(
        f"{name} cannot be planned over tp={num_parts}",
        at=verdict.module or None,
        why=verdict.reason,
        fix="use a layout without tp, or give rules of your own",
    )


def no_plan_error(name: str, verdicts: Sequence[Verdict], *, num_parts: int, sequence_parallel: bool) -> PlanError:
    """Error for the model `name`, for which no plan passed. `verdicts` are in the order of the trials."""
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
    """Error for user rules with which no plan passes, although one passes without them."""
    failed = next(verdict for verdict in verdicts if not verdict.passed)
    return PlanError(
        f"the rules given for {name} give other results than the unsplit model over tp={num_parts}",
        at=failed.module or None,
        why=failed.reason,
        fix="correct the rules, or leave them out: a plan without them passes",
    )


def _lines(found: Iterable[tuple[str, str]]) -> str:
    """One line per reason, with the names that have it."""
    names: dict[str, dict[str, None]] = {}
    for name, reason in found:
        names.setdefault(reason, {})[star_numbers(name)] = None
    lines = []
    for reason, of in list(names.items())[:_MAX_SHOWN]:
        more = f" and {len(of) - _MAX_SHOWN} more" if len(of) > _MAX_SHOWN else ""
        lines.append(f"{', '.join(list(of)[:_MAX_SHOWN])}{more}: {reason}")
    return "\n".join(lines)
