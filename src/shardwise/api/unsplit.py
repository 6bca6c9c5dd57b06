"""What a derived plan leaves whole: the reason for each parameter, and the error where that is too much."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from shardwise.errors import PlanError
from shardwise.layout.placement import Split
from shardwise.plan.decision import ParameterPlan
from shardwise.plan.match import star_numbers
from shardwise.plan.parameters import OUTSIDE
from shardwise.plan.resolve import resolve
from shardwise.plan.rule import ParameterRule
from shardwise.plan.spec import Plan
from shardwise.plan.structure import ModelFacts, parent_of

__all__ = ["Findings", "explained", "problem_of"]

_LEAST = 0.05
"""The part of the layers' elements that must be split: with less of it, ranks hold copies of one model."""
_MAX_SHOWN = 8
_LINEAR = ("linear", "transposed")


@dataclass(frozen=True, kw_only=True)
class Findings:
    """What was learnt of a twin, beside the plan.

    Attributes:
        reached: FQNs of the parameters that have a gradient.
        reasons: FQNs of parameters for which no split passed, to why.
    """

    facts: ModelFacts
    tp_size: int
    reached: Collection[str]
    reasons: Mapping[str, str]

    def reason(self, fqn: str) -> str | None:
        """Why a parameter stays whole, where more is known than its place says."""
        if fqn not in self.reached:
            return "no gradient reaches it here, so that nothing shows how to split it"
        return self.reasons.get(fqn)


def explained(plan: Plan, findings: Findings) -> Plan:
    """`plan` with a reason for each matrix in the layers that no rule names, where more is known than its place."""
    resolved = resolve(plan, findings.facts, tp_size=findings.tp_size).parameters
    rules = []
    for fqn, planned in resolved.items():
        if planned.rule.source != "facts" or len(planned.shape) < 2 or findings.facts.layer_of(fqn) is None:
            continue
        reason = findings.reason(fqn)
        if reason is not None:
            rules.append(ParameterRule(fqn, "replicate", source="structure", reason=reason))
    return plan | Plan(tuple(rules))


def problem_of(name: str, plan: Plan, findings: Findings) -> PlanError | None:
    """The error for the model called `name` if `plan` leaves its layers whole, as far as their parameters are used."""
    resolved = resolve(plan, findings.facts, tp_size=findings.tp_size).parameters
    used = [
        each for fqn, each in resolved.items() if findings.facts.layer_of(fqn) is not None and fqn in findings.reached
    ]
    total = sum(math.prod(each.shape) for each in used)
    split = sum(math.prod(each.shape) for each in used if isinstance(each.placement, Split))
    if split > _LEAST * total:
        return None
    matrices = [each for each in used if len(each.shape) > 1 and not isinstance(each.placement, Split)]
    found = f"only {split / total:.1%}" if split else "nothing"
    return PlanError(
        f"cannot split {name} over tp={findings.tp_size}: {found} of its layers can be split",
        why=_why(matrices),
        fix=f"write rules of your own, of the form plan={_example(matrices, findings)}\n"
        "(styles: shardwise.plan.spec.STYLES), and prove them with shardwise.verify(..., plan=...); or use tp_size 1",
    )


def _why(matrices: Sequence[ParameterPlan]) -> str:
    """A line for every reason, with the parameters it is given for."""
    if not matrices:
        return "it has no layers: items of a ModuleList that hold matrices which the forward uses"
    by_reason: dict[str, dict[str, None]] = {}
    for each in matrices:
        reason = "no product in its layer needs just a part of it" if each.rule.reason == OUTSIDE else each.rule.reason
        by_reason.setdefault(reason, {})[star_numbers(each.fqn)] = None
    lines = []
    for reason, names in by_reason.items():
        more = f" and {len(names) - _MAX_SHOWN} more" if len(names) > _MAX_SHOWN else ""
        lines.append(f"{', '.join(list(names)[:_MAX_SHOWN])}{more}: {reason}")
    return "\n".join(lines)


def _example(matrices: Sequence[ParameterPlan], findings: Findings) -> str:
    """Rules as if the first matrix were split by its outputs, and the last one beside it by its inputs."""
    linears = [each.fqn for each in matrices if findings.facts.modules[parent_of(each.fqn)].kind in _LINEAR]
    names = linears or [each.fqn for each in matrices]
    if not names:
        return '{"layers.*.up_proj": "colwise", "layers.*.down_proj": "rowwise"}'
    block = parent_of(parent_of(names[0]))
    last = [name for name in names if name.startswith(f"{block}.")][-1]
    if linears:
        rules = {parent_of(last): "rowwise", parent_of(names[0]): "colwise"}
    else:
        rules = {last: "split(1)", names[0]: "split(0)", block: "region_output"}
    shown = (f'"{star_numbers(name)}": "{style}"' for name, style in reversed(rules.items()))
    return "{" + ", ".join(shown) + "}"
