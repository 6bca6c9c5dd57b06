"""Splits a model by its options: makes the plan once, lets all ranks agree on it, and applies it.

Only rank 0 derives rules and runs tiny models. All ranks compare the input (shapes, values, options) and the resulting
plan before anything is changed.
"""

import json
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from shardwise.comm.agree import agree_on, gather_from_all, raise_on_all_ranks
from shardwise.errors import ConfigError, UnsupportedError
from shardwise.estimate.cuts import check_layers, check_pipeline
from shardwise.lora.inject import check_adapters, check_prompts, guard_wrapper
from shardwise.loss.label_use import LabelUse, label_use_of, note_label_use
from shardwise.mesh import Mesh
from shardwise.optim.gradients import track_gradients
from shardwise.optim.optimizer import watch_optimizers
from shardwise.parallel.apply import apply_plan, check_unsplit
from shardwise.parallel.compiled import check_compilation
from shardwise.parallel.facts import decide_split, read_facts, read_stacks
from shardwise.parameters.assigned import check_assignments
from shardwise.parameters.registry import Registry, is_split
from shardwise.parameters.replicas import tensor_digest
from shardwise.pipeline.forward import apply_pipeline
from shardwise.plan.decision import SplitPlan
from shardwise.plan.options import ParallelSpec
from shardwise.plan.pipeline_plan import LayerOrder
from shardwise.plan.spec import Plan
from shardwise.plan.structure import ModelFacts, outermost_layers
from shardwise.probe.label_use import find_label_use
from shardwise.probe.layer_order import find_layer_order
from shardwise.runtime.adapter_facts import find_model, without_adapters
from shardwise.runtime.modes import refuse_ddp
from shardwise.search.planning import plan_for
from shardwise.sharding.json_form import to_json
from shardwise.topology.shape import UNSERVED_AXES, MeshShape


def prepare(given: nn.Module, mesh: Mesh, spec: ParallelSpec, *, dtype: torch.dtype | None = None) -> Registry:
    """Plans the split of a model (real or meta) over `mesh` and splits it in place; returns the registry of its
    parameters.

    `parallelize` calls this, and so does `load` before it reads weights. `dtype`: see `apply_plan`.

    Raises:
        PlanError: the plan cannot be applied; the same error on every rank, before anything is changed.
        RankError: the ranks' models or options differ.

    Communicates: a few gathers of small objects over all ranks.
    """
    model = find_model(given)
    plan, use = _decide_together(model, mesh, spec)
    check_prompts(given, plan)
    _note_labels(model, use)
    with raise_on_all_ranks(mesh.group(), "splitting the model"):
        registry = apply_plan(model, mesh, plan, spec, dtype=dtype)
    complete_split(model, registry)
    guard_wrapper(given, registry)
    return registry


def complete_split(model: nn.Module, registry: Registry) -> None:
    """Prepares a split model for training: gradient hooks, the pipeline runner, and optimizer hooks.

    Communicates: creates process groups for shared parameters and for the pipeline.
    """
    open_subgroups(registry)
    track_gradients(model, registry)
    apply_pipeline(model, registry)
    watch_optimizers()
    check_assignments(model)
    if registry.mesh.shape.world_size > 1:
        model.register_forward_pre_hook(refuse_ddp, prepend=True)


def check_options(shape: MeshShape, spec: ParallelSpec) -> None:
    """Raises if the options are invalid for every mesh of this shape, whatever the model. The same on every rank.

    Raises:
        ConfigError: the schedule is unknown or does not support these stages, a layout without pp has a pipeline
            option, recomputation is combined with a split backward, or torch has no such compiler.
        UnsupportedError: the layout has an axis that is not implemented.
    """
    unserved = {axis: shape.size(axis) for axis in UNSERVED_AXES if shape.size(axis) > 1}
    if unserved:
        raise UnsupportedError(
            f"layout {shape} uses " + ", ".join(f"{axis}{size}" for axis, size in unserved.items()),
            why="only pp, ddp, fsdp and tp are supported so far",
            fix=f"use fsdp{shape.world_size} or tp{shape.world_size}",
        )
    check_pipeline(spec.pipeline, shape, spec.recompute)
    check_compilation(spec.compilation)


def observe_labels(model: nn.Module) -> None:
    """Finds out by a tiny run how a causal language model uses its labels, and records it on the model."""
    _note_labels(model, _label_use(model))


def _note_labels(model: nn.Module, use: LabelUse | None) -> None:
    if use is not None and label_use_of(model) is None:
        note_label_use(model, use)


def _label_use(model: nn.Module) -> LabelUse | None:
    return label_use_of(model) or find_label_use(model)


def decide(model: nn.Module, shape: MeshShape, spec: ParallelSpec) -> SplitPlan:
    """Returns the resolved plan for `model` on a mesh of this shape, in one process. Changes and communicates nothing.

    Raises the errors of `check_options` and `prepare`.
    """
    check_options(shape, spec)
    facts = _read(model, shape)
    rules, order = _find(model, facts, shape, spec)
    return decide_split(rules, model, facts, shape, spec, order=order)


def _find(model: nn.Module, facts: ModelFacts, shape: MeshShape, spec: ParallelSpec) -> tuple[Plan, LayerOrder | None]:
    """Returns the rules for splitting the model, and for a pipeline the order of its layers."""
    order = find_layer_order(without_adapters(model)) if shape.pp_size > 1 else None
    return plan_for(model, spec, num_parts=shape.tp_size, facts=facts), order


def _check_cuts(model: nn.Module, shape: MeshShape, spec: ParallelSpec) -> None:
    """Raises on every rank if the pipeline does not fit the layers, as registered or (slower) as they run."""
    if shape.pp_size == 1 or is_split(model):
        return
    try:
        check_layers(spec.pipeline, len(outermost_layers(read_stacks(model))), pp_size=shape.pp_size)
    except ConfigError:
        check_layers(spec.pipeline, len(find_layer_order(without_adapters(model)).calls), pp_size=shape.pp_size)


def _decide_together(model: nn.Module, mesh: Mesh, spec: ParallelSpec) -> tuple[SplitPlan, LabelUse | None]:
    """Runs `decide` on rank 0 for all ranks, which must agree; also returns how the model uses its labels."""
    if mesh.shape.world_size == 1:
        return decide(model, mesh.shape, spec), _label_use(model)
    check_options(mesh.shape, spec)
    _check_cuts(model, mesh.shape, spec)

    def read() -> tuple[ModelFacts, dict[str, str]]:
        facts = _read(model, mesh.shape)
        return facts, _describe(model, facts, mesh.shape, spec)

    def find() -> Any:
        return None if mesh.rank else (*_find(model, facts, mesh.shape, spec), _label_use(model))

    def resolve() -> tuple[SplitPlan, dict[str, str]]:
        plan = decide_split(rules, model, facts, mesh.shape, spec, order=order)
        return plan, _parts_of(plan)

    facts = agree_on(
        mesh.group(),
        read,
        doing="reading the model",
        what="the ranks were given different models or options",
        fix="build it from the same files on every rank, and what is drawn at random after the same torch.manual_seed",
    )
    rules, order, use = gather_from_all(mesh.group(), "planning", find)[0]
    plan = agree_on(
        mesh.group(),
        resolve,
        doing="resolving the plan",
        what="the ranks have made different plans",
        fix="use the same versions of all libraries",
    )
    return plan, use


def _read(model: nn.Module, shape: MeshShape) -> ModelFacts:
    """Returns the facts about a model that will be split over a mesh of this shape; raises if it cannot be."""
    check_unsplit(model)
    check_adapters(model, shape)
    return read_facts(model)


def _parts_of(plan: SplitPlan) -> dict[str, str]:
    """Returns the parts of a plan as text, by name."""
    found: dict[str, str] = {}
    for name, value in to_json(plan).items():
        parts = value.items() if isinstance(value, dict) else [("", value)]
        found |= {f"the plan's {name} {part}".rstrip(): json.dumps(each) for part, each in parts}
    return found


def _describe(model: nn.Module, facts: ModelFacts, shape: MeshShape, spec: ParallelSpec) -> dict[str, str]:
    """Returns everything that must be equal on every rank, as text by name."""
    values = {
        name: fingerprint(value) for name, value in (*model.named_parameters(), *model.named_buffers()) if value.numel()
    }
    # Integers of modules are compared where the plan uses them: others may be what a forward has left there.
    own = getattr(model, "config", None)
    config = own.to_dict() if isinstance(own, PreTrainedConfig) else {}
    for name in ("_name_or_path", "architectures", "dtype"):  # saving sets these, which rank 0 may have done alone
        config.pop(name, None)
    return (
        {
            "the layout": str(shape),
            "the adapters": str(facts.adapters),
            "the class": type(model).__qualname__,
            "the options": repr(spec),
        }
        | {f"module {name!r}": str(replace(module, attributes={})) for name, module in facts.modules.items()}
        | {f"the config's {name}": repr(value) for name, value in config.items()}
        | {f"requires_grad of {name}": str(value.requires_grad) for name, value in model.named_parameters()}
        | {f"the values of {name}": value for name, value in values.items()}
    )


@torch.no_grad()
def fingerprint(value: Tensor) -> str:
    """Returns a text that differs for different values with near certainty; for meta tensors, the dtype."""
    if value.is_meta:
        return str(value.dtype)
    return f"{value.dtype}, digest {int(tensor_digest(value)) % 2**64:016x}"


def open_subgroups(registry: Registry) -> None:
    """Creates the process groups that this model needs besides the mesh's. Every rank calls it at the same point."""
    for entry in registry.entries.values():
        if entry.holders:
            registry.mesh.subgroup("tp", entry.holders)
        if len(entry.stage_coords) > 1:
            registry.mesh.subgroup("pp", (entry.stage_coords,))
    roots: Any = [registry.data_root] if registry.data_root is not None else registry.stage_roots.values()
    for root in roots if registry.policy.separate_reduce_group else ():
        root.set_separate_reduce_scatter_group(True)
