"""Hand-written models with parallel layers, registered like any other split model.

State dicts keep this rank's parts, because such code saves them per rank.
"""

import copy
import inspect
from collections.abc import Callable, Collection, Mapping
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from shardwise.api.prepare import complete_split
from shardwise.api.sources import Place, fill_later
from shardwise.comm.agree import raise_on_all_ranks, run_serially
from shardwise.compat.layers.grouped import note_heads
from shardwise.compat.layers.split_module import SplitModule, by_hand, layout_of, running_alone
from shardwise.errors import LayoutError, UnsupportedError, listed
from shardwise.estimate.cuts import cut
from shardwise.lora.inject import guard_wrapper
from shardwise.mesh import Mesh
from shardwise.parallel.apply import check_unsplit, move_model
from shardwise.parallel.build import allocate_meta, initialize_meta
from shardwise.parallel.facts import read_facts
from shardwise.parallel.fsdp import apply_data_parallelism, check_data_parallelism
from shardwise.parallel.loading import put_tensor
from shardwise.parallel.recompute import apply_recomputation, find_recomputed
from shardwise.parallel.stages import apply_stages, finish_placeholders
from shardwise.parallel.state_dict_guard import split_state
from shardwise.parameters.canonical import local_tensor
from shardwise.parameters.registry import Registry, attach_registry, is_split, note_parameters, registry_of
from shardwise.parameters.replicas import find_unequal_replicas
from shardwise.plan.data_axes import with_data_axes
from shardwise.plan.decision import ParameterPlan, SplitPlan
from shardwise.plan.options import FsdpPolicy, Pipeline, Recompute, check_kind
from shardwise.plan.pipeline_plan import LayerOrder
from shardwise.plan.rule import ParameterRule
from shardwise.plan.structure import fqn_of
from shardwise.probe.layer_order import no_stages, no_stages_because, tried_order
from shardwise.probe.trial import reraise_as
from shardwise.runtime.adapter_facts import find_model
from shardwise.runtime.context import SplitContext
from shardwise.runtime.modes import has_dropout
from shardwise.tiny.inputs import clone_batch, guess_batches
from shardwise.tiny.models import fork_all_rng, set_runnable_mode


def build_in_turns(
    build: Callable[[], nn.Module],
    mesh: Mesh,
    *,
    ranks_at_a_time: int,
    on_meta: bool = False,
    fill: Callable[..., Any] | None = None,
) -> nn.Module:
    """Builds the model on the mesh's device, or on the CPU if it will be cut into stages. Limits the ranks that build
    at the same time.

    Args:
        build: must not communicate.
        on_meta: build on the meta device, without memory, and fill the parameters afterwards.
        fill: called with every module, and with the device if it takes one; None: the modules' initial values.

    Communicates: one gather of a small object over all ranks per turn.
    """

    def built() -> nn.Module:
        with torch.device("meta") if on_meta else nullcontext():
            model = build()
        check_kind("the model", model, nn.Module, fix="let model_fn return a torch module")
        return model

    turn, num_turns = mesh.rank // ranks_at_a_time, -(-mesh.shape.world_size // ranks_at_a_time)
    model = run_serially(built, mesh.group(), turn=turn, num_turns=num_turns, doing="building the model")
    assert model is not None
    device = torch.device("cpu") if mesh.size("pp") > 1 else mesh.device
    if on_meta and fill is not None:
        allocate_meta(model, device)
        with torch.random.fork_rng(devices=()):  # what `fill` leaves out, such as buffers, starts as in the model
            for module in model.modules() if isinstance(model, PreTrainedModel) else ():
                model._init_weights(module)  # type: ignore[operator]
        given = (device,) if len(inspect.signature(fill).parameters) > 1 else ()
        for module in model.modules():
            fill(module, *given)
        if isinstance(model, PreTrainedModel):
            model.tie_weights()
    elif on_meta:
        initialize_meta(model)
    return model.to(device)


def adopt_model(
    given: nn.Module,
    mesh: Mesh,
    *,
    policy: FsdpPolicy | None = None,
    recompute: Recompute | None = None,
    order: LayerOrder | None = None,
    pipeline: Pipeline | None = None,
) -> Registry:
    """Registers a hand-written model, in place: every parameter gets an entry, split or replicated over tp, and this
    rank's parts move to the mesh's device.

    Args:
        given: `SplitModule`s over `mesh` and any other modules, or PEFT's model around them. A parameter with the
            attribute `sequence_parallel_enabled` is used on parts of the sequence, so its gradient is summed over tp. A
            parameter may be split `by_hand`.
        policy: how `fsdp` shards it; default: every data rank holds all of it.
        order: the order of the layers; the model is then cut into pipeline stages.

    Communicates: creates groups for replicated parts of split parameters. From then on every backward averages
    gradients over the data ranks, and sums them over tp where they are partial.
    """
    model = find_model(given)
    with raise_on_all_ranks(mesh.group(), "reading the model"):
        check_unsplit(model)
    note_heads(model, mesh)
    facts = read_facts(model)
    stages = cut(order, facts, pipeline or Pipeline(), pp_size=mesh.size("pp")) if order is not None else None
    policy = policy or (FsdpPolicy(zero_stage=1) if stages is not None else None)
    plan = replace(_plan(model, mesh, policy), stacks=facts.stacks)
    if policy is not None:
        plan = with_data_axes(plan, facts, mesh.shape, stages)
    registry = Registry(mesh=mesh, plan=plan, context=SplitContext.of(mesh), tied=plan.tied, local_state=True)
    recompute = recompute or Recompute()
    recomputed = find_recomputed(model, plan.stacks, recompute)
    if policy is not None:
        check_data_parallelism(model, policy, mesh)
    note_parameters(model, registry)
    apply_stages(model, registry)
    attach_registry(model, registry)
    model.register_load_state_dict_pre_hook(split_state)
    move_model(model, mesh.device)
    apply_recomputation(model, registry, recompute, recomputed)
    if policy is not None:
        apply_data_parallelism(model, registry, policy)
    finish_placeholders(registry, compute_dtype=None)
    complete_split(model, registry)
    guard_wrapper(given, registry)
    for module in model.modules():
        if isinstance(module, SplitModule):
            module.mark_parameters()
    return registry


def check_equal_replicas(model: nn.Module) -> None:
    """Raises `LayoutError` on every rank if ranks hold different copies of a parameter.

    Communicates: over all ranks, one gather of digests.
    """
    if names := find_unequal_replicas(model):
        raise LayoutError(
            f"the ranks hold different copies of {listed(names, 1)}",
            why="they drew other random numbers; or each tp rank holds a part of it, and nothing says so",
            fix="call torch.manual_seed alike on every rank before the model is built; of a parameter that you "
            "sliced, set tensor_model_parallel = True and partition_dim",
        )


def _plan(model: nn.Module, mesh: Mesh, policy: FsdpPolicy | None) -> SplitPlan:
    names: dict[int, str] = {}
    tied: dict[str, str] = {}
    parameters: dict[str, ParameterPlan] = {}
    for name, module in model.named_modules():
        for own, parameter in module._parameters.items():
            if parameter is None:
                continue
            fqn = fqn_of(name, own)
            first = names.setdefault(id(parameter), fqn)
            if first != fqn:
                tied[fqn] = first
                continue
            split = module.placements.get(own) if isinstance(module, SplitModule) else None
            split = split or by_hand(parameter, mesh)
            layout = layout_of(parameter.shape, split, mesh, data_axes=policy is None)
            # Our own modules list them: marks are lost where parameters are replaced. Other modules have marks alone.
            is_partial = own in getattr(module, "partial_parameters", ()) or getattr(
                parameter, "sequence_parallel_enabled", False
            )
            parameters[fqn] = ParameterPlan(
                fqn=fqn,
                layout=layout,
                rule=ParameterRule(fqn, "replicate" if split is None else f"split({split.dim})", source="module"),
                gradient="partial" if is_partial and mesh.size("tp") > 1 else "full",
                data="reduced" if mesh.data_size > 1 and policy is None else "",
                stages=(mesh.coord("pp"),),
            )
    return SplitPlan(shape=mesh.shape, parameters=parameters, tied=tied)


def layer_order_by_hand(model: nn.Module, mesh: Mesh, *, layers: Collection[str] = ()) -> LayerOrder:
    """Does the work of `find_layer_order` for a hand-written model. It has no tiny model, so copies of the model itself
    run, on the first batch of `guess_batches` that works.

    Args:
        model: real, the same on every rank; may hold parallel layers over tp of `mesh`.
        layers: the modules at which it may be cut; default: the items of its outermost `nn.ModuleList`s.

    Communicates: one gather of a small object over all ranks, and before it what `note_heads` does.
    """
    note_heads(model, mesh)
    name = type(model).__name__
    with (
        raise_on_all_ranks(mesh.group(), "finding the layers of the model"),
        running_alone(model, mesh),
        reraise_as(no_stages_because(name)),
        fork_all_rng(),
        torch.enable_grad(),
    ):
        own = move_model(copy.deepcopy(model), "cpu")
        batch = _taken_batch(own)
        set_runnable_mode(own, batch)
        return tried_order(own, batch, layers=layers, drops=has_dropout(model))


def _taken_batch(model: nn.Module) -> dict[str, Tensor]:
    fault: Exception | None = None
    for batch in guess_batches(model):
        try:
            with torch.no_grad():
                copy.deepcopy(model)(**clone_batch(batch))
        except Exception as error:  # noqa: BLE001 - it takes other inputs
            fault = fault or error
        else:
            return batch
    raise no_stages(
        type(model).__name__,
        f"it takes none of the inputs that were tried, token ids and numbers: {fault}",
        at="",
        fix="let forward take token ids or numbers",
    )


def split_rewritten(
    model: nn.Module,
    mesh: Mesh,
    rewrite: Callable[[], nn.Module],
    *,
    checkpoint: Place | None = None,
    ranks_at_a_time: int | None = None,
) -> nn.Module:
    """Splits a model whose modules `rewrite` replaces by parallel layers. A new parameter with the name and full shape
    of an old one receives its part of the old values.

    Args:
        rewrite: changes the model, and returns it or another one, which is the result.
        checkpoint, ranks_at_a_time: see `fill_later`.

    Communicates: like `adopt_model` and `fill_later`; nothing if `rewrite` has split the model itself.
    """
    with fill_later(model, mesh, checkpoint=checkpoint, ranks_at_a_time=ranks_at_a_time) as fill:
        before = dict(model.named_parameters(remove_duplicate=False))
        with raise_on_all_ranks(mesh.group(), "rewriting the model"):
            model = rewrite()
            if mesh.size("pp") > 1 and not is_split(model):
                raise UnsupportedError(
                    f"a model rewritten by hand on {mesh.shape}",
                    why="it cannot be cut into stages",
                    fix="use pp_size 1, or the automatic split",
                )
        if not is_split(model):
            adopt_model(model, mesh)
        registry = registry_of(model)
        if registry.local_state:
            _take_over(model, registry, before)
            if not any(value.is_meta for value in model.parameters()):
                model.to(mesh.device)
        fill(registry)
    return model


def _take_over(model: nn.Module, registry: Registry, before: Mapping[str, nn.Parameter]) -> None:
    """Copies its part of the old parameter to each new parameter of the same name; meta parameters stay meta."""
    for fqn, value in list(model.named_parameters()):
        old, entry = before.get(fqn), registry.entry(fqn)
        if old is not None and old is not value and tuple(old.shape) == entry.layout.shape:
            if old.is_meta:
                own = torch.empty(entry.layout.local_shape(registry.mesh.coords), dtype=old.dtype, device="meta")
            else:
                own = local_tensor(old.detach(), entry.layout, registry.mesh.coords).to(registry.mesh.device)
            put_tensor(model, registry, entry.fqn, own)
