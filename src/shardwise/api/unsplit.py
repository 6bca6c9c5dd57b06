"""What a derived plan leaves whole: the reason for each parameter, and the error where that is too much."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from shardwise.errors import PlanError
from shardwise.layout.placement import Split
from shardwise.plan.resolve import ParameterPlan, resolve
from shardwise.plan.spec import Plan, Rule
from shardwise.plan.structure import ModelFacts, parent_of
from shardwise.plan.whole import OUTSIDE

__all__ = ["Findings", "explained", "problem_of"]

_DECISIVE = 0.5
"""A stack with this part of all layers' elements must be split at least in part."""
_MAX_SHOWN = 8


@dataclass(frozen=True, kw_only=True)
class Findings:
    """What was learnt of a twin, beside the plan.

    Attributes:
        layers: FQNs of its layers.
        reached: FQNs of the parameters that have a gradient.
        reasons: FQNs of parameters for which no split passed, to why.
    """

    facts: ModelFacts
    tp_size: int
    layers: Sequence[str]
    reached: Collection[str]
    reasons: Mapping[str, str]

    def layer_of(self, fqn: str) -> str | None:
        """The layer that a parameter is in."""
        return next((layer for layer in self.layers if fqn.startswith(f"{layer}.")), None)

    def reason(self, fqn: str, told: str) -> str:
        """Why a parameter stays whole; `told` is what its place says."""
        if fqn not in self.reached:
            return "no gradient reaches it here, so that nothing shows how to split it"
        return self.reasons.get(fqn, "no product in its layer needs just a part of it" if told == OUTSIDE else told)


def explained(plan: Plan, findings: Findings) -> Plan:
    """`plan` with a reason for each matrix in the layers that no rule names, where more is known than its place."""
    resolved = resolve(plan, findings.facts, tp_size=findings.tp_size).parameters
    rules = []
    for fqn, planned in resolved.items():
        if planned.rule.source != "facts" or len(planned.shape) < 2 or findings.layer_of(fqn) is None:
            continue
        reason = findings.reason(fqn, planned.rule.reason)
        if reason != planned.rule.reason:
            rules.append(Rule(fqn, "replicate", source="structure", reason=reason))
    return plan | Plan(tuple(rules))


def problem_of(name: str, plan: Plan, findings: Findings) -> PlanError | None:
    """The error for the model called `name` if `plan` leaves its layers, or a stack of half their elements, whole."""
    resolved = resolve(plan, findings.facts, tp_size=findings.tp_size).parameters
    stacks: dict[str, list[ParameterPlan]] = {}
    for fqn, planned in resolved.items():
        layer = findings.layer_of(fqn)
        if layer is not None and fqn in findings.reached:
            stacks.setdefault(parent_of(layer), []).append(planned)
    sizes = {stack: sum(math.prod(each.shape) for each in own) for stack, own in stacks.items()}
    split = {stack for stack, own in stacks.items() if any(isinstance(each.placement, Split) for each in own)}
    whole = [s for s in stacks if s not in split and (not split or sizes[s] >= _DECISIVE * sum(sizes.values()))]
    if split and not whole:
        return None
    matrices = [each for stack in whole for each in stacks[stack] if len(each.shape) > 1]
    return PlanError(
        f"cannot split {name} over tp={findings.tp_size}: nothing in "
        f"{', '.join(f'{stack}.*' for stack in whole) or 'it'} can be split",
        why=_why(matrices, findings),
        fix=f"say what its parts are, such as plan={_example(matrices, findings)} "
        "(see shardwise.plan.spec.STYLES), or use tp_size 1",
    )


def _why(matrices: Sequence[ParameterPlan], findings: Findings) -> str:
    """A line for every kind of parameter."""
    if not matrices:
        return "it has no layers: items of a ModuleList that hold matrices which the forward uses"
    lines = [f"{_pattern(each.fqn, findings)}: {each.rule.reason}" for each in matrices]
    distinct = list(dict.fromkeys(lines))
    more = [f"and {len(distinct) - _MAX_SHOWN} more"] if len(distinct) > _MAX_SHOWN else []
    return "\n".join([*distinct[:_MAX_SHOWN], *more])


def _example(matrices: Sequence[ParameterPlan], findings: Findings) -> str:
    """Rules for the first matrix and the last one beside it, as they would be if they were split."""
    if not matrices:
        return '{"layers.*.up_proj": "colwise", "layers.*.down_proj": "rowwise"}'
    first = matrices[0].fqn
    beside = [each.fqn for each in matrices if parent_of(parent_of(each.fqn)) == parent_of(parent_of(first))]
    rules = {}
    for fqn, dim in dict(zip(dict.fromkeys((first, beside[-1])), (0, 1), strict=False)).items():
        if findings.facts.modules[parent_of(fqn)].kind in ("linear", "transposed"):
            rules[parent_of(_pattern(fqn, findings))] = ("colwise", "rowwise")[dim]
        else:
            rules[_pattern(fqn, findings)] = f"split({dim})"
    return "{" + ", ".join(f'"{pattern}": "{style}"' for pattern, style in rules.items()) + "}"


def _pattern(fqn: str, findings: Findings) -> str:
    layer = findings.layer_of(fqn)
    return fqn if layer is None else f"{parent_of(layer)}.*{fqn[len(layer) :]}"
