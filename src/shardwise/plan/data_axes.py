"""Adds the pipeline and data axes to a plan: stages of parameters, sharding by FSDP2, and FSDP units.

# [Note: units]
FSDP2 gathers the parameters of a unit together before its module runs, and frees them afterwards. Units are the
outermost layers, the input embedding and the output head. Other parameters, such as final norms and small tables,
belong to the model itself: they are needed from its first use to its last. Modules that share a parameter form one
unit, gathered before the first of them runs and freed after the last.

A parameter that cannot be sharded along its first dim is replicated on every data rank, and the gradient phase sums its
gradient. These are scalars; key/value heads that tp ranks hold at different positions (their shards would not be
aligned); and parameters with another dtype than most of their unit (transformers keeps routers and norms in float32),
since FSDP2 reduces a unit's gradients in one buffer.

Layers that run only for batches with images or sound are no units: a data rank without such rows would not gather them
while others do. They belong to the model, which gathers them on every rank. A rank that did not run them reduces zeros
([Note: parameters that no rank used]).

# [Note: units of stages]
Each pipeline stage is an FSDP2 root. So a parameter that two stages of one rank use (a tied embedding under a schedule
that returns to the first rank) is replicated too. So is a parameter outside of units whose module, such as the base
model, also holds parameters of other stages: no module of one stage alone could be given to its root.
"""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace

from shardwise.errors import ConfigError, did_you_mean
from shardwise.plan.decision import DataPlan, ParameterPlan, SplitPlan
from shardwise.plan.families import SINGLE_FSDP_UNIT
from shardwise.plan.pipeline_plan import PipelinePlan
from shardwise.plan.spec import match
from shardwise.plan.structure import ModelFacts, is_within, nearest, outermost, outermost_layers, parent_of, upwards
from shardwise.sharding.layout import Layout, Step, steps_along
from shardwise.sharding.placement import Chunk, OnCoords, Split
from shardwise.topology.shape import MeshShape


def with_data_axes(
    plan: SplitPlan,
    facts: ModelFacts,
    shape: MeshShape,
    pipeline: PipelinePlan | None = None,
    *,
    units: Sequence[str] | None = None,
    conditional: Collection[str] = (),
    dtypes: Mapping[str, str] | None = None,
) -> SplitPlan:
    """Returns `plan`, which was resolved for tp alone, with the data axes and pipeline stages of a mesh of `shape`.

    Args:
        units, conditional: see `find_units`.
        dtypes: dtypes of the trained parameters by name: a unit shards only those of its most common dtype.
    """
    data = DataPlan(units=find_units(facts, units, conditional=conditional))
    plan = replace(plan, shape=shape, data=data, pipeline=pipeline)
    kept = _kept_in_full(plan) if pipeline is not None and shape.data_size > 1 else frozenset()
    kept |= _of_rarer_dtypes(plan, dtypes or {})
    staged = {fqn: _over_stages(each, plan) for fqn, each in plan.parameters.items()}
    return replace(plan, parameters={fqn: _over_data(each, shape, in_full=fqn in kept) for fqn, each in staged.items()})


def _over_stages(planned: ParameterPlan, plan: SplitPlan) -> ParameterPlan:
    if plan.pipeline is None:
        return planned
    names = [planned.fqn, *(alias for alias, canonical in plan.tied.items() if canonical == planned.fqn)]
    coords = sorted({plan.pipeline.rank_of[stage] for name in names for stage in plan.stages_holding(name)})
    step = Step(("pp",), (plan.shape.pp_size,), OnCoords(tuple(coords)))
    return replace(planned, stages=tuple(coords), layout=Layout(planned.shape, (step, *planned.layout.steps)))


def _kept_in_full(plan: SplitPlan) -> frozenset[str]:
    """Returns the parameters that no stage's FSDP2 root can hold; see [Note: units of stages]."""
    assert plan.pipeline is not None
    stages: dict[str, set[int]] = {}
    inside: dict[str, set[tuple[int, ...]]] = {}
    units = {module for unit in plan.data.units for module in unit}
    around_units = {around for unit in units for around in upwards(parent_of(unit))} | {""}
    owners: dict[str, str] = {}
    for fqn in (*plan.parameters, *plan.tied):
        owner = parent_of(fqn)
        stages.setdefault(plan.tied.get(fqn, fqn), set()).update(plan.stages_holding(fqn))
        if plan.stages_holding(fqn):
            for module in upwards(owner):
                inside.setdefault(module, set()).add(plan.stages_holding(fqn))
            if nearest(owner, units) is None:
                owners[fqn] = owner
    ranks = {fqn: [plan.pipeline.rank_of[stage] for stage in held] for fqn, held in stages.items()}
    twice = {fqn for fqn, held in ranks.items() if len(set(held)) < len(held)}
    loose = {
        plan.tied.get(fqn, fqn) for fqn, owner in owners.items() if owner in around_units or len(inside[owner]) > 1
    }
    return frozenset(twice | loose)


def _of_rarer_dtypes(plan: SplitPlan, dtypes: Mapping[str, str]) -> frozenset[str]:
    """Returns the parameters with another dtype than most elements of their unit."""
    unit_of = {module: unit for unit in plan.data.units for module in unit}
    groups: dict[tuple[str, ...], dict[str, list[str]]] = {}
    for fqn, dtype in dtypes.items():
        unit = unit_of.get(nearest(parent_of(fqn), unit_of) or "", ())
        groups.setdefault(unit, {}).setdefault(dtype, []).append(fqn)
    kept: set[str] = set()
    for by_dtype in groups.values():
        by_size = sorted(by_dtype.values(), key=lambda fqns: sum(math.prod(plan.parameters[fqn].shape) for fqn in fqns))
        kept.update(fqn for fqns in by_size[:-1] for fqn in fqns)
    return frozenset(kept)


def _over_data(planned: ParameterPlan, shape: MeshShape, *, in_full: bool) -> ParameterPlan:
    if shape.data_size == 1:
        return planned
    aligned = shape.fsdp_size == 1 or _are_replicas_aligned(planned.placement)
    in_full = in_full or not planned.shape or not aligned
    steps = (*steps_along(["fsdp"], shape, None if in_full else Chunk(0)), *steps_along(["ddp"], shape))
    layout = Layout(planned.shape, (*planned.layout.steps, *steps))
    return replace(planned, layout=layout, data="reduced" if in_full else "managed")


def _are_replicas_aligned(placement: object) -> bool:
    """Whether several tp ranks hold copies of an element at the same position, so that sharding keeps them aligned."""
    if not isinstance(placement, Split) or placement.dim != 0:
        return True
    return all(
        len({(placement.local_of(coord, interval), placement.local_sizes[coord]) for coord in holders}) == 1
        for interval, holders in placement.shared()
    )


def find_units(
    facts: ModelFacts, chosen: Sequence[str] | None = None, *, conditional: Collection[str] = ()
) -> tuple[tuple[str, ...], ...]:
    """Returns the FSDP units in order of registration, without the parameters that belong to the model itself.

    Args:
        chosen: patterns of the units' names (see `FsdpPolicy`); None: the default units.
        conditional: layers that run only for some batches.
    """
    if facts.model_type in SINGLE_FSDP_UNIT:
        return ()
    owned = _owned(facts)
    candidates = [layer for layer in outermost_layers(facts.stacks) if owned[layer] and layer not in conditional]
    for end in _ends(facts):
        if not is_within(end, candidates):
            candidates.append(end)
    if chosen is not None:
        candidates = _chosen(chosen, [module for module, own in owned.items() if module and own])
    units: list[list[str]] = []
    for candidate in candidates:
        sharing = [unit for unit in units if any(owned[candidate] & owned[module] for module in unit)]
        merged = [module for unit in sharing for module in unit] + [candidate]
        units = [unit for unit in units if unit not in sharing] + [merged]
    inside = [module for unit in units for module in unit]
    outside = {facts.tied.get(fqn, fqn) for fqn, *_ in facts.parameters() if not is_within(fqn, inside)}
    return tuple(tuple(unit) for unit in units if not any(owned[module] & outside for module in unit))


def _chosen(patterns: Sequence[str], modules: Sequence[str]) -> list[str]:
    """Returns the modules that match a pattern, without modules inside of others."""
    idle = [pattern for pattern in patterns if not any(match(pattern, module) for module in modules)]
    if idle:
        raise ConfigError(
            f"FsdpPolicy units: {', '.join(map(repr, idle))} match no module with parameters"
            + did_you_mean(idle[0], modules)
        )
    return outermost(module for module in modules if any(match(pattern, module) for pattern in patterns))


def _ends(facts: ModelFacts) -> Iterator[str]:
    """Yields the input embedding and the output head.

    An embedding whose weight also makes the logits is used where no call of the embedding gathers it, so it belongs to
    the model. So does one with other rows than the head.
    """
    ends = [end for end in (not facts.embedding_gives_logits and facts.embedding, facts.head) if end]
    rows = {facts.modules[end].parameters["weight"][0] for end in ends if "weight" in facts.modules[end].parameters}
    yield from ends if len(rows) < 2 else ends[1:]


def _owned(facts: ModelFacts) -> dict[str, set[str]]:
    """Returns the canonical FQNs of the parameters in each module."""
    owned: dict[str, set[str]] = {module: set() for module in facts.modules}
    for fqn, owner, *_ in facts.parameters():
        for module in upwards(owner):
            owned[module].add(facts.tied.get(fqn, fqn))
    return owned
