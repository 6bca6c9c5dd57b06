"""Guards a model's state dict, hooks and pickling, so that a rank's part is never taken for the full tensor."""

from __future__ import annotations

import copy
import math
import sys
from collections.abc import Callable, Mapping
from functools import partial
from types import MethodType
from typing import Any, NoReturn

from torch import nn
from transformers import PreTrainedModel

from shardwise.errors import UnsupportedError
from shardwise.parameters.canonical import take_parts
from shardwise.parameters.registry import (
    ParameterEntry,
    Registry,
    canonical_entries,
    entry_of,
    find_parameters,
    named_entries,
    registry_of,
)
from shardwise.plan.decision import SplitPlan
from shardwise.runtime.context import SplitContext
from shardwise.runtime.linear import apply_mixin

__all__ = ["guard_hooks", "guard_state_dict", "local_state_dict"]

_REFUSAL = "_shardwise_refusal"

_HOOKS = (
    "register_forward_pre_hook",
    "register_forward_hook",
    "register_full_backward_pre_hook",
    "register_full_backward_hook",
)

_BACKWARD_HOOK = "register_full_backward_hook"

_EXPORT = "use shardwise.full_state_dict(model), or shardwise.export_pretrained(model, directory) to save"


def guard_state_dict(model: nn.Module, registry: Registry) -> None:
    """Makes `state_dict()` refuse where tp splits parameters or other stages hold some, and `load_state_dict` take this
    rank's parts of full tensors.

    What only the data axes shard is left as the `DTensor` it is, which says so itself. Every module that owns such a
    parameter refuses, so `model.model.state_dict()` does too. Pickling is refused in any case: hooks are no data.
    """
    attributes = dict(vars(model))
    vars(model).clear()
    vars(model).update({_REFUSAL: _RefusePickle(type(model).__name__), **attributes})
    if registry.stages is not None or registry.mesh.data_mesh is not None:
        apply_mixin(model, _RefusesPickle)
    _keep_tied(model)
    if registry.mesh.shape.world_size == 1:
        return
    name, shape = type(model).__name__, registry.plan.shape
    over = [f"{axis}={shape.size(axis)}" for axis in ("pp", "tp") if shape.size(axis) > 1]

    def refuse(*_: Any) -> None:
        if registry.reads_names:
            return
        raise UnsupportedError(
            f"state_dict() of a {name} that is split over {' and '.join(over)}",
            why="this rank holds parts of its parameters, which would be taken for full ones",
            fix=_EXPORT,
        )

    held = registry.plan.names_held(registry.mesh.coord("pp"))
    fqns = [
        fqn for fqn in (*registry.entries, *registry.tied) if registry.entry(fqn).split is not None or fqn not in held
    ]
    for owner in sorted({fqn.rpartition(".")[0] for fqn in fqns}):
        model.get_submodule(owner).register_state_dict_pre_hook(refuse)
    model.register_load_state_dict_pre_hook(_split)
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            module.resize_token_embeddings = _refuse_resize
            module.save_pretrained = partial(_refuse_saving, "save_pretrained")
            module.push_to_hub = partial(_refuse_saving, "push_to_hub")
            module.num_parameters = MethodType(_num_parameters, module)
            if registry.stages is not None:
                module.tie_weights = _keep_ties


def local_state_dict(model: nn.Module, *args: Any, **kwargs: Any) -> dict[str, Any]:
    """`state_dict()` of a split model with this rank's parts, for whoever saves and loads rank by rank."""
    registry = registry_of(model)
    before, registry.reads_names = registry.reads_names, True
    try:
        return model.state_dict(*args, **kwargs)
    finally:
        registry.reads_names = before


class _RefusesPickle:
    """Mixin of a model whose class, that of stages or of FSDP2, is none that pickle finds: the refusal comes before."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        reduced: Any = super().__reduce_ex__(protocol)
        return _build, (self.__dict__[_REFUSAL], type(self)), reduced[2]  # what copies are made by too


def _build(refusal: _RefusePickle, kind: type) -> Any:
    return object.__new__(kind)


class _RefusePickle:
    """The first attribute of a split model, so that pickle meets it before anything that it cannot take."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __reduce__(self) -> NoReturn:
        raise UnsupportedError(
            f"pickling a {self._name} that is split (pickle, torch.save)",
            why="it is parts on several ranks and hooks that communicate",
            fix=_EXPORT,
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> _RefusePickle:
        return self


def guard_hooks(model: nn.Module, registry: Registry) -> None:
    """Makes modules refuse hooks, to which a rank's part of heads, features or the sequence would look like all of it,
    and backward hooks, to which one rank's term of a gradient would look like the sum.

    During a forward they accept them: transformers installs its own there, for what `install_outputs` makes full.
    """
    plan, sequence = registry.plan, registry.plan.sequence
    if plan.tp_size > 1:
        _own_copies(model)
    regions = tuple(f"{region.fqn}." for region in plan.regions)
    for name, module in model.named_modules() if plan.tp_size > 1 else ():
        part = ""
        if name.startswith(regions):
            part = "what heads or features compute"
        elif sequence is not None and (name in sequence.full_sequence or plan.stack_of(name) is not None):
            part = "the sequence"
        for method in _HOOKS if part else ():
            module.__dict__[method] = MethodType(_guarded(method, name, part, registry.context), module)
        if not part and _has_partial_gradients(name, plan):
            module.__dict__[_BACKWARD_HOOK] = MethodType(_guarded_backward(name, registry.context), module)
        if plan.direct and name == plan.embedding:
            module.__dict__["register_forward_hook"] = MethodType(_register_on_full_rows, module)


def _own_copies(model: nn.Module) -> None:
    """Puts copies in place of modules that the file of a parent's class holds for every model (OpenAI GPT's
    activations): what is installed on them would be on those of unsplit models, too.
    """
    files = {kind.__module__ for module in model.modules() for kind in type(module).__mro__} - {"__main__"}
    values = [value for file in files if file in sys.modules for value in vars(sys.modules[file]).values()]
    values += [each for value in values if isinstance(value, dict) for each in value.values()]
    modules = {value for value in values if isinstance(value, nn.Module) and not (value._parameters or value._modules)}
    copies = {module: copy.deepcopy(module) for module in modules}
    for parent in list(model.modules()) if copies else ():
        parent._modules.update({name: copies[child] for name, child in parent._modules.items() if child in copies})


def _guarded(method: str, name: str, part: str, context: SplitContext) -> Callable[..., Any]:
    def register(module: nn.Module, hook: Any, **options: Any) -> Any:
        if not context.is_under_way:
            raise UnsupportedError(
                f"a hook on {name}, where {part} is split over tp",
                why=f"it would be given this rank's 1 / {context.size} of {part}, which looks like all of it",
                fix="ask for output_hidden_states=True or output_attentions=True, which are full, or leave out "
                f"sequence_parallel; where parts are wanted, call torch.nn.Module.{method}(module, hook)",
            )
        return getattr(nn.Module, method)(module, hook, **options)

    return register


def _has_partial_gradients(name: str, plan: SplitPlan) -> bool:
    """Whether the gradient of a module's input is a term of the sum over tp that it is in the unsplit model."""
    if name == plan.head or any(region.fqn == name for region in plan.regions):
        return True
    sequence = plan.sequence
    if sequence is None or not sequence.partial_after or name in ("", plan.embedding):
        return False
    return not any(stack.fqn == name or stack.fqn.startswith(f"{name}.") for stack in sequence.stacks)


def _guarded_backward(name: str, context: SplitContext) -> Callable[..., Any]:
    def register(module: nn.Module, hook: Any, **options: Any) -> Any:
        raise UnsupportedError(
            f"a backward hook on {name}, where gradients are not summed over tp yet",
            why=f"it would be given one of the {context.size} terms of its input's gradient, which looks like the sum",
            fix="register it on the layer or model around, or register_hook on the tensor that comes in",
        )

    return register


def _register_on_full_rows(module: nn.Module, hook: Any, **options: Any) -> Any:
    """Registers a hook on an embedding whose sum of rows might be deferred to the layers: it no longer is."""
    setattr(module, "_may_defer", False)  # noqa: B010
    return nn.Module.register_forward_hook(module, hook, **options)


def _split(module: nn.Module, state: dict[str, Any], prefix: str, *rest: Any) -> None:
    """Replaces full tensors in a state dict that is about to be loaded by this rank's parts, and leaves out what other
    stages hold.
    """
    entries = named_entries(module)
    if any(entry.stage_coords for entry in entries.values()):
        _choose_names(module, state, prefix, entries)
    take_parts(module, state, prefix)


def _choose_names(module: nn.Module, state: dict[str, Any], prefix: str, entries: Mapping[str, ParameterEntry]) -> None:
    """Leaves those names in `state` by which this rank's stages know parameters."""
    given = {id(entry): state[f"{prefix}{name}"] for name, entry in entries.items() if f"{prefix}{name}" in state}
    held = {name for name, value in module.named_parameters(remove_duplicate=False) if entry_of(value) is not None}
    for name, entry in entries.items():
        state.pop(f"{prefix}{name}", None)
        if name in held and id(entry) in given:
            state[f"{prefix}{name}"] = given[id(entry)]


def _keep_tied(model: nn.Module) -> None:
    """Makes names that have one parameter share the last of them after `load_state_dict(assign=True)`, too, which gives
    each a parameter of its own.
    """
    tied: list[list[tuple[nn.Module, str]]] = []

    def before(module: nn.Module, *_: Any) -> None:
        names: dict[int, list[tuple[nn.Module, str]]] = {}
        for owner in module.modules():
            for name, parameter in owner._parameters.items():
                if parameter is not None:
                    names.setdefault(id(parameter), []).append((owner, name))
        tied[:] = [group for group in names.values() if len(group) > 1]

    def after(module: nn.Module, _: Any) -> None:
        for group in tied:
            owner, name = group[-1]
            for other, alias in group:
                other._parameters[alias] = owner._parameters[name]
        tied.clear()

    model.register_load_state_dict_pre_hook(before)
    model.register_load_state_dict_post_hook(after)


def _num_parameters(model: nn.Module, only_trainable: bool = False, exclude_embeddings: bool = False) -> int:  # noqa: FBT001, FBT002 - transformers' signature
    """As transformers' own, of the full parameters: the same on every rank.

    Raises:
        UnsupportedError: a part is asked for of a model in stages, where this rank does not know what others train.
    """
    held = {name: parameter for name, parameter, _ in find_parameters(model)}
    entries = canonical_entries(model)
    if (only_trainable or exclude_embeddings) and entries.keys() - held.keys():
        raise UnsupportedError(
            "num_parameters of a part of a model in stages",
            why="this rank does not have the modules of other stages",
            fix="ask before shardwise.parallelize splits the model, or for all of them",
        )
    left_out = {name for name, parameter in held.items() if only_trainable and not parameter.requires_grad}
    if exclude_embeddings:
        left_out |= {f"{name}.weight" for name, module in model.named_modules() if isinstance(module, nn.Embedding)}
    shapes: dict[str, tuple[int, ...]] = {name: tuple(parameter.shape) for name, parameter in held.items()}
    shapes |= {name: entry.layout.shape for name, entry in entries.items()}
    return sum(math.prod(shape) for name, shape in shapes.items() if name not in left_out)


def _keep_ties(*args: Any, **kwargs: Any) -> None:
    """Nothing is left to tie: stages know what they share, and hold one of the two at most."""


def _refuse_resize(*args: Any, **kwargs: Any) -> NoReturn:
    raise UnsupportedError(
        "resize_token_embeddings on a split model",
        why="the vocabulary is divided among ranks already",
        fix="resize the unsplit model before shardwise.parallelize, or export and load it again",
    )


def _refuse_saving(name: str, *args: Any, **kwargs: Any) -> NoReturn:
    raise UnsupportedError(
        f"{name} of a split model",
        why="this rank holds parts of its parameters, and other ranks may not have called",
        fix="call shardwise.export_pretrained(model, directory) on every rank",
    )
