"""Split regions of a model: the modules at whose edges the collectives are.

# [Note: partial inside]
Inside a region every rank computes with its own heads or features, and every gradient is partial: the sum of the ranks'
values is the true one. That holds for activations and parameters. So one collective on the region's input completes the
gradients of all projections that read it, and a parameter that is replicated inside a region (a q/k norm, an MLA latent
projection, a router, a sink) needs one sum in the gradient phase. Nothing inside reduces on its own. This is why q, k
and v cost one all-reduce, not three, and why no style treats replicated parameters specially.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from shardwise.errors import PlanError
from shardwise.plan.rule import InputRule, ParameterRule, RegionRule, SequenceRule
from shardwise.plan.structure import LayerStack, ModelFacts, is_within, outermost, parent_of, upwards

COLUMN_STYLES = frozenset({"colwise", "packed_colwise", "qkv_colwise"})
ROW_STYLES = frozenset({"rowwise", "rowwise_reenter", "packed_rowwise"})


@dataclass(frozen=True, kw_only=True)
class Region:
    """A module whose inside is split.

    Attributes:
        fqn: the module; its floating-point inputs enter the region.
        edge: where the region ends: "row" at the row-split modules inside, "output" at its own output, "gather" at its
            own output by gathering the parts, "open" nowhere (the following modules work on the split features).
    """

    fqn: str
    edge: str


def find_regions(
    facts: ModelFacts, parameters: Mapping[str, ParameterRule], given: Mapping[str, RegionRule]
) -> dict[str, Region]:
    """Returns the regions by FQN, outermost, ordered: those with a rule, and those around column- and row-split
    parameters.

    A column-split linear belongs to the nearest ancestor that also holds a row-split one (attention, MLP). If a layer,
    or a container that never runs itself, comes first, the linear is its own region.

    Args:
        parameters: FQN of a module or parameter to its rule; without the head.
    """
    edges = {"region": "row", "region_output": "output"}
    regions = {name: Region(fqn=name, edge=edges[rule.kind]) for name, rule in given.items() if rule.kind in edges}
    said = frozenset(regions)
    rows = {name for name, rule in parameters.items() if rule.kind in ROW_STYLES}
    for name, rule in parameters.items():
        if name not in facts.modules and parameters.get(parent_of(name)) is rule:
            continue  # the weight or bias of a module that the same rule governs
        if rule.style in COLUMN_STYLES and not is_within(name, said):
            region = _enclosing(name, facts, rows)
            regions.setdefault(region.fqn, region)
        elif rule.style == "colwise_gather_output":
            regions.setdefault(name, Region(fqn=name, edge="gather"))
    for name, region_rule in given.items():
        if region_rule.style == "moe_tp_experts" and not is_within(name, said):
            _widen_to_experts_block(name, facts, regions)
    order = {name: position for position, name in enumerate(facts.modules)}
    return {fqn: regions[fqn] for fqn in sorted(outermost(regions), key=order.__getitem__)}


def region_around(module: str, regions: Mapping[str, Region]) -> Region | None:
    """Returns the region that `module` is or is inside of."""
    return next((regions[name] for name in upwards(module) if name in regions), None)


def find_deferred_sums(
    facts: ModelFacts,
    parameters: Mapping[str, ParameterRule],
    given: Mapping[str, RegionRule],
    regions: Mapping[str, Region],
) -> tuple[dict[str, str], list[PlanError]]:
    """Maps the FQN of each module that leaves its partial sum to another module to that module's FQN; also returns
    errors in these rules.

    Both must end a region by a sum.
    """

    def is_left_at(module: str) -> bool:
        region = region_around(module, regions)
        if region is not None and region.edge == "output":
            return module == region.fqn
        return module in parameters and parameters[module].kind == "rowwise"

    found: dict[str, str] = {}
    problems = []
    for module, rule in (*parameters.items(), *given.items()):
        if rule.into is None or module not in facts.modules:
            continue
        target = next((name for name in _seen_from(module, rule.into) if name in facts.modules), None)
        why = None
        if target is None:
            why = "no module around it holds one of that name"
        elif not (is_left_at(module) and is_left_at(target)):
            why = "no region is left there by a sum"
        else:
            found[module] = target
        if why is not None:
            problems.append(PlanError(f"{module} cannot be summed with {rule.into}", at=rule.place, why=why))
    return found, problems


def _seen_from(module: str, name: str) -> Iterator[str]:
    """Yields the FQNs that `name` may mean next to `module`: in the enclosing modules, from inside to outside."""
    while module := parent_of(module):
        yield f"{module}.{name}"


def _enclosing(name: str, facts: ModelFacts, rows: set[str]) -> Region:
    own = name if name in facts.modules else parent_of(name)
    ancestor = parent_of(own) if name in facts.modules else own
    while ancestor and ancestor not in facts.layers and facts.modules[ancestor].kind not in ("list", "dict"):
        if any(is_within(row, (ancestor,)) for row in rows):
            return Region(fqn=ancestor, edge="row")
        ancestor = parent_of(ancestor)
    return Region(fqn=own, edge="open")


def _widen_to_experts_block(experts: str, facts: ModelFacts, regions: dict[str, Region]) -> None:
    """Makes the mixture-of-experts block the region, including router and shared experts, if it is a module."""
    block = parent_of(experts)
    if not block or block in facts.layers or facts.modules[block].kind == "list":
        regions[experts] = Region(fqn=experts, edge="output")
    else:
        regions[block] = Region(fqn=block, edge="output")


class NoStackError(PlanError):
    """The layers along which to split the sequence are unknown."""


@dataclass(frozen=True, kw_only=True)
class SequencePlan:
    """Everything that sequence parallelism changes.

    Attributes:
        stacks: FQNs of lists of layers that work on parts of the sequence, in model order, or of layers that do alone.
        full_sequence: modules inside of them that receive the full sequence and compute the same on every rank.
        inputs: FQNs of layer inputs of which a rank uses its part of the sequence.
    """

    stacks: tuple[str, ...] = ()
    full_sequence: tuple[str, ...] = ()
    inputs: tuple[str, ...] = ()

    def stack_of(self, module: str) -> str | None:
        """Returns the stack inside which `module` receives a part of the sequence; None if it receives all of it."""
        if is_within(module, self.full_sequence):
            return None
        return next((stack for stack in self.stacks if is_within(module, (stack,))), None)


def find_sequence(
    facts: ModelFacts, rules: Mapping[str, SequenceRule], inputs: Mapping[str, InputRule], regions: Sequence[Region]
) -> SequencePlan:
    """Returns the rules about the sequence; without one for a stack, that of the only stack that holds split blocks."""
    stacks = {name: rule for name, rule in rules.items() if rule.style == "sequence"}
    for name, rule in stacks.items():
        if name not in facts.modules or (facts.modules[name].kind != "list" and name not in facts.layers):
            raise PlanError(
                f"{name} is no list of layers, and no layer",
                at=f'rule "{rule}"',
                fix="give such rules for lists or layers, and those for inputs in the section [inputs]",
            )
    chosen = tuple(stacks) or _implied(facts, regions)
    full_sequence = [n for n, rule in rules.items() if n in facts.modules and rule.style == "whole_sequence"]
    return SequencePlan(
        stacks=chosen,
        full_sequence=tuple(name for name in full_sequence if is_within(name, chosen)),  # others receive it anyway
        inputs=tuple(name for name, input_rule in inputs.items() if input_rule.style == "sequence"),
    )


def stacks_with_regions(facts: ModelFacts, regions: Sequence[Region]) -> list[LayerStack]:
    """Returns the outermost stacks of layers that hold regions."""
    return [
        stack
        for stack in facts.stacks
        if not stack.within and any(is_within(region.fqn, (stack.fqn,)) for region in regions)
    ]


def _implied(facts: ModelFacts, regions: Sequence[Region]) -> tuple[str, ...]:
    stacks = [stack.fqn for stack in stacks_with_regions(facts, regions)]
    if len(stacks) != 1:
        raise NoStackError(
            "sequence parallelism needs one stack of layers, or rules that name the stacks",
            why=f"this model has {len(stacks)} stacks with split blocks: {', '.join(stacks) or 'none'}",
            fix="use sequence_parallel=False",
        )
    return tuple(stacks)
