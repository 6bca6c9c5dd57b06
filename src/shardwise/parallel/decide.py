"""Resolves rules for all axes of the mesh, before the model is changed."""

from dataclasses import replace

from torch import nn

from shardwise.estimate.cuts import cut
from shardwise.estimate.flops import count_work
from shardwise.parallel.facts import find_conditional_layers, read_windows
from shardwise.plan.adapters import stages_with_adapters, with_adapters
from shardwise.plan.data_axes import with_data_axes
from shardwise.plan.decision import SplitPlan
from shardwise.plan.options import ParallelSpec
from shardwise.plan.pipeline_plan import LayerOrder
from shardwise.plan.resolve import resolve
from shardwise.plan.spec import Plan
from shardwise.plan.structure import ModelFacts
from shardwise.runtime.norm import recognise_norm
from shardwise.topology.shape import MeshShape


def decide_split(
    rules: Plan,
    model: nn.Module,
    facts: ModelFacts,
    shape: MeshShape,
    spec: ParallelSpec,
    *,
    order: LayerOrder | None = None,
) -> SplitPlan:
    """Resolves `rules` to a plan for `model`, which is unsplit (real or meta) and not changed. The same on every rank.

    Args:
        spec: the request; `rules` replace its plan.
        order: order in which the layers of the base model run; needed if the shape has several pp ranks.

    Raises:
        ConfigError: the model cannot be cut into stages as requested.
        PlanError: the rules cannot be applied; lists every problem.
        UnsupportedError: the rules split a norm over features that computes no supported formula.
    """
    resolved = resolve(rules, facts, num_parts=shape.tp_size, sequence_parallel=spec.sequence_parallel)
    stages = None
    if shape.pp_size > 1:
        assert order is not None, "a pipeline is cut where layers begin"
        stages = stages_with_adapters(cut(order, facts, spec.pipeline, pp_size=shape.pp_size), facts)
    trained = {name: str(value.dtype) for name, value in model.named_parameters() if value.requires_grad}
    plan = with_adapters(resolved, facts)
    conditional = find_conditional_layers(model, facts)
    plan = with_data_axes(plan, facts, shape, stages, units=spec.fsdp.units, conditional=conditional, dtypes=trained)
    norms = {
        name: recognise_norm(model.get_submodule(name)) for name, style in plan.modules.items() if style == "norm_split"
    }
    return replace(
        plan,
        stacks=facts.stacks,
        norms=norms,
        work=count_work(facts, trained, read_windows(model)),
    )
