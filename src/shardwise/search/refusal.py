"""What a search for a plan leaves unsplit and why, and the errors where that is everything or too much."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence

from shardwise.errors import PlanError
from shardwise.plan.decision import ParameterPlan
from shardwise.plan.match import star_numbers
from shardwise.plan.parameters import OUTSIDE
from shardwise.plan.resolve import resolve
from shardwise.plan.rule import ParameterRule
from shardwise.plan.spec import Plan
from shardwise.plan.structure import ModelFacts
from shardwise.probe.trial import Verdict
from shardwise.sharding.placement import Split

__all__ = ["no_plan_error", "problem_of", "split_share", "with_reasons"]

_LEAST = 0.05
"""The part of the layers' elements that must be split: with less of it, ranks hold copies of one model."""
_MAX_SHOWN = 8


def with_reasons(plan: Plan, facts: ModelFacts, reasons: Mapping[str, str], *, tp_size: int) -> Plan:
    """`plan` with a reason for each matrix in the layers that no rule names.

    Args:
        reasons: FQNs of parameters to why no split of them passed.
    """
    rules = [
        ParameterRule(fqn, "replicate", source="structure", reason=reasons[fqn])
        for fqn, planned in resolve(plan, facts, tp_size=tp_size).parameters.items()
        if fqn in reasons
        and planned.rule.source == "facts"
        and len(planned.shape) > 1
        and facts.layer_of(fqn) is not None
    ]
    return plan | Plan(tuple(rules))


def split_share(planned: Iterable[ParameterPlan]) -> float:
    """Elements of split parameters over elements of all."""
    split = {True: 0, False: 0}
    for each in planned:
        split[isinstance(each.placement, Split)] += math.prod(each.shape)
    return split[True] / max(1, sum(split.values()))


def problem_of(name: str, plan: Plan, facts: ModelFacts, reached: Collection[str], *, tp_size: int) -> PlanError | None:
    """The error for the model called `name` if `plan` splits next to nothing of its layers.

    Args:
        reached: FQNs of the parameters that have a gradient.
    """
    resolved = resolve(plan, facts, tp_size=tp_size).parameters
    used = [each for fqn, each in resolved.items() if facts.layer_of(fqn) is not None and fqn in reached]
    share = split_share(used)
    if share > _LEAST:
        return None
    matrices = [each for each in used if len(each.shape) > 1 and not isinstance(each.placement, Split)]
    unseen = "no product in its layer needs just a part of it"
    why = _lines((each.fqn, unseen if each.rule.reason == OUTSIDE else each.rule.reason) for each in matrices)
    example = f'{{"{star_numbers(matrices[0].fqn)}": "split(0)"}}' if matrices else '{"layers.*.up_proj": "colwise"}'
    return PlanError(
        f"cannot split {name} over tp={tp_size}: "
        f"{f'only {share:.1%}' if share else 'nothing'} of its layers can be split",
        why=why or "it has no layers: items of a ModuleList that hold matrices which the forward uses",
        fix=f"write rules of your own, such as plan={example} (styles: shardwise.plan.spec.STYLES),\n"
        "and prove them with shardwise.verify(..., plan=...); or use tp_size 1",
    )


def no_plan_error(name: str, verdicts: Sequence[Verdict], *, tp_size: int, sequence_parallel: bool) -> PlanError:
    """The error for the model called `name`, no plan for which passed.

    Args:
        verdicts: on all plans that were tried, in the order in which they were.
    """
    informative = [each for each in verdicts if not each.lacks_stack] or verdicts
    at = star_numbers(next((each.module for each in informative if each.module), ""))
    where, fix = f"over tp={tp_size}", "use tp_size 1"
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


def _lines(found: Iterable[tuple[str, str]]) -> str:
    """A line for every reason, with the names it is given for."""
    names: dict[str, dict[str, None]] = {}
    for name, reason in found:
        names.setdefault(reason, {})[star_numbers(name)] = None
    lines = []
    for reason, of in list(names.items())[:_MAX_SHOWN]:
        more = f" and {len(of) - _MAX_SHOWN} more" if len(of) > _MAX_SHOWN else ""
        lines.append(f"{', '.join(list(of)[:_MAX_SHOWN])}{more}: {reason}")
    return "\n".join(lines)
