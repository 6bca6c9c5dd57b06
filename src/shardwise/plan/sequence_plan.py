"""Where hidden states are split along the sequence: stacks of layers, what in them needs all of it, what comes after.

A plan may say so by rules, as derived plans do, which go by what runs when. Without such rules the one list of
layers that holds split blocks is the stack, and what is registered after it runs after it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shardwise.errors import PlanError
from shardwise.plan.regions import Region
from shardwise.plan.rule import InputRule, SequenceRule
from shardwise.plan.structure import LayerStack, ModelFacts, is_within

__all__ = ["NoStackError", "SequencePlan", "Stack", "find_sequence", "stacks_with_regions"]


class NoStackError(PlanError):
    """Nothing says along which layers to split the sequence."""


@dataclass(frozen=True, kw_only=True)
class Stack:
    """A list of layers that work on parts of the sequence.

    Attributes:
        fqn: the `ModuleList`.
        partial_after: whether gradients after it are partial (a split head follows), so that the gather must
            reduce-scatter them; else every rank's are complete and the gather takes its slice.
    """

    fqn: str
    partial_after: bool


@dataclass(frozen=True, kw_only=True)
class SequencePlan:
    """Everything that sequence parallelism changes.

    Attributes:
        stacks: in model order.
        full_sequence: modules inside of them that are given the full sequence and compute alike on every rank.
        inputs: FQNs of inputs of layers of which a rank uses its part of the sequence.
        after: modules and parameters whose gradients are partial because they run between the last stack and a split
            head.
    """

    stacks: tuple[Stack, ...] = ()
    full_sequence: tuple[str, ...] = ()
    inputs: tuple[str, ...] = ()
    after: frozenset[str] = frozenset()

    def stack_of(self, module: str) -> str | None:
        """The stack of whose sequence `module` is given a part; None outside, and in what is given all of it."""
        if is_within(module, self.full_sequence):
            return None
        return next((stack.fqn for stack in self.stacks if is_within(module, (stack.fqn,))), None)

    def sees_a_part(self, parameter: str, module: str) -> bool:
        """Whether the gradient of a parameter of `module` is partial because of the sequence."""
        if is_within(module, self.full_sequence):
            return False
        return self.stack_of(module) is not None or parameter in self.after or module in self.after

    @property
    def partial_after(self) -> bool:
        """Whether the head's input gradient is summed where the last stack is left, and not at the head."""
        return any(stack.partial_after for stack in self.stacks)


def find_sequence(
    facts: ModelFacts,
    rules: Mapping[str, SequenceRule],
    inputs: Mapping[str, InputRule],
    regions: Sequence[Region],
    *,
    head: str | None,
) -> SequencePlan:
    """What the rules say of the sequence, or what the order of registration implies where they say nothing.

    Raises:
        PlanError: a rule for lists of layers governs something else; or nothing is said, and there is not just one list
            of layers with split blocks.
    """
    stacks = {name: rule for name, rule in rules.items() if rule.style in ("sequence", "sequence_partial")}
    if not stacks:
        return _implied(facts, regions, head=head)
    for name, rule in stacks.items():
        if name not in facts.modules or facts.modules[name].kind != "list":
            raise PlanError(
                f"{name} is no list of layers",
                at=f'rule "{rule}"',
                fix="give such rules for lists, partial_gradient for what runs between the last of them and the head, "
                "and those for inputs in the section [inputs]",
            )
    return SequencePlan(
        stacks=tuple(Stack(fqn=name, partial_after=rule.style == "sequence_partial") for name, rule in stacks.items()),
        full_sequence=tuple(n for n, rule in rules.items() if n in facts.modules and rule.style == "whole_sequence"),
        inputs=tuple(name for name, input_rule in inputs.items() if input_rule.style == "sequence"),
        after=frozenset(n for n, rule in rules.items() if rule.style == "partial_gradient"),
    )


def stacks_with_regions(facts: ModelFacts, regions: Sequence[Region]) -> list[LayerStack]:
    """The outermost stacks of layers that hold regions."""
    return [
        stack
        for stack in facts.stacks
        if not stack.within and any(is_within(region.fqn, (stack.fqn,)) for region in regions)
    ]


def _implied(facts: ModelFacts, regions: Sequence[Region], *, head: str | None) -> SequencePlan:
    stacks = [stack.fqn for stack in stacks_with_regions(facts, regions)]
    if len(stacks) != 1:
        raise NoStackError(
            "sequence parallelism needs one stack of layers, or rules that name the stacks",
            why=f"this model has {len(stacks)} stacks with split blocks: {', '.join(stacks) or 'none'}",
            fix="use sequence_parallel=False",
        )
    order = list(facts.modules)
    after = order[order.index(stacks[0]) + 1 :] if head is not None else []
    return SequencePlan(
        stacks=(Stack(fqn=stacks[0], partial_after=head is not None),),
        after=frozenset(name for name in after if not is_within(name, stacks)),
    )
