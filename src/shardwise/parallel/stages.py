"""Pipeline parallelism: makes a model compute stage by stage, and lets go of the parameters of foreign stages."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection

from torch import nn

from shardwise.plan.pipeline_plan import PipelinePlan
from shardwise.plan.structure import upwards
from shardwise.runtime.absent import Absent
from shardwise.runtime.linear import apply_mixin
from shardwise.runtime.registry import Registry
from shardwise.runtime.stages import Module, Staged, Stages, Watched

__all__ = ["apply_stages", "keep_stages"]


def apply_stages(model: nn.Module, registry: Registry) -> Stages:
    """Makes `model` the stages of this rank, as `registry.plan.pipeline` cuts them, in place; names stay.

    Foreign parameters go: they use no memory, `named_parameters()` no longer has them.

    Returns:
        What runs the stages; also kept as `registry.stages`.

    Communicates: nothing.
    """
    plan = registry.plan.pipeline
    assert plan is not None
    registry.stages = keep_stages(model, plan, own=plan.stages_of(registry.mesh.coord("pp")))
    return registry.stages


def keep_stages(model: nn.Module, plan: PipelinePlan, *, own: Collection[int]) -> Stages:
    """Makes `model` the stages `own`, in place. Communicates nothing."""
    stages = Stages(own=tuple(own), model=model, plan=plan)
    layers = set(plan.order.calls)
    around = {"", *itertools.chain.from_iterable(list(upwards(layer))[1:] for layer in layers)}
    passed = layers & plan.order.returns.keys()  # no code of theirs runs where they are foreign

    def runs(name: str) -> bool:
        return not any(each in passed for each in upwards(name))

    _let_go(model, stages, runs)
    for name, module in list(model.named_modules()):
        if name not in around and (name in layers or runs(name)):
            stages.modules[module] = Module(name, type(module), is_layer=name in layers)
            apply_mixin(module, Watched, _stages=stages)
    apply_mixin(model, Staged, _stages=stages)
    return stages


def _let_go(model: nn.Module, stages: Stages, runs: Callable[[str], bool]) -> None:
    """Puts absent parameters in the places of foreign ones, and keeps them ready for those of modules that run in
    foreign segments.
    """
    first: dict[int, str] = {}
    names: dict[tuple[nn.Module, str], list[str]] = {}
    tied: dict[str, str] = {}
    for owner, module in model.named_modules(remove_duplicate=False):
        for own, value in module._parameters.items():
            if value is not None:
                fqn = f"{owner}.{own}" if owner else own
                names.setdefault((module, own), []).append(fqn)
                canonical = first.setdefault(id(value), fqn)
                if canonical != fqn:
                    tied[fqn] = canonical
    holders = stages.plan.stages_of_names([fqn for fqns in names.values() for fqn in fqns], tied)
    for (module, own), fqns in names.items():
        value = module._parameters[own]
        assert value is not None
        absent = Absent.of(value.shape, value.dtype, value.device)
        if not {stage for fqn in fqns for stage in holders[fqn]} & set(stages.own):
            del module._parameters[own]
            module.__dict__[own] = absent
        elif runs(fqns[0]):
            stages.absent[module, own] = absent
