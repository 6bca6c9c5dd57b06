"""Splits a model in a fixed order: first all checks, then all edits."""

import inspect
import warnings
from collections.abc import Iterator
from typing import TypeVar

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from transformers import PreTrainedModel

from shardwise.errors import ConfigError, PlanError, UnsupportedError
from shardwise.loss.logits import apply_deferral
from shardwise.mesh import Mesh
from shardwise.parallel.adapters import apply_adapters
from shardwise.parallel.compiled import apply_compilation, check_compilation
from shardwise.parallel.facts import output_head
from shardwise.parallel.fsdp import apply_data_parallelism, check_data_parallelism
from shardwise.parallel.recompute import apply_recomputation, find_recomputed
from shardwise.parallel.stages import apply_stages, finish_placeholders
from shardwise.parallel.state_dict_guard import guard_state_dict
from shardwise.parallel.tensor_parallel import (
    apply_sequence_parallelism,
    apply_tensor_parallelism,
    check_tensor_parallelism,
    split_parameters,
)
from shardwise.parameters.registry import DataHandling, Registry, attach_registry, entries_of, is_split, note_parameters
from shardwise.plan.decision import SplitPlan
from shardwise.plan.options import ParallelSpec, Precision
from shardwise.plan.structure import fqn_of
from shardwise.runtime.adapter_facts import find_model
from shardwise.runtime.arguments import Arguments, edit_arguments
from shardwise.runtime.context import SplitContext
from shardwise.runtime.host_masks import leave_out_cache
from shardwise.runtime.modes import has_dropout, refuse_wrapped
from shardwise.runtime.reading import Casting, cast_in_forward, read_through

Model = TypeVar("Model", bound=nn.Module)


def train_without_cache(model: nn.Module, *, recomputes: bool) -> None:
    """Makes training forwards with gradients run with `use_cache=False`, unless the caller passes `use_cache`. A cache
    stores keys and values a second time, and its state makes `torch.compile` compile every layer separately.
    """

    def without_cache(module: nn.Module, arguments: Arguments) -> None:
        if torch.is_grad_enabled() and (module.training or recomputes):
            if recomputes and arguments.get("use_cache"):
                raise ConfigError(
                    "use_cache=True under recomputation", fix="leave it out, or run under torch.no_grad()"
                )
            leave_out_cache(module, arguments)

    for module in _cache_builders(model):
        edit_arguments(module, without_cache)


def _cache_builders(module: nn.Module) -> Iterator[nn.Module]:
    """Yields the outermost modules that take `use_cache`, and the models inside them, which may be called directly."""
    takes_it = "use_cache" in inspect.signature(module.forward).parameters
    if takes_it:
        yield module
    for child in module.children():
        if not takes_it or isinstance(child, PreTrainedModel):
            yield from _cache_builders(child)


def apply_precision(model: nn.Module, registry: Registry, precision: Precision | None) -> None:
    """Makes a split model compute in the dtype of `precision`, in place. FSDP2 casts the parameters that it shards."""
    registry.precision = precision
    if precision is None:
        return
    dtype = getattr(torch, precision.compute)
    for name, parameter in model.named_parameters():
        is_wider = parameter.is_floating_point() and parameter.dtype.itemsize > dtype.itemsize
        if is_wider and not parameter.requires_grad:  # it is never updated
            registry.frozen[name] = dtype
            parameter.data = parameter.data.to(dtype)
    if precision.params == precision.compute == "bfloat16":
        warnings.warn(
            f"parameters are kept in {precision.params}: updates smaller than 1/256 of a weight are lost to rounding, "
            "which Adam's usually are; Precision() keeps them in float32 and computes in bfloat16",
            stacklevel=3,
        )
    if precision.compute == precision.params:
        return
    registry.casting = casting = Casting(dtype)
    if registry.mesh.data_size > 1:
        _cast_what_is_kept_in_full(model, registry, casting)
        return
    for owner in model.modules():
        for name in _floats(owner):
            read_through(owner, name, casting)
    for module in (*(model.get_submodule(each) for unit in registry.plan.data.units for each in unit), model):
        cast_in_forward(module, casting)


def _cast_what_is_kept_in_full(model: nn.Module, registry: Registry, casting: Casting) -> None:
    """Casts the parameters that every data rank holds in full. Scalars do not change the dtype of results, and stay."""
    for name, module in model.named_modules():
        entries = {own: registry.entry(fqn_of(name, own)) for own in _floats(module)}
        kept = [own for own, entry in entries.items() if entry.data is DataHandling.ALL_REDUCE and entry.layout.shape]
        for own in kept:
            read_through(module, own, casting)
        if kept:
            cast_in_forward(module, casting)


def _floats(module: nn.Module) -> list[str]:
    return [name for name, value in module._parameters.items() if value is not None and value.is_floating_point()]


def apply_plan(
    model: nn.Module, mesh: Mesh, plan: SplitPlan, spec: ParallelSpec, *, dtype: torch.dtype | None = None
) -> Registry:
    """Splits `model` (real, meta or fake) over `mesh` in place; parameter names stay. Communicates nothing.

    All checks come before all edits, so a model that cannot be split is unchanged.

    Args:
        plan: plan resolved for this model and mesh, the same on every rank.
        spec: the request. Its plan is already resolved in `plan`.
        dtype: dtype to which floating-point parameters are converted before FSDP2 takes them; None keeps theirs.
    """
    context = SplitContext.of(mesh, has_dropout=has_dropout(model))
    registry = Registry(mesh=mesh, plan=plan, context=context, tied=plan.tied)
    check_tensor_parallelism(model, plan)
    recomputed = find_recomputed(model, plan.stacks, spec.recompute)
    check_compilation(spec.compilation, context)
    check_data_parallelism(model, spec.fsdp, mesh, reduce="" if spec.precision is None else spec.precision.reduce)
    # What other stages hold goes first, so that nothing is done to it.
    note_parameters(model, registry)
    apply_stages(model, registry)
    # Then from the inside out. Modules change by the shapes of the parameters that they have by then.
    split_parameters(model, registry)
    if plan.num_parts > 1:
        apply_tensor_parallelism(model, registry)
        apply_sequence_parallelism(model, registry)
    if (plan.pipeline is None and spec.fsdp.units is None) or mesh.size("fsdp") == 1:
        # The head's weight stays gathered until backward.
        head = output_head(find_model(model))
        apply_deferral(head, context, _most_classes(head, context))
    apply_adapters(model, registry)
    attach_registry(model, registry)
    guard_state_dict(model, registry)
    model.register_forward_pre_hook(lambda module, _: context.begin_forward(module), prepend=True)
    model.register_forward_hook(lambda module, *_: context.end_forward(module), always_call=True)
    # FSDP2 takes parameters as they are: of this dtype, on this device.
    if dtype is not None:
        model.to(dtype)
    move_model(model, mesh.device)
    apply_precision(model, registry, spec.precision)
    # These wrap blocks, with all that tensor parallelism does in them.
    apply_recomputation(model, registry, spec.recompute, recomputed)
    apply_compilation(model, registry, spec.compilation, budget=spec.recompute.budget)
    train_without_cache(model, recomputes=spec.recompute.mode != "none")
    # FSDP2 gathers a unit before anything in it runs, or runs again.
    apply_data_parallelism(model, registry, spec.fsdp)
    compute_dtype = dtype if spec.precision is None else getattr(torch, spec.precision.compute)
    finish_placeholders(registry, compute_dtype)
    return registry


def move_model(model: Model, device: torch.device | str) -> Model:
    """Moves a model to a device. Fake tensors cannot be moved; meta tensors are loaded later."""
    tensors = (*model.parameters(), *model.buffers())
    is_real = not any(value.is_meta or isinstance(value, FakeTensor) for value in tensors)
    return model.to(device) if is_real else model


def _most_classes(head: nn.Module | None, context: SplitContext) -> int | None:
    """Returns the largest number of a split head's classes on one tp rank; None if the head is not split."""
    entry = entries_of(head).get("weight") if head is not None else None
    return context.tp.even_sizes(entry.layout.shape[0])[0] if entry is not None and entry.split is not None else None


def check_unsplit(model: nn.Module) -> None:
    """Raises `PlanError` if the model is already split, `UnsupportedError` if a torch wrapper holds it."""
    refuse_wrapped(*model.modules())
    if any(parameter.is_inference() for parameter in model.parameters()):
        raise UnsupportedError(
            f"a {type(model).__name__} that was made under torch.inference_mode()",
            why="autograd does not accept its parameters",
            fix="make or load it outside, or under torch.no_grad()",
        )
    if is_split(model):
        raise PlanError(f"this {type(model).__name__} is split already", fix="split a model once, from the unsplit one")
