"""Reads the facts about a live (real or meta) model that planning uses.

Head counts are read from each attention module, so layers may differ in heads.
"""

import functools
import inspect
from dataclasses import replace
from typing import Any, TypeGuard

import torch
from torch import nn
from transformers import PreTrainedModel

from shardwise.data.batch import is_medium
from shardwise.estimate.cuts import cut
from shardwise.estimate.flops import count_work
from shardwise.plan.adapters import stages_with_adapters
from shardwise.plan.data_axes import with_data_axes
from shardwise.plan.decision import SplitPlan
from shardwise.plan.options import ParallelSpec
from shardwise.plan.pipeline_plan import LayerOrder
from shardwise.plan.resolve import resolve
from shardwise.plan.spec import Plan
from shardwise.plan.structure import (
    Heads,
    LayerStack,
    ModelFacts,
    ModuleFacts,
    fqn_of,
    is_within,
    nearest,
    outermost_layers,
)
from shardwise.runtime.adapter_facts import places_in, read_adapters, unwrapped
from shardwise.runtime.arguments import argument_names
from shardwise.runtime.norm import recognise_norm
from shardwise.topology.shape import MeshShape

# Where attention modules keep their counts. Names are the field's; values decide (see `_heads`).
QUERY_HEAD_NAMES = ("num_heads", "num_attention_heads", "n_heads", "n_head")
KEY_VALUE_HEAD_NAMES = ("num_key_value_heads", "num_kv_heads", "n_kv_heads")
_KINDS = {nn.Linear: "linear", nn.Embedding: "embedding", nn.ModuleList: "list", nn.ModuleDict: "dict"}
_HEAD_DIM_NAMES = ("head_dim", "head_size", "attention_head_size", "qk_head_dim")


def read_facts(model: nn.Module) -> ModelFacts:
    """Returns facts about a real or meta model; adapted modules have the base's names ([Note: the base's plan])."""
    canonical: dict[int, str] = {}
    tied: dict[str, str] = {}
    modules: dict[str, ModuleFacts] = {}
    config_counts: dict[tuple[type, int], dict[str, int]] = {}
    for place in places_in(model):
        if place.is_wrapper or place.is_copy:
            continue
        name, module = place.base, place.module
        parameters = {own: tuple(value.shape) for own, value in module._parameters.items() if value is not None}
        modules[name] = ModuleFacts(
            kind=_kind(module),
            parameters=parameters,
            heads=_heads(module),
            attributes=counts_of(module, config_counts),
            inputs=_inputs(module),
        )
        for own in parameters:
            fqn = fqn_of(name, own)
            first = canonical.setdefault(id(module._parameters[own]), fqn)
            if first != fqn:
                tied[fqn] = first
    head = output_head(model)
    return ModelFacts(
        model_type=getattr(getattr(model, "config", None), "model_type", "") or "",
        modules=modules,
        stacks=read_stacks(model),
        tied=tied,
        head=_name_of(model, head),
        embedding=_name_of(model, _embedding(model, "get_input_embeddings")),
        embedding_gives_logits=head is None and _embedding(model, "get_output_embeddings") is not None,
        adapters=read_adapters(model),
    )


def is_of_transformers(model: nn.Module) -> bool:
    """Returns whether all the model's code is transformers', torch's or PEFT's; others' may change under one name."""
    return isinstance(model, PreTrainedModel) and all(
        type(module).__module__.startswith(("transformers.", "torch.", "peft.")) for module in model.modules()
    )


def read_stacks(model: nn.Module) -> tuple[LayerStack, ...]:
    """Returns the stacks of layers of an unsplit model, in order of registration. Reads only shapes."""
    found: list[LayerStack] = []
    layers: set[str] = set()
    for fqn, module in model.named_modules():
        if not isinstance(module, nn.ModuleList):
            continue
        if any(_kind(item) != "other" or isinstance(unwrapped(item), nn.modules.conv._ConvNd) for item in module):
            continue  # single products, lookups, or modules without a forward of their own
        items = [
            f"{fqn}.{name}"
            for name, item in module.named_children()
            if any(parameter.ndim > 1 for parameter in item.parameters())
        ]
        if items:
            found.append(LayerStack(fqn=fqn, items=tuple(items), within=nearest(fqn, layers) or ""))
            layers.update(items)
    return tuple(found)


def read_windows(model: nn.Module) -> dict[str, int]:
    """Returns sliding-window sizes in tokens by the attention's FQN, from the module, or from the config for all."""
    found = {}
    for place in places_in(model):
        owner: Any = place.module
        if "sliding_window" not in vars(owner):
            owner = getattr(owner, "config", None) if _heads(place.module) is not None else None
            kinds: Any = _read(owner, "layer_types") or ("sliding_attention",)
            owner = owner if set(kinds) == {"sliding_attention"} else None
        window = _read(owner, "sliding_window")
        if _is_count(window):
            found[place.base] = window
    return found


def _kind(module: nn.Module) -> str:
    module = unwrapped(module)
    known = next((kind for each, kind in _KINDS.items() if isinstance(module, each)), None)
    if known is not None:
        return known
    weight = module._parameters.get("weight")
    if weight is not None and weight.ndim == 2 and getattr(module, "nf", None) == weight.shape[1]:
        return "transposed"  # transformers' Conv1D stores [in, out]
    return "other"


def _heads(module: nn.Module) -> Heads | None:
    """Heads of an attention module; None if the module has no head size, or its attributes contradict its weights."""
    if type(module) in (nn.Linear, nn.Embedding):
        return None  # most modules: a look for names that are not there is slow
    head_dim = _first_int(module, _HEAD_DIM_NAMES)
    if head_dim is None and _first_int(module, QUERY_HEAD_NAMES) is None:
        return None
    config: Any = getattr(module, "config", None)
    num_heads = _first_int(module, QUERY_HEAD_NAMES) or _first_int(config, QUERY_HEAD_NAMES)
    if num_heads is None:
        return None
    groups = _first_int(module, ("num_key_value_groups",))
    num_key_value_heads = _first_int(module, KEY_VALUE_HEAD_NAMES) or (num_heads // groups if groups else num_heads)
    if "qk_head_dim" in vars(module):
        # Latent attention: query, key and value features differ, so only the count says their sizes.
        return Heads(num_heads=num_heads, num_key_value_heads=num_heads)
    return Heads(num_heads=num_heads, num_key_value_heads=num_key_value_heads, head_dim=head_dim)


def counts_of(module: nn.Module, config_counts: dict[tuple[type, int], dict[str, int]] | None = None) -> dict[str, int]:
    """Returns the module's integer attributes, and as `config.NAME` the integers of its config that its methods
    mention.

    `config_counts` caches values of configs, which are slow to read and equal for all modules of a class.
    """
    if type(module).__module__.startswith("torch.") or _kind(module) != "other":
        return {}
    found = {name: value for name, value in vars(module).items() if _is_count(value, least=2)}
    config: Any = getattr(module, "config", None)
    own_class: Any = type(module)
    names = names_read(own_class)
    if "config" not in names or config is None:
        return found
    known = {} if config_counts is None else config_counts
    key = own_class, id(config)
    if key not in known:
        held = {*dir(config), *getattr(config, "attribute_map", ())}  # asking transformers' configs for others is slow
        asked = names if hasattr(type(config), "__getattr__") else held.intersection(names)
        values = {name: _read(config, name) for name in sorted(asked)}
        known[key] = {name: value for name, value in values.items() if _is_count(value, least=2)}
    return found | {f"config.{name}": value for name, value in known[key].items() if name not in found}


def _read(owner: object, name: str) -> object:
    """Returns an attribute's value; None if it is missing, or if a config refuses because layers differ."""
    try:
        return getattr(owner, name, None)
    except (RuntimeError, ValueError):
        return None


def _inputs(module: nn.Module) -> tuple[str, ...]:
    if type(module).__module__.startswith("torch.") or _kind(module) != "other":
        return ()
    taken = {*module._modules, *module._parameters, *vars(module), "kwargs"}
    return tuple(name for name in argument_names(module) if name not in taken)


@functools.cache
def names_read(module_class: Any) -> frozenset[str]:
    """Returns the attribute names that the methods of a module class mention, without torch's base classes."""
    names: set[str] = set()
    for base in module_class.__mro__:
        if base.__module__.startswith("torch."):
            continue
        for method in vars(base).values():
            code = getattr(inspect.unwrap(method), "__code__", None) if callable(method) else None
            if code is not None and code.co_name != "__init__":
                names.update(code.co_names)
    return frozenset(names)


def _is_count(value: object, *, least: int = 1) -> TypeGuard[int]:
    """Returns whether a value may count heads or features. Seeds and the like are larger."""
    return isinstance(value, int) and not isinstance(value, bool) and least <= value < 2**31


def _first_int(owner: object, names: tuple[str, ...]) -> int | None:
    return next((value for value in (_read(owner, name) for name in names) if _is_count(value)), None)


def output_head(model: nn.Module) -> nn.Module | None:
    """Returns the module that computes the logits of an unsplit model; None if there is none or it is unknown.

    DeBERTa declares as its output embedding a projection before the logits, with as many output as input features: then
    None is returned.
    """
    head, embedding = (_embedding(model, f"get_{side}_embeddings") for side in ("output", "input"))
    size = tuple(head.weight.shape) if head is not None else ()
    is_vocabulary = embedding is not None and size[:1] == tuple(embedding.weight.shape)[:1]
    return head if is_vocabulary or len(set(size)) == len(size) else None


def _embedding(model: nn.Module, getter: str) -> Any:
    """Returns the module that a transformers embedding getter returns; None if there is none, or it has no weight."""
    try:
        found = getattr(model, getter)()
    except (NotImplementedError, AttributeError):
        return None
    return found if isinstance(getattr(found, "weight", None), torch.Tensor) else None


def _name_of(model: nn.Module, part: nn.Module | None) -> str | None:
    return next((name for name, module in model.named_modules() if module is part), None)


def find_conditional_layers(model: nn.Module, facts: ModelFacts) -> frozenset[str]:
    """Returns the layers that run only for batches with images or sound.

    In a model with text inputs these are the layers outside of its decoder, and the decoder's cross-attention layers.
    """
    takes = inspect.signature(model.forward).parameters
    media = [each for name, each in takes.items() if is_medium(name)]
    get_decoder: Any = getattr(model, "get_decoder", None)
    if get_decoder is None or "input_ids" not in takes or not any(each.default is None for each in media):
        return frozenset()
    inner = get_decoder()
    decoder = _name_of(model, inner)
    if not decoder:
        return frozenset()
    crossing: Any = getattr(getattr(inner, "config", None), "cross_attention_layers", None) or ()
    numbers = {str(number) for number in crossing}
    layers = outermost_layers(facts.stacks)
    return frozenset(each for each in layers if not is_within(each, [decoder]) or each.rpartition(".")[2] in numbers)


def decide_split(
    rules: Plan,
    model: nn.Module,
    facts: ModelFacts,
    shape: MeshShape,
    spec: ParallelSpec,
    *,
    order: LayerOrder | None = None,
) -> SplitPlan:
    """Resolves `rules` to a plan for `model`, which is unsplit (real or meta) and stays so. All ranks get equal plans.

    Args:
        spec: the request; `rules` replace its plan.
        order: order in which the layers of the base model run; needed if the shape has several pp ranks.
    """
    plan = resolve(rules, facts, num_parts=shape.tp_size, sequence_parallel=spec.sequence_parallel)
    stages = None
    if shape.pp_size > 1:
        assert order is not None, "a pipeline is cut where layers begin"
        stages = stages_with_adapters(cut(order, facts, spec.pipeline, pp_size=shape.pp_size), facts)
    trained = {name: str(value.dtype) for name, value in model.named_parameters() if value.requires_grad}
    conditional = find_conditional_layers(model, facts)
    plan = with_data_axes(plan, facts, shape, stages, units=spec.fsdp.units, conditional=conditional, dtypes=trained)
    split_norms = [name for name, style in plan.tensor.modules.items() if style == "norm_split"]
    norms = {name: recognise_norm(model.get_submodule(name)) for name in split_norms}
    work = count_work(facts, trained, read_windows(model))
    return replace(plan, tensor=replace(plan.tensor, norms=norms), work=work)
