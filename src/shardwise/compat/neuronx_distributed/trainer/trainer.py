"""Builds models and optimizers by a config."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from shardwise.api.checkpoints import load_checkpoint
from shardwise.api.prepare import prepare
from shardwise.comm.agree import raise_on_all_ranks
from shardwise.compat.layers.by_hand import adopt_model, build_in_turns, check_equal_replicas, layer_order_by_hand
from shardwise.compat.layers.split_module import SplitModule
from shardwise.compat.neuronx_distributed.modules.lora import LoRAModel
from shardwise.compat.neuronx_distributed.parallel_layers.pad import pad_model
from shardwise.compat.neuronx_distributed.parallel_layers.parallel_state import current_mesh
from shardwise.compat.neuronx_distributed.trainer.config import initialize
from shardwise.compat.neuronx_distributed.trainer.model import NxDModel
from shardwise.compat.neuronx_distributed.trainer.optimizer import NxDOptimizer
from shardwise.errors import ConfigError
from shardwise.optim.optimizer import check_class, divided_groups
from shardwise.plan.options import FsdpPolicy, ParallelSpec, Pipeline, Recompute
from shardwise.plan.pipeline_plan import LayerOrder
from shardwise.plan.structure import outermost
from shardwise.probe.layer_order import find_layer_order
from shardwise.runtime.adapter_facts import find_model, has_adapters

__all__ = ["initialize_parallel_model", "initialize_parallel_optimizer"]


def initialize_parallel_model(
    nxd_config: Mapping[str, Any], model_fn: Callable[..., nn.Module], *model_args: Any, **model_kwargs: Any
) -> NxDModel:
    """Builds a model and splits it by the config.

    A model with parallel layers is used as written. A transformers model without any is split by its automatic plan.
    Any other model is replicated over tp. Each is cut into pipeline stages if the config has several.

    Args:
        model_fn: returns the model, the same on every rank. `model_init_config` limits how many ranks call it at a
            time, and may build it on the meta device.

    Raises:
        ConfigError: `lora_config` or `pipeline_config` do not fit the model.
        MeshError: the sizes do not divide the ranks.
        PlanError: the model cannot be split.

    Communicates: like `shardwise.parallelize`.
    """
    initialize(nxd_config)
    if isinstance(model_fn, nn.Module) or not callable(model_fn):
        raise ConfigError(f"model_fn is a {type(model_fn).__name__}", fix="pass the function, or class, that builds it")
    options = nxd_config["model_init_config"]
    model = build_in_turns(
        lambda: model_fn(*model_args, **model_kwargs),
        current_mesh(),
        ranks_at_a_time=options["sequential_move_factor"],
        on_meta=options["meta_device_init"],
        fill=options["param_init_fn"],
    )
    return NxDModel(split_model(model, nxd_config), nxd_config)


def split_model(model: nn.Module, nxd_config: Mapping[str, Any]) -> nn.Module:
    """Splits a model in place; returns it, or PEFT's model around it."""
    mesh, lora = current_mesh(), nxd_config["lora_config"]
    if lora is not None and lora.enable_lora and not has_adapters(model):
        model = LoRAModel(model, lora.as_saved())
    base: Any = find_model(model)
    config, recompute = nxd_config["pipeline_config"] or {}, _recompute_of(base, nxd_config)
    if not isinstance(base, PreTrainedModel) or any(isinstance(module, SplitModule) for module in base.modules()):
        if nxd_config["pad_model"]:
            pad_model(base, mesh.size("tp"), _heads_of(base))
        is_sharded = nxd_config["optimizer_config"]["zero_one_enabled"] and mesh.size("fsdp") > 1
        policy = FsdpPolicy(zero_stage=1) if is_sharded else None
        order, pipeline = None, None
        if mesh.size("pp") > 1:
            kind = config.get("transformer_layer_cls")
            named = [name for name, each in base.named_modules() if kind is not None and isinstance(each, kind)]
            order = layer_order_by_hand(base, mesh, layers=named)
            pipeline = _pipeline_of(base, config, order)
        adopt_model(model, mesh, policy=policy, recompute=recompute, order=order, pipeline=pipeline)
        check_equal_replicas(model)
    else:
        base.config.return_dict = True  # without it transformers 5 does not run its own models
        spec = ParallelSpec(
            sequence_parallel=nxd_config["sequence_parallel"] and mesh.size("tp") > 1,
            fsdp=FsdpPolicy(zero_stage=1),
            recompute=recompute,
            pipeline=_pipeline_of(base, config) if mesh.size("pp") > 1 else Pipeline(),
        )
        prepare(model, mesh, spec)
    lora = vars(model).get("lora_config")
    if lora is not None and lora.load_lora_from_ckpt:
        load_checkpoint(lora.lora_save_dir, lora.lora_load_tag, model=model)
    return model


def _recompute_of(model: nn.Module, nxd_config: Mapping[str, Any]) -> Recompute:
    """Converts `activation_checkpoint_config`: every block, or the outermost modules of some classes.

    Raises:
        ConfigError: the model has no module of these classes.
    """
    asked = nxd_config["activation_checkpoint_config"]
    if asked in (None, "full"):
        return Recompute(mode=asked or "none")
    given = asked if isinstance(asked, tuple | list | set) else (asked,)
    kinds = (type(each) if isinstance(each, nn.Module) else each for each in given)
    classes = tuple(each for each in kinds if isinstance(each, type))
    names = [name for name, module in model.named_modules() if isinstance(module, classes) and name]
    if not names:
        raise ConfigError(
            f"{type(model).__name__} has no {asked}",
            at="activation_checkpoint_config",
            fix='use None, "full", or classes of its modules',
        )
    return Recompute(mode="full", modules=tuple(outermost(names)))


def _heads_of(model: nn.Module) -> int:
    config: Any = getattr(model, "config", None)
    number = getattr(getattr(config, "get_text_config", lambda: config)(), "num_attention_heads", None)
    if type(number) is not int:
        raise ConfigError(
            f"pad_model of a {type(model).__name__} without config.num_attention_heads",
            fix="give it such a config, or let model_fn call parallel_layers.pad_model(model, tp_degree, n_heads)",
        )
    return number


def _pipeline_of(model: nn.Module, config: Mapping[str, Any], order: LayerOrder | None = None) -> Pipeline:
    """Converts `pipeline_config`: stages of equal cost, unless `pipeline_cuts` names the layers before cuts."""
    number, starts = config.get("virtual_pipeline_size", 1), None
    if cuts := config.get("pipeline_cuts"):
        with raise_on_all_ranks(current_mesh().group(), "finding its layers"):
            starts = (order or find_layer_order(model)).starts_after(cuts)
    return Pipeline(schedule="1f1b" if number == 1 else "interleaved_1f1b", num_stages_per_rank=number, layers=starts)


def initialize_parallel_optimizer(
    nxd_config: Mapping[str, Any],
    optimizer_class: Callable[..., torch.optim.Optimizer],
    parameters: Iterable[Any],
    **defaults: Any,
) -> NxDOptimizer:
    """Builds an optimizer whose step clips by the norm of the full gradients. With ZeRO-1 its states, and the model's
    parameters, are sharded over data ranks.

    Raises:
        ConfigError: there are none.
    """
    check_class(optimizer_class)
    groups = divided_groups(parameters) or [{"params": []}]
    if not groups[0]["params"] and current_mesh().size("pp") == 1:  # a stage may have nothing to train
        raise ConfigError("initialize_parallel_optimizer was given no parameter that is trained")
    options = nxd_config["optimizer_config"]
    max_norm = options["max_grad_norm"] if options["grad_clipping"] else None
    optimizer = NxDOptimizer(optimizer_class(groups, **defaults), current_mesh(), max_norm=max_norm)
    optimizer.__dict__["nxd_config"] = nxd_config
    return optimizer
