"""Tensor parallelism: reduces parameters to this rank's part, and makes modules compute with it."""

import logging
from collections.abc import Iterable, Mapping
from typing import Any, cast

from torch import Tensor, nn
from transformers import PreTrainedModel

from shardwise.errors import UnsupportedError
from shardwise.loss.head import install_head, install_loss, install_side_outputs
from shardwise.parallel.facts import KEY_VALUE_HEAD_NAMES, QUERY_HEAD_NAMES, names_read
from shardwise.parameters.canonical import local_tensor
from shardwise.parameters.registry import Registry
from shardwise.plan.decision import ParameterPlan, SplitPlan
from shardwise.plan.structure import Heads, is_within, nearest, parent_of
from shardwise.runtime.adapter_facts import unwrapped
from shardwise.runtime.context import SplitContext
from shardwise.runtime.linear import BiasRead, RowSplit, SplitEmbedding, apply_mixin
from shardwise.runtime.local_inputs import install_local_shapes, install_shares, install_sliced
from shardwise.runtime.norm import SplitNorm
from shardwise.runtime.outputs import install_outputs
from shardwise.runtime.reading import read_through
from shardwise.runtime.region_edges import (
    RegionExit,
    edge_of,
    install_full,
    install_gathered,
    install_owner,
    install_parts,
    install_reduced,
    install_region,
    install_stack,
)
from shardwise.sharding.placement import Split
from shardwise.tiny.families import layer_overrides, read_field

_HEAD_COUNTS = ("num_attention_heads", "encoder_attention_heads", "decoder_attention_heads")


def split_parameters(model: nn.Module, registry: Registry) -> None:
    """Replaces the values of every split parameter by this rank's part (for a meta parameter, its shape), in place.

    Parameters keep their identity, so tied ones stay tied, and own their storage.
    """
    for name, parameter in model.named_parameters():
        entry = registry.entry(name)
        if entry.split is not None:
            parameter.data = local_tensor(parameter.data, entry.tensor_layout, registry.mesh.coords)


def check_tensor_parallelism(model: nn.Module, plan: SplitPlan) -> None:
    """Raises `UnsupportedError` if the plan splits an embedding by vocabulary that changes its rows (`max_norm`)."""
    for name, style in plan.tensor.modules.items() if plan.num_parts > 1 else ():
        embedding = unwrapped(model.get_submodule(name))
        if style == "embedding_rowwise" and getattr(embedding, "max_norm", None) is not None:
            raise UnsupportedError(
                "an embedding with max_norm cannot be split over its vocabulary",
                at=name,
                why="its forward changes rows, which ranks without these rows cannot see",
                fix='replicate it with the style "replicate"',
            )


def apply_tensor_parallelism(model: nn.Module, registry: Registry) -> None:
    """Changes the forward of the modules in the plan. Parameters are split already. Communicates nothing."""
    plan, context = registry.plan, registry.context
    modules = dict(model.named_modules())
    for module in modules.values():
        fit_sizes(module, module._parameters.get("weight"))
    outer = tuple(f"{region.fqn}." for region in plan.tensor.regions if region.edge == "output")
    for name in plan.tensor.modules:
        _apply_style(
            modules[name], name, registry, leave=None if name.startswith(outer) else _leave(plan, name, context)
        )
    for region in plan.tensor.regions:
        install_region(
            modules[region.fqn],
            region.edge,
            context,
            name=region.fqn,
            stack=plan.stack_of(region.fqn),
            leave=_leave(plan, region.fqn, context),
            residual_inputs=_names_of(plan.tensor.residual_inputs, region.fqn),
            parts=_names_of(plan.tokens.inputs if plan.tokens is not None else (), region.fqn),
        )
        split = _split_of(registry, region.fqn)
        if region.edge == "gather" and split is not None:
            install_gathered(modules[region.fqn], split.local_sizes, edge_of(context, plan.stack_of(region.fqn)))
    apply_local_heads(modules, plan.tensor.heads)
    apply_local_attributes(modules, plan.tensor.attributes)
    apply_expert_widths(modules, plan.parameters)
    _install_local(modules, plan, context)
    if plan.tensor.head is not None:
        install_head(
            modules[plan.tensor.head], plan.parameters[_weight_of(registry, plan.tensor.head)].shape[0], context
        )
    install_loss(model, context)
    install_side_outputs(getattr(model, "base_model", model), context)
    _install_outputs(model, plan, context)


def _install_outputs(model: nn.Module, plan: SplitPlan, context: SplitContext) -> None:
    """Makes every transformers model inside the model return full hidden states and attention weights."""
    owners = {name: module for name, module in model.named_modules() if isinstance(module, PreTrainedModel)}
    stacks = plan.tokens.stacks if plan.tokens is not None else ()
    around = {stack: nearest(stack, owners) or "" for stack in stacks}
    split_heads = {heads.num_heads for heads, _ in plan.tensor.heads.values()}
    for name, module in owners.items():
        counts = [read_field(module.config, key) for key in _HEAD_COUNTS]
        for fields in layer_overrides(module.config).values():  # of configs that differ by layer
            counts += map(fields.get, _HEAD_COUNTS)
        install_outputs(
            module,
            context,
            context.tp,
            stacks=[fqn for fqn, owner in around.items() if owner == name],
            num_heads=split_heads | {count for count in counts if isinstance(count, int)},
        )


def _leave(plan: SplitPlan, module: str, context: SplitContext) -> RegionExit:
    """Returns the end of a region at `module`."""
    return RegionExit(
        edge=edge_of(context, plan.stack_of(module)),
        defers=module in plan.tensor.fused_reductions,
        absorbs=module in plan.tensor.fused_reductions.values(),
    )


def _names_of(fqns: Iterable[str], module: str) -> list[str]:
    """Returns the inputs or parameters among `fqns` that belong to `module`, by their names there."""
    return [fqn.rpartition(".")[2] for fqn in fqns if parent_of(fqn) == module]


def _install_local(modules: Mapping[str, nn.Module], plan: SplitPlan, context: SplitContext) -> None:
    for fqn, (dim, num_heads) in plan.tensor.inputs.items():
        owner, _, argument = fqn.rpartition(".")
        enters = not is_within(owner, (region.fqn for region in plan.tensor.regions))
        install_sliced(modules[owner], argument, dim=dim, num_heads=num_heads, enters=enters, axis=context.tp)
    for fqn in sorted(plan.tensor.local_sizes):
        owner, _, argument = fqn.rpartition(".")
        install_local_shapes(modules[owner], argument, context.tp)
    for owner in dict.fromkeys(map(parent_of, plan.tensor.added)):
        install_shares(modules[owner], tuple(_names_of(plan.tensor.added, owner)), context.tp)


def _apply_style(module: nn.Module, name: str, registry: Registry, *, leave: RegionExit | None) -> None:
    """`leave`: end of a region at this module; None if a surrounding region ends at its own output."""
    plan, context = registry.plan, registry.context
    style, split = plan.tensor.modules[name], _split_of(registry, name)
    if style == "all_reduce":
        install_reduced(module, edge_of(context, plan.stack_of(name)), context)
    elif style == "moe_identity_expert":
        module.register_forward_pre_hook(lambda module, args: (args[0] / context.tp.size, *args[1:]))
    elif split is None:
        return  # a bare parameter's rule: its module computes with it as it is
    elif style == "norm_split":
        apply_mixin(module, SplitNorm, _axis=context.tp, _sizes=split.local_sizes, _formula=plan.tensor.norms[name])
    elif style == "embedding_rowwise":
        _split_vocabulary(module, split, context)
    elif style == "embedding_colwise":
        apply_mixin(module, SplitEmbedding, _axis=context.tp, _sizes=split.local_sizes)
    elif style in ("rowwise", "rowwise_reenter", "rowwise_split_input"):
        bias = None if type(module).forward is nn.Linear.forward else BiasRead()
        if bias is not None and unwrapped(module)._parameters.get("bias") is not None:
            read_through(unwrapped(module), "bias", bias)
        apply_mixin(
            module,
            RowSplit,
            _bias=bias,
            _adapts=name in plan.tensor.weights,
            _axis=context.tp,
            _split=context,
            _reduces=leave is not None,
            _leave=leave,
            _reenters=style == "rowwise_reenter",
            _input_sizes=split.local_sizes if style == "rowwise_split_input" else None,
        )


def _split_vocabulary(module: nn.Module, split: Split, context: SplitContext) -> None:
    embedding = unwrapped(module)
    start = sum(split.local_sizes[: context.tp.coord])
    rows = split.local_sizes[context.tp.coord]
    padding = getattr(embedding, "padding_idx", None)
    if padding is not None:
        setattr(embedding, "padding_idx", padding - start if start <= padding < start + rows else None)  # noqa: B010
    apply_mixin(module, SplitEmbedding, _axis=context.tp, _start=start, _vocabulary_size=split.size)


def fit_sizes(module: nn.Module, weight: Tensor | None) -> None:
    """Updates the size attributes of a linear, embedding or depthwise convolution to those of its weight."""
    if isinstance(module, nn.Conv1d | nn.Conv2d) and weight is not None and 1 < module.groups == module.out_channels:
        module.in_channels = module.in_channels // module.groups * weight.shape[0]
        module.groups = module.out_channels = weight.shape[0]
    if weight is None or weight.ndim != 2:
        return
    if isinstance(module, nn.Linear):
        module.out_features, module.in_features = weight.shape
    elif isinstance(module, nn.Embedding):
        module.num_embeddings, module.embedding_dim = weight.shape
    elif hasattr(module, "nf"):  # transformers' Conv1D
        setattr(module, "nf", weight.shape[1])  # noqa: B010


def _split_of(registry: Registry, module: str) -> Split | None:
    planned = registry.plan.parameters.get(_weight_of(registry, module))
    return planned.placement if planned is not None and isinstance(planned.placement, Split) else None


def _weight_of(registry: Registry, module: str) -> str:
    weight = registry.plan.tensor.weights.get(module, f"{module}.weight")
    return registry.tied.get(weight, weight)


def apply_sequence_parallelism(model: nn.Module, registry: Registry) -> None:
    """Splits the hidden states along the sequence in the stacks of layers that the plan names. Communicates nothing.

    Source: Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models" (arXiv 2205.05198).
    """
    plan, context = registry.plan.tokens, registry.context
    if plan is None:
        return
    for fqn in plan.full_sequence:
        stack_around = next(stack for stack in plan.stacks if is_within(fqn, (stack,)))
        install_full(model.get_submodule(fqn), fqn, stack_around, context)
    for stack in plan.stacks:
        layers = model.get_submodule(stack)
        install_stack([*layers] if isinstance(layers, nn.ModuleList) else [layers], stack, context)
        install_owner(model.get_submodule(parent_of(stack)), stack, context)  # its forward embeds, then runs the layers
    regions = {region.fqn for region in registry.plan.tensor.regions}  # these split their own inputs
    for layer in dict.fromkeys(map(parent_of, plan.inputs)):
        if layer not in regions:
            install_parts(model.get_submodule(layer), _names_of(plan.inputs, layer), context)


logger = logging.getLogger("shardwise.plan")

_ALIGNED = 8  # grouped products read rows of a multiple of 16 bytes: that many elements of the narrowest dtypes


class LocalConfig:
    """A module's view of the model's config, with some values replaced: the model's own is shared and saved."""

    def __init__(self, config: Any, **values: Any) -> None:
        self.__dict__.update(values, _config=config)

    def __getattr__(self, name: str) -> Any:
        if name == "_config":
            raise AttributeError(name)
        return getattr(self._config, name)


def apply_local_heads(modules: Mapping[str, nn.Module], heads: Mapping[str, tuple[Heads, Heads]]) -> None:
    """Sets the head counts of every split attention module to this rank's."""
    for name, (full, local) in heads.items():
        module, own_class = modules[name], cast(Any, type(modules[name]))
        queries = (full.num_heads, local.num_heads)
        keys = (full.num_key_value_heads, local.num_key_value_heads)
        groups = (queries[0] // keys[0], queries[1] // keys[1])
        counts = dict.fromkeys(QUERY_HEAD_NAMES, queries) | dict.fromkeys(KEY_VALUE_HEAD_NAMES, keys)
        for own, (before, after) in (counts | {"num_key_value_groups": groups}).items():
            if vars(module).get(own) == before:
                setattr(module, own, after)
        for own in counts.keys() & names_read(own_class) if getattr(module, "config", None) is not None else ():
            _set_in_config(module, own, counts[own][1])


def apply_local_attributes(modules: Mapping[str, nn.Module], attributes: Mapping[str, int]) -> None:
    """Sets the attributes that a plan divides to this rank's values, on the module or on its view of the config."""
    for fqn, value in attributes.items():
        owner, _, name = fqn.rpartition(".")
        if owner in modules:
            setattr(modules[owner], name, value)
        else:
            _set_in_config(modules[owner.removesuffix(".config")], name, value)


def apply_expert_widths(modules: Mapping[str, nn.Module], parameters: Mapping[str, ParameterPlan]) -> None:
    """Makes stacked experts run one after another if grouped products do not support the width of a rank's part."""
    for fqn, planned in parameters.items():
        owner, placement = parent_of(fqn), planned.placement
        module = modules[owner]
        if not isinstance(placement, Split) or len(planned.shape) != 3:
            continue
        implementation = getattr(getattr(module, "config", None), "_experts_implementation", None)
        sizes = set(placement.local_sizes)
        if implementation == "grouped_mm" and any(size % _ALIGNED for size in sizes):
            logger.warning("%s runs its experts one after another: ranks have widths of %s", owner, sorted(sizes))
            _set_in_config(module, "_experts_implementation", "eager")


def _set_in_config(module: nn.Module, name: str, value: Any) -> None:
    """Sets a value in the module's view of its config."""
    if not isinstance(module.config, LocalConfig):
        setattr(module, "config", LocalConfig(module.config))  # noqa: B010 - torch types it a Module
    module.config.__dict__[name] = value
