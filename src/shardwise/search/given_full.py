"""Repairing a plan along the sequence: the module in which it fails is given the full sequence, or what is around it.

Capacities counted over a row, states that run on between positions and the like are no gradients, so that watching a
tiny model shows nothing of them: only trying does. Inside of a module that is given the full sequence, regions work
as under plain tensor parallelism; it costs an all-gather more than they do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from shardwise.plan.rule import SequenceRule
from shardwise.plan.spec import Plan
from shardwise.plan.structure import ModelFacts, is_within, parent_of
from shardwise.probe.trial import Verdict

__all__ = ["num_stacks", "repaired"]


def repaired(
    plan: Plan, verdict: Verdict, facts: ModelFacts, *, trial: Callable[[Plan], Verdict], limit: int
) -> Iterator[tuple[Plan, Verdict]]:
    """What comes of `plan`, which failed with `verdict`, as module after module is given the full sequence.

    Ends with what passes, where the next module is a layer itself, or after `limit` trials.
    """
    given: list[str] = []  # FQNs in the tiny model, the last one added at the end
    for _ in range(limit):
        failing = verdict.module or (given[-1] if given else "")
        around = next((fqn for fqn in given if is_within(failing, (fqn,))), None)
        module = failing if around is None else parent_of(around)
        while module in facts.modules and facts.modules[module].kind == "list":
            module = parent_of(module)
        layer = facts.layer_of(module) if module else None
        if layer is None or module == layer:
            return
        given = [*(fqn for fqn in given if not is_within(fqn, (module,))), module]
        candidate = plan | Plan(tuple(map(_rule, given)))
        verdict = trial(candidate)
        yield candidate, verdict
        if verdict.passed:
            return


def _rule(fqn: str) -> SequenceRule:
    return SequenceRule(fqn, "whole_sequence", source="structure", reason="it fails on parts of the sequence")


def num_stacks(plan: Plan) -> int:
    """Along how many stacks of layers the sequence is split."""
    return sum(isinstance(rule, SequenceRule) and rule.style in ("sequence", "sequence_partial") for rule in plan.rules)
