"""Pipeline parallelism: makes a model run stage by stage, and removes the parameters of other stages."""

import functools
import itertools
from collections.abc import Callable, Collection

import torch
from torch import nn
from transformers import PreTrainedModel

from shardwise.parallel.tensor_parallel import fit_sizes
from shardwise.parameters.registry import Registry
from shardwise.plan.pipeline_plan import PipelinePlan
from shardwise.plan.structure import fqn_of, nearest, outermost_layers, parent_of, upwards
from shardwise.runtime.linear import apply_mixin
from shardwise.runtime.local_inputs import own_slice
from shardwise.stages.absent import Absent
from shardwise.stages.model import LayerContainer, MayHaveNoParameters, StageAwareCall, StagedModel, Stages
from shardwise.stages.run import Module


def apply_stages(model: nn.Module, registry: Registry) -> None:
    """Turns `model` into this rank's stages if `registry.plan.pipeline` cuts it; see `build_local_stages`."""
    plan = registry.plan.pipeline
    if plan is not None:
        registry.stages = build_local_stages(model, plan, own=plan.stages_on(registry.mesh.coord("pp")))


def finish_placeholders(registry: Registry, compute_dtype: torch.dtype | None) -> None:
    """Sets device, dtype and shape of the placeholders of other stages' parameters. Communicates nothing.

    The shape is this tp rank's part inside of layers, except in modules that receive and return full features.
    """
    stages, mesh = registry.stages, registry.mesh
    if stages is None:
        return
    stages.context = registry.context if registry.plan.num_parts > 1 else None
    _note_split_segments(stages, registry)
    for fqn, (dim, num_heads) in registry.plan.tensor.inputs.items():
        owner, _, argument = fqn.rpartition(".")
        own = functools.partial(own_slice, dim=dim, num_heads=num_heads, axis=registry.context.tp)
        stages.sliced.setdefault(stages.model.get_submodule(owner), {})[argument] = own
    names = {id(module): name for name, module in stages.model.named_modules()}
    plan = registry.plan
    layers = {*stages.plan.order.calls, *outermost_layers(plan.stacks)}
    # Modules with the same tensors at their edges split or unsplit: their own code may run with full weights.
    full = {region.fqn for region in plan.tensor.regions if region.edge == "gather"}
    full |= {name for name, style in plan.tensor.modules.items() if style == "rowwise_split_input"}
    full |= {parent_of(fqn) for fqn in plan.tensor.local_sizes}
    absent = stages.absent | {(module, own): module.__dict__[own] for module, own in stages.foreign}
    for (module, own), old in absent.items():
        fqn = fqn_of(names[id(module)], own)
        inside = nearest(fqn, layers) is not None and nearest(fqn, full) is None
        shape = registry.entry(fqn).tensor_layout.local_shape(mesh.coords) if inside else tuple(old.meta.shape)
        dtype = compute_dtype if compute_dtype is not None and old.meta.is_floating_point() else old.meta.dtype
        new = Absent.of(shape, dtype, mesh.device)
        if (module, own) in stages.foreign:
            module.__dict__[own] = new
            if own == "weight":
                fit_sizes(module, new)
        else:
            stages.absent[module, own] = new


def _note_split_segments(stages: Stages, registry: Registry) -> None:
    """Records the segments that begin while the hidden states are split along the sequence."""
    sequence = registry.plan.tokens
    ends = {stack.fqn: stack.items for stack in registry.plan.stacks}
    splits = {ends.get(stack, (stack,))[0]: stack for stack in sequence.stacks} if sequence is not None else {}
    gathers = {ends.get(stack, (stack,))[-1] for stack in splits.values()}
    is_open: str | None = None
    for segment, layer in enumerate(stages.plan.order.calls):
        if is_open is not None:
            stages.split[segment] = is_open
        is_open = None if layer in gathers else splits.get(layer, is_open)


def build_local_stages(model: nn.Module, plan: PipelinePlan, *, own: Collection[int]) -> Stages:
    """Turns `model` into the stages `own`, in place; names stay. Communicates nothing.

    Parameters of other stages are removed: they take no memory, and `named_parameters()` does not list them.
    """
    stages = Stages(own=tuple(own), model=model, plan=plan)
    layers = set(plan.order.calls)
    around = {"", *itertools.chain.from_iterable(list(upwards(layer))[1:] for layer in layers)}
    passed = layers & plan.order.returns.keys()  # no code of theirs runs where they are foreign

    def runs(name: str) -> bool:
        return nearest(name, passed) is None

    _drop_foreign_parameters(model, stages, runs)
    for name, module in list(model.named_modules()):
        if name in around and name and type(module).forward is not nn.Module.forward:
            apply_mixin(module, LayerContainer, _stages=stages)
        elif name not in around and (name in layers or runs(name)):
            stages.modules[module] = Module(name, type(module), is_layer=name in layers)
            apply_mixin(module, StageAwareCall, _stages=stages)
        if isinstance(module, PreTrainedModel):
            apply_mixin(module, MayHaveNoParameters)
    apply_mixin(model, StagedModel, _stages=stages)
    return stages


def _drop_foreign_parameters(model: nn.Module, stages: Stages, runs: Callable[[str], bool]) -> None:
    """Replaces the parameters of other stages by placeholders; also notes some for what runs in others' segments."""
    first: dict[int, str] = {}
    names: dict[tuple[nn.Module, str], list[str]] = {}
    tied: dict[str, str] = {}
    for owner, module in model.named_modules(remove_duplicate=False):
        for own, value in module._parameters.items():
            if value is not None:
                fqn = fqn_of(owner, own)
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
            stages.foreign[module, own] = fqns[0]
        elif runs(fqns[0]):
            stages.absent[module, own] = absent
