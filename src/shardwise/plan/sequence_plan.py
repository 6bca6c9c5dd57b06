"""Sequence parallelism in a plan: the stacks of layers that work on parts, and modules inside that need all of it.

Derived plans give rules for it. Without rules, the only list of layers with split blocks is the stack.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shardwise.errors import PlanError
from shardwise.plan.regions import Region
from shardwise.plan.rule import InputRule, SequenceRule
from shardwise.plan.structure import LayerStack, ModelFacts, is_within


class NoStackError(PlanError):
    """The layers along which to split the sequence are unknown."""


@dataclass(frozen=True, kw_only=True)
class SequencePlan:
    """Everything that sequence parallelism changes.

    Attributes:
        stacks: FQNs of the lists of layers that work on parts of the sequence, in model order.
        full_sequence: modules inside of them that receive the full sequence and compute the same on every rank.
        inputs: FQNs of layer inputs of which a rank uses its part of the sequence.
    """

    stacks: tuple[str, ...] = ()
    full_sequence: tuple[str, ...] = ()
    inputs: tuple[str, ...] = ()

    def stack_of(self, module: str) -> str | None:
        """The stack inside which `module` receives a part of the sequence; None if it receives all of it."""
        if is_within(module, self.full_sequence):
            return None
        return next((stack for stack in self.stacks if is_within(module, (stack,))), None)


def find_sequence(
    facts: ModelFacts,
    rules: Mapping[str, SequenceRule],
    inputs: Mapping[str, InputRule],
    regions: Sequence[Region],
) -> SequencePlan:
    """The rules about the sequence; without any, the only stack that holds split blocks."""
    stacks = {name: rule for name, rule in rules.items() if rule.style == "sequence"}
    if not stacks:
        return _implied(facts, regions)
    for name, rule in stacks.items():
        if name not in facts.modules or facts.modules[name].kind != "list":
            raise PlanError(
                f"{name} is no list of layers",
                at=f'rule "{rule}"',
                fix="give such rules for lists, and those for inputs in the section [inputs]",
            )
    return SequencePlan(
        stacks=tuple(stacks),
        full_sequence=tuple(n for n, rule in rules.items() if n in facts.modules and rule.style == "whole_sequence"),
        inputs=tuple(name for name, input_rule in inputs.items() if input_rule.style == "sequence"),
    )


def stacks_with_regions(facts: ModelFacts, regions: Sequence[Region]) -> list[LayerStack]:
    """The outermost stacks of layers that hold regions."""
    return [
        stack
        for stack in facts.stacks
        if not stack.within and any(is_within(region.fqn, (stack.fqn,)) for region in regions)
    ]


def _implied(facts: ModelFacts, regions: Sequence[Region]) -> SequencePlan:
    stacks = [stack.fqn for stack in stacks_with_regions(facts, regions)]
    if len(stacks) != 1:
        raise NoStackError(
            "sequence parallelism needs one stack of layers, or rules that name the stacks",
            why=f"this model has {len(stacks)} stacks with split blocks: {', '.join(stacks) or 'none'}",
            fix="use sequence_parallel=False",
        )
    return SequencePlan(stacks=(stacks[0],))
