"""Adapters (LoRA): how their parameters are split.

# [Note: the base's plan]
Rules match the names of the base, as if it stood alone; a wrapped module has the name of the base module. The plan has
the model's names (`ModelNames`), and each adapter is split like its base (docs/decisions/0019). Base split over output
features (a column): A is kept in full, B is split like the base's rows. Base split over input features (a row), or over
rows of a vocabulary: A is split like the base's columns, and B, kept in full, multiplies partial sums, which the base's
own sum completes. Parameters kept in full have partial gradients. Adapters of an unsplit base stay unsplit, with
gradients like the base's.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TypeVar

from shardwise.errors import PlanError
from shardwise.plan.decision import ParameterPlan
from shardwise.plan.pipeline_plan import CutTensor, PipelinePlan
from shardwise.plan.rule import ParameterRule
from shardwise.plan.structure import Adapted, AdapterFacts, AdapterParameter, ModelFacts, nearest, parent_of
from shardwise.sharding.layout import Layout, Step
from shardwise.sharding.placement import Placement, Replicate, Split

_Value = TypeVar("_Value")

_IN_FULL = 'replicate the module that they adapt with the style "replicate", or use fsdp instead of tp'


def plan_adapters(
    planned: Mapping[str, ParameterPlan], facts: ModelFacts, *, num_parts: int
) -> tuple[Mapping[str, ParameterPlan], list[PlanError]]:
    """Returns the plans of all parameters of a model with adapters, given those of its base; and errors."""
    adapters = facts.adapters
    if adapters is None:
        return planned, []
    every = {
        fqn: replace(planned[facts.tied.get(base, base)], fqn=fqn)
        for fqn, base in adapters.bases.items()
        if fqn not in adapters.tied
    }
    problems: list[PlanError] = []
    for adapted in adapters.adapted:
        base_plan = every[adapters.tied.get(adapted.weight, adapted.weight)]
        try:
            found = plan_adapter(adapted, base_plan, num_parts=num_parts)
        except PlanError as problem:
            problems.append(problem)
        else:
            every |= {fqn: each for fqn, each in found.items() if fqn not in adapters.tied}
    return every, problems


def stages_with_adapters(pipeline: PipelinePlan | None, facts: ModelFacts) -> PipelinePlan | None:
    """Translates `pipeline`, cut from the base alone, to the model's names. Adapters are used where their base is."""
    adapters = facts.adapters
    if adapters is None or pipeline is None:
        return pipeline
    tied = {*facts.tied, *facts.tied.values()}
    for adapted in adapters.adapted:
        if adapted.full_reader and adapters.bases[adapted.weight] in tied:
            raise PlanError(
                f"{adapted.full_reader} on {adapted.module} cannot be cut into stages",
                why="it computes with the full weight, which is tied, and its other module may be on another stage",
                fix="adapt other modules, or use pp1",
            )
    names, order = ModelNames(adapters), pipeline.order
    used = {fqn: order.uses.get(base, ()) for fqn, base in adapters.bases.items()}
    used |= {each.fqn: used[adapted.weight] for adapted in adapters.adapted for each in adapted.own}
    returns = names.keys_inside(order.returns)
    cut_tensors = tuple(tuple(_crossing(each, names) for each in cut) for cut in order.cut_tensors)
    order = replace(order, uses={**order.uses, **used}, cut_tensors=cut_tensors, returns=returns)
    return replace(pipeline, order=order)


def _crossing(cut_tensor: CutTensor, names: "ModelNames") -> CutTensor:
    kind, _, place = cut_tensor.anchor.partition(":")
    fqn, _, path = place.partition(":")
    found = tuple(names.inside((fqn,))) if kind == "output" else (fqn,)
    if len(found) > 1:
        raise PlanError(
            f"a model in which {parent_of(found[0])} has trained copies cannot be cut into stages",
            why=f"what {fqn} returns is sent to other stages, and there is one in every copy",
            fix="leave it out of modules_to_save, or use pp1",
        )
    return replace(cut_tensor, anchor=f"{kind}:{found[0]}:{path}") if kind == "output" else cut_tensor


def plan_adapter(adapted: Adapted, base: ParameterPlan, *, num_parts: int) -> dict[str, ParameterPlan]:
    """Plans how tp splits the parameters of the adapters around one weight. Returns plans by FQN.

    Args:
        base: plan of the weight.
    """
    split = base.placement
    if not isinstance(split, Split):
        return {each.fqn: _planned(each, Replicate(), base.gradient, num_parts, "its base is") for each in adapted.own}
    if adapted.full_reader:
        raise PlanError(
            f"{adapted.full_reader} on {adapted.module} cannot be split over tp={num_parts}",
            why=f"it computes with the full weight, of which a rank holds a part ({split})",
            fix=_IN_FULL,
        )
    if split.dim not in (adapted.in_dim, adapted.out_dim):
        raise PlanError(
            f"the adapters on {adapted.module} cannot be split over tp={num_parts}",
            why=f"their base is split along neither its input nor its output features ({split})",
            fix=_IN_FULL,
        )
    is_row = split.dim == adapted.in_dim
    reason = "adds to its base's partial sums" if is_row else "its base is split by output features"
    found = {}
    for each in adapted.own:
        dim = each.in_dim if is_row else each.out_dim
        placement = Replicate() if dim is None else replace(split, dim=dim)
        found[each.fqn] = _planned(each, placement, "partial" if dim is None else "full", num_parts, reason)
    return found


def _planned(
    parameter: AdapterParameter, placement: Placement, gradient: str, num_parts: int, why: str
) -> ParameterPlan:
    style = "replicate" if gradient == "full" else "replicated_with_grad_allreduce"
    if isinstance(placement, Split):
        style, why = f"split({placement.dim})", "as its base"
    rule = ParameterRule(parameter.fqn, style, source="adapter", reason=why)
    steps = (Step(("tp",), (num_parts,), placement),) if num_parts > 1 else ()
    return ParameterPlan(fqn=parameter.fqn, layout=Layout(parameter.shape, steps), rule=rule, gradient=gradient)


def weights_of_wrappers(adapters: AdapterFacts | None, head: str | None) -> dict[str, str]:
    """Maps the FQN of every module that computes with another module's weight to the weight's FQN."""
    if adapters is None:
        return {}
    weights = {each.module: each.weight for each in adapters.adapted if each.weight.endswith(".weight")}
    if head is not None and head in adapters.instances and head not in weights:
        weights[head] = f"{adapters.instances[head][0]}.weight"
    return weights


class ModelNames:
    """Maps names of modules in the base model to names in the model with adapters. Without adapters they are the same.

    A module that an adapter wraps maps to the wrapper, which computes with weight and adapter. A module with trained
    copies (`modules_to_save`) maps to the original and all copies, which compute independently.
    """

    def __init__(self, adapters: AdapterFacts | None) -> None:
        self._instances = adapters.instances if adapters is not None else {}
        self._adapted = {each.module for each in adapters.adapted} if adapters is not None else set()

    def of(self, modules: Iterable[str]) -> Iterable[str]:
        """Yields the FQNs in the model of modules, given their FQNs in the base."""
        for module in modules:
            yield from (module,) if module in self._adapted else self._instances.get(module, (module,))

    def inside(self, names: Iterable[str]) -> Iterable[str]:
        """Yields the FQNs in the model of attributes, inputs and parameters, given their FQNs in the base."""
        for name in names:
            owner = nearest(parent_of(name), self._instances)
            if owner is None:
                yield name
            else:
                yield from (f"{instance}{name[len(owner) :]}" for instance in self._instances[owner])

    def keys_of(self, values: Mapping[str, _Value]) -> dict[str, _Value]:
        """Returns values by modules' names in the model, given values by modules' names in the base."""
        return {name: value for fqn, value in values.items() for name in self.of((fqn,))}

    def keys_inside(self, values: Mapping[str, _Value]) -> dict[str, _Value]:
        """Returns values by names in the model of what is inside modules, given values by names in the base."""
        return {name: value for fqn, value in values.items() for name in self.inside((fqn,))}
