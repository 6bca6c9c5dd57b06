"""Models and optimizers of a config."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from shardwise.api.checkpoints import load_checkpoint
from shardwise.api.prepare import prepare
from shardwise.comm.agree import raise_on_all_ranks
from shardwise.compat.layers.by_hand import adopt_model, build_in_turns
from shardwise.compat.layers.chain import Chain, spread_evenly, starts_of
from shardwise.compat.layers.layer_order import layer_order_by_hand
from shardwise.compat.layers.padded_heads import pad_heads
from shardwise.compat.layers.split_module import SplitModule
from shardwise.compat.layers.transparent import seen_through
from shardwise.compat.neuronx_distributed.modules.lora import LoRAModel
from shardwise.compat.neuronx_distributed.parallel_layers.parallel_state import current_mesh
from shardwise.compat.neuronx_distributed.trainer.config import checked, initialize
from shardwise.compat.neuronx_distributed.trainer.model import NxDModel
from shardwise.compat.neuronx_distributed.trainer.optimizer import NxDOptimizer
from shardwise.errors import ConfigError
from shardwise.optim.optimizer import check_class, divided_groups
from shardwise.plan.options import FsdpPolicy, ParallelSpec, Pipeline, Recompute, check_kind
from shardwise.plan.pipeline_plan import LayerOrder
from shardwise.plan.structure import outermost
from shardwise.probe.layer_order import find_layer_order
from shardwise.runtime.adapters import find_model

__all__ = ["initialize_parallel_model", "initialize_parallel_optimizer"]


def initialize_parallel_model(
    nxd_config: Mapping[str, Any], model_fn: Callable[..., nn.Module], *model_args: Any, **model_kwargs: Any
) -> NxDModel:
    """Builds a model and splits it as the config says.

    A model with parallel layers is taken as it is written; a transformers model without any is split by its automatic
    plan; any other is replicated over tp. Each is cut into the stages of a pipeline.

    Args:
        model_fn: returns the model, or with `manual_pp_partition` the list of its layers, the same on every rank.
            `model_init_config` says how many ranks call it at a time, and whether it builds on the meta device.

    Raises:
        ConfigError: `lora_config` or `pipeline_config` do not fit the model.
        MeshError: the sizes do not divide the ranks.
        PlanError: the model cannot be split.

    Communicates: as `shardwise.parallelize`.
    """
    initialize(nxd_config)
    if isinstance(model_fn, nn.Module) or not callable(model_fn):
        raise ConfigError(f"model_fn is a {type(model_fn).__name__}", fix="pass the function, or class, that builds it")
    options = nxd_config["model_init_config"]
    model = build_in_turns(
        lambda: as_model(model_fn(*_own(model_fn, model_args, model_kwargs), **model_kwargs), nxd_config),
        current_mesh(),
        ranks_at_a_time=options["sequential_move_factor"],
        on_meta=options["meta_device_init"],
        fill=options["param_init_fn"],
    )
    return NxDModel(split_model(model, nxd_config), nxd_config)


def _own(model_fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Sequence[Any]:
    """Without the `include_buffers` that comes first in scripts of some versions, where the model takes no more."""
    try:
        inspect.signature(model_fn).bind(*args, **kwargs)
    except (TypeError, ValueError):
        return args[1:] if args and type(args[0]) is bool else args
    return args


def as_model(model: Any, nxd_config: Mapping[str, Any]) -> nn.Module:
    """What `model_fn` returned, as a model: with `manual_pp_partition` it is a list of layers."""
    config = nxd_config["pipeline_config"] or {}
    if config.get("manual_pp_partition"):
        return Chain(model, config.get("manual_pp_loss_fn"))
    check_kind("the model", model, nn.Module, fix="a list of layers needs manual_pp_partition in pipeline_config")
    return model


def split_model(model: nn.Module, nxd_config: Mapping[str, Any]) -> nn.Module:
    """Splits a model that is built, in place; returns it, or the `LoRAModel` around it."""
    mesh, lora = current_mesh(), nxd_config["lora_config"]
    is_plain = lora is None or not lora.enable_lora or isinstance(model, LoRAModel)
    wrapped = model if is_plain else LoRAModel(model, lora.as_saved())
    model = seen_through(wrapped)
    base: Any = find_model(model)
    asked = nxd_config["activation_checkpoint_config"]
    given = asked if isinstance(asked, tuple | list | set) else (asked,)
    classes = tuple(type(each) if isinstance(each, nn.Module) else each for each in given)
    recompute = Recompute(mode=asked or "none") if asked in (None, "full") else _recompute_classes(base, classes)
    is_sharded = nxd_config["optimizer_config"]["zero_one_enabled"] and mesh.size("fsdp") > 1
    if not isinstance(base, PreTrainedModel) or any(isinstance(module, SplitModule) for module in base.modules()):
        if nxd_config["pad_model"]:
            pad_heads(base, _heads_of(base))
        policy = FsdpPolicy(zero_stage=1) if is_sharded else None
        order, pipeline = order_of(base, nxd_config["pipeline_config"] or {}) if mesh.size("pp") > 1 else (None, None)
        adopt_model(model, mesh, policy=policy, recompute=recompute, order=order, pipeline=pipeline)
    else:
        if nxd_config["pad_model"] and (number := _heads_of(base)) % mesh.size("tp"):
            raise ConfigError(
                f"pad_model of a {type(base).__name__} with {number} attention heads on {mesh.size('tp')} tp ranks",
                why="it pads heads of models that are written with parallel layers; this one is split by its plan",
                fix=f"use a tensor_parallel_size that divides {number}, or write the attention with parallel layers",
            )
        base.config.return_dict = True  # without it transformers 5 does not run its own models
        spec = ParallelSpec(
            sequence_parallel=nxd_config["sequence_parallel"] and mesh.size("tp") > 1,
            fsdp=FsdpPolicy(zero_stage=1),
            recompute=recompute,
            pipeline=pipeline_of(base, nxd_config["pipeline_config"] or {}) if mesh.size("pp") > 1 else Pipeline(),
        )
        prepare(model, mesh, spec)
    lora = getattr(wrapped, "lora_config", None)
    if lora is not None and lora.load_lora_from_ckpt:
        load_checkpoint(lora.lora_save_dir, lora.lora_load_tag, model=model)
    return wrapped


def _recompute_classes(model: nn.Module, classes: tuple[type[nn.Module], ...]) -> Recompute:
    """Returns the recomputation of the outermost modules of these classes.

    Raises:
        ConfigError: the model has none.
    """
    names = [name for name, module in model.named_modules() if isinstance(module, classes) and name]
    if not names:
        raise ConfigError(
            f"{type(model).__name__} has no {' or '.join(each.__name__ for each in classes)}",
            at="what is to be recomputed",
            fix="name classes of its modules",
        )
    return Recompute(mode="full", modules=tuple(outermost(names)))


def _heads_of(model: nn.Module) -> int:
    config: Any = getattr(model, "config", None)
    number = getattr(getattr(config, "get_text_config", lambda: config)(), "num_attention_heads", None)
    if type(number) is not int:
        raise ConfigError(
            f"pad_model of a {type(model).__name__}",
            why="config.num_attention_heads of the model says how many heads there are",
            fix="give it such a config, or let model_fn call parallel_layers.pad_model(model, tp_degree, n_heads)",
        )
    return number


def pipeline_of(model: nn.Module, config: Mapping[str, Any], order: LayerOrder | None = None) -> Pipeline:
    """What `pipeline_config` means: stages that cost alike, unless `pipeline_cuts` names the layers before cuts, or
    they are cut by hand.
    """
    number, cuts, starts = config.get("virtual_pipeline_size", 1), config.get("pipeline_cuts"), None
    with raise_on_all_ranks(current_mesh().group(), "finding its layers"):
        if isinstance(model, Chain):
            layers, num_stages = list(model.layers), current_mesh().size("pp") * number
            chosen = (config.get("manual_pp_stage_partition_fn") or spread_evenly)(layers, num_stages)
            starts = starts_of(layers, num_stages, chosen)
        elif cuts:
            starts = (order or find_layer_order(model)).starts_after(cuts)
    return Pipeline(schedule="1f1b" if number == 1 else "interleaved_1f1b", num_stages_per_rank=number, layers=starts)


def order_of(model: nn.Module, config: Mapping[str, Any]) -> tuple[LayerOrder, Pipeline]:
    """The layers of a hand-written model as they run, and how it is cut: see `layer_order_by_hand`."""
    kind = config.get("transformer_layer_cls")
    named = [name for name, each in model.named_modules() if isinstance(kind, type) and isinstance(each, kind)]
    order = model.order() if isinstance(model, Chain) else layer_order_by_hand(model, current_mesh(), layers=named)
    return order, pipeline_of(model, config, order)


def initialize_parallel_optimizer(
    nxd_config: Mapping[str, Any],
    optimizer_class: Callable[..., torch.optim.Optimizer],
    parameters: Iterable[Any],
    **defaults: Any,
) -> NxDOptimizer:
    """An optimizer whose step clips by the norm of the full gradients; with ZeRO-1 its states are sharded over data
    ranks, as the parameters of the model are then.

    Args:
        parameters: of the model, or groups of them.

    Raises:
        ConfigError: there are none.
    """
    defaults.pop("decoupled_weight_decay", None)
    check_class(optimizer_class)
    groups = divided_groups(parameters) or [{"params": []}]
    if not groups[0]["params"] and current_mesh().size("pp") == 1:  # a stage may have nothing to train
        raise ConfigError("initialize_parallel_optimizer was given no parameter that is trained")
    options = checked(nxd_config)["optimizer_config"]
    max_norm = options["max_grad_norm"] if options["grad_clipping"] else None
    optimizer = NxDOptimizer(optimizer_class(groups, **defaults), current_mesh(), max_norm=max_norm)
    optimizer.__dict__["nxd_config"] = nxd_config
    optimizer.optimizer.__dict__["init_zero"] = lambda: None  # theirs must be told that weights were loaded
    return optimizer
