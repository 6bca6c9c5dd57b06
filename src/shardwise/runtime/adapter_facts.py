"""Describes the adapters of a model: the names in the base model, and the parameters that the adapters add.

# [Note: adapters are recognised by structure]
PEFT is optional, so code that computes does not import it. A tuner layer holds the wrapped module as `base_layer`. A
trained copy of a module lies next to the original in `modules_to_save`. Both list their own containers in
`adapter_layer_names`. `shardwise.plan.adapters` decides how these parameters are split.
"""

import copy
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any

from torch import nn

from shardwise.plan.structure import Adapted, AdapterFacts, AdapterParameter, fqn_of


def is_adapter(module: nn.Module) -> bool:
    """Returns whether `module` is a PEFT layer that wraps another module and adds to its output."""
    return _is_tuner(module) and not is_saved_copy(module) and base_of(module) is not None


def is_saved_copy(module: nn.Module) -> bool:
    """Returns whether `module` is a PEFT wrapper that runs a trained copy of a module (`modules_to_save`)."""
    return _is_tuner(module) and {"original_module", "modules_to_save"} <= module._modules.keys()


def base_of(module: nn.Module) -> nn.Module | None:
    """Returns the module that a PEFT module wraps, which may be a wrapper too; None if it wraps nothing."""
    inner = module._modules.get("base_layer") or module._modules.get("original_module")
    return inner or next((each for each in module._modules.values() if each is not None and _is_tuner(each)), None)


def unwrapped(module: nn.Module) -> nn.Module:
    """Returns the base module inside all PEFT wrappers around it."""
    while _is_tuner(module) and (base := base_of(module)) is not None:
        module = base
    return module


def has_adapters(model: nn.Module) -> bool:
    """Returns whether any module of the model belongs to PEFT."""
    return any(map(_is_tuner, model.modules()))


def find_model(model: nn.Module) -> nn.Module:
    """Returns the transformers model inside PEFT's two outer wrappers; `model` itself if there are none."""
    tuner = model._modules.get("base_model")
    if tuner is None or not hasattr(model, "peft_config"):
        return model
    if hasattr(type(tuner), "base_model_prefix"):  # transformers' own: prompts are put before it, nothing into it
        return tuner
    return tuner._modules.get("model") or model


def _is_tuner(module: nn.Module) -> bool:
    return hasattr(type(module), "adapter_layer_names")


# Which dim of PEFT's own weights runs along the input and the output features of what they adapt.
_DIMS = {"lora_A": (1, None), "lora_B": (None, 0), "lora_embedding_A": (1, None), "lora_embedding_B": (None, 0)}


@dataclass(frozen=True)
class Place:
    """A module of a model with adapters.

    Attributes:
        fqn: the module's name in the model with adapters.
        base: the module's name in the base model; for a wrapper, the name of the module that it wraps.
        is_wrapper: whether the module wraps a base module and is not itself part of the base.
        is_copy: whether the module is a trained copy (`modules_to_save`) of a base module.
    """

    fqn: str
    module: nn.Module
    base: str
    is_wrapper: bool = False
    is_copy: bool = False


def places_in(model: nn.Module) -> Iterator[Place]:
    """Yields a `Place` for every base module, wrapper and trained copy, once each, in the model's order."""
    seen: set[int] = set()

    def walk(module: nn.Module, fqn: str, base: str, *, is_copy: bool) -> Iterator[Place]:
        if id(module) in seen:
            return
        seen.add(id(module))
        is_wrapper = is_adapter(module) or is_saved_copy(module)
        yield Place(fqn, module, base, is_wrapper, is_copy)
        inner = base_of(module) if is_wrapper else None
        for own, child in module._modules.items():
            if child is None:
                continue
            if not is_wrapper:
                yield from walk(child, fqn_of(fqn, own), fqn_of(base, own), is_copy=is_copy)
            elif child is inner:
                yield from walk(child, fqn_of(fqn, own), base, is_copy=is_copy)
            elif own == "modules_to_save":
                for name, copied in child._modules.items():
                    assert copied is not None
                    yield from walk(copied, f"{fqn_of(fqn, own)}.{name}", base, is_copy=True)

    yield from walk(model, "", "", is_copy=False)


def names_in_base(model: nn.Module) -> dict[str, str]:
    """Maps the FQN of each parameter and buffer outside the adapters to its FQN in the model without adapters."""
    return {
        fqn_of(place.fqn, own): fqn_of(place.base, own)
        for place in places_in(model)
        if not place.is_wrapper
        for own, value in (*place.module._parameters.items(), *place.module._buffers.items())
        if value is not None
    }


def read_adapters(model: nn.Module) -> AdapterFacts | None:
    """Returns the facts about the model's adapters; None if it has none."""
    places = list(places_in(model))
    if not any(place.is_wrapper for place in places):
        return None
    instances: dict[str, tuple[str, ...]] = {}
    bases: dict[str, str] = {}
    for place in places:
        if place.is_wrapper:
            continue
        if place.fqn != place.base:
            instances[place.base] = (*instances.get(place.base, ()), place.fqn)
        for own, value in place.module._parameters.items():
            if value is not None:
                bases[fqn_of(place.fqn, own)] = fqn_of(place.base, own)
    within = {id(place.module): place.fqn for place in places}
    adapted = tuple(_adapted(place, within) for place in places if place.is_wrapper and not is_saved_copy(place.module))
    return AdapterFacts(adapted=adapted, instances=instances, bases=bases, tied=_tied(model))


def without_adapters(model: nn.Module) -> nn.Module:
    """Returns a copy of the base model on the meta device; `model` itself if it has no adapters."""
    if not has_adapters(model):
        return model
    memo: dict[int, Any] = {
        id(value): nn.Parameter(value.detach().to("meta"), requires_grad=value.is_floating_point())
        for value in model.parameters()
    }
    base = copy.deepcopy(model, memo)
    for module in list(base.modules()):
        for own, child in module._modules.items():
            if child is not None and unwrapped(child) is not child:
                module._modules[own] = unwrapped(child)
    return base


def _adapted(place: Place, within: Mapping[int, str]) -> Adapted:
    wrapper: Any = place.module
    base = unwrapped(wrapper)
    weight = getattr(wrapper, "parameter_name", None) or "weight"
    if weight not in base._parameters:
        weight = next(iter(base._parameters), weight)
    in_dim, out_dim = _feature_dims(base, weight)
    own = tuple(_own_parameters(place.fqn, wrapper))
    held = {each.fqn.removeprefix(f"{place.fqn}.").partition(".")[0] for each in own}
    return Adapted(
        module=place.base,
        weight=fqn_of(within[id(base)], weight),
        in_dim=in_dim,
        out_dim=out_dim,
        own=own,
        full_reader=_reads_all(wrapper, base, held),
    )


def describe_adapter(fqn: str, wrapper: nn.Module, adapter: str) -> Adapted:
    """Returns facts about the one adapter called `adapter` in `wrapper`. `read_adapters` gives the facts about all."""
    within = {id(module): fqn_of(fqn, name) for name, module in wrapper.named_modules()}
    adapted = _adapted(Place(fqn, wrapper, fqn, is_wrapper=True), within)
    depth = fqn.count(".") + 2
    return replace(adapted, own=tuple(each for each in adapted.own if each.fqn.split(".")[depth] == adapter))


def _feature_dims(base: nn.Module, name: str) -> tuple[int, int]:
    """Returns the input-feature dim and the output-feature dim of a base parameter."""
    weight = base._parameters.get(name)
    if isinstance(base, nn.Embedding):
        return 0, 1
    if weight is not None and weight.ndim == 3 and not isinstance(base, nn.modules.conv._ConvNd):  # stacked experts
        return (1, 2) if getattr(base, "is_transposed", False) else (2, 1)
    is_transposed = weight is not None and weight.ndim == 2 and getattr(base, "nf", None) == weight.shape[1]
    return (0, 1) if is_transposed else (1, 0)


def _own_parameters(fqn: str, wrapper: Any) -> Iterator[AdapterParameter]:
    """Yields the parameters that the wrapper adds to the base module."""
    for container in (*type(wrapper).adapter_layer_names, *getattr(wrapper, "other_param_names", ())):
        try:
            held = attrgetter(container)(wrapper)
        except AttributeError:
            continue
        named = held.named_parameters() if isinstance(held, nn.Module) else ()
        for name, value in named:
            in_dim, out_dim = _DIMS.get(container, (None, None))
            yield AdapterParameter(
                fqn=f"{fqn_of(fqn, container)}.{name}", shape=tuple(value.shape), in_dim=in_dim, out_dim=out_dim
            )


def _reads_all(wrapper: Any, base: nn.Module, held: Set[str]) -> str:
    """Names the adapter's kind if it must read the full weight, because it is not plain `B @ A`; else ""."""
    variants = getattr(wrapper, "lora_variant", None)
    if variants:
        return f"{type(next(iter(variants.values()))).__name__} of adapter {next(iter(variants))!r}"
    if variants is None or not _DIMS.keys() >= held:
        return f"an adapter of {type(wrapper).__module__.rpartition('.')[0]}"
    if getattr(base, "groups", 1) > 1 or isinstance(base, nn.MultiheadAttention):
        return f"an adapter around {type(base).__name__}"
    return ""


def _tied(model: nn.Module) -> dict[str, str]:
    """Maps each alias FQN of a tied parameter to the parameter's first FQN."""
    first: dict[int, str] = {}
    found = {fqn: first.setdefault(id(value), fqn) for fqn, value in model.named_parameters(remove_duplicate=False)}
    return {fqn: canonical for fqn, canonical in found.items() if fqn != canonical}
