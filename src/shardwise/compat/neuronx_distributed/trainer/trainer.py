"""`neuronx_distributed_config`, and the models and optimizers built by one."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import PreTrainedModel

from shardwise.api.checkpoints import load_checkpoint
from shardwise.api.prepare import prepare
from shardwise.comm.agree import raise_on_all_ranks
from shardwise.compat.layers.by_hand import adopt_model, build_in_turns, check_equal_replicas, layer_order_by_hand
from shardwise.compat.layers.split_module import SplitModule
from shardwise.compat.neuronx_distributed.modules.lora import LoraConfig, LoRAModel
from shardwise.compat.neuronx_distributed.parallel_layers import parallel_state
from shardwise.compat.neuronx_distributed.parallel_layers.pad import pad_model
from shardwise.compat.neuronx_distributed.parallel_layers.parallel_state import current_mesh
from shardwise.compat.neuronx_distributed.trainer.model import NxDModel
from shardwise.compat.neuronx_distributed.trainer.optimizer import NxDOptimizer
from shardwise.compat.warned import warn_idle
from shardwise.errors import ConfigError, MeshError, did_you_mean
from shardwise.job.rendezvous import is_launched
from shardwise.optim.optimizer import check_class, divided_groups
from shardwise.plan.options import FsdpPolicy, ParallelSpec, Pipeline, Recompute, check_count, check_kind
from shardwise.plan.pipeline_plan import LayerOrder
from shardwise.plan.structure import outermost
from shardwise.probe.layer_order import find_layer_order
from shardwise.runtime.adapter_facts import find_model, has_adapters

__all__ = ["initialize", "initialize_parallel_model", "initialize_parallel_optimizer", "neuronx_distributed_config"]

_DEFAULTS: dict[str, dict[str, Any]] = {
    "optimizer_config": {"zero_one_enabled": False, "grad_clipping": True, "max_grad_norm": 1.0},
    "model_init_config": {"sequential_move_factor": 11, "meta_device_init": False, "param_init_fn": None},
}
_PIPELINE_IDLE = frozenset(
    """
    output_loss_value_spec use_zero1_optimizer use_model_wrapper use_optimizer_wrapper input_names leaf_module_cls
    autowrap_functions autowrap_modules autowrap_obj_methods tracer_cls param_init_fn trace_file_path
    return_loss_on_cpu deallocate_pipeline_outputs fuse_microbatches
    """.split()  # noqa: SIM905
)
_PIPELINE = _PIPELINE_IDLE | {
    "auto_partition",
    "broadcast_and_average_loss",
    "num_microbatches",
    "pipeline_cuts",
    "transformer_layer_cls",
    "virtual_pipeline_size",
}


def neuronx_distributed_config(
    tensor_parallel_size: int = 1,
    pipeline_parallel_size: int = 1,
    pipeline_config: Mapping[str, Any] | None = None,
    optimizer_config: Mapping[str, Any] | None = None,
    activation_checkpoint_config: Any = None,
    pad_model: bool = False,
    sequence_parallel: bool = False,
    model_init_config: Mapping[str, Any] | None = None,
    lora_config: Any = None,
    mixed_precision_config: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Returns the complete config for the training functions, and initializes model parallelism.

    If no launcher has started ranks, initialization waits until it is needed, because a Lightning Trainer may start
    them.

    Missing keys of dictionaries have their defaults.

    Raises:
        ConfigError: a key is unknown, or a value is not documented.
        MeshError: model parallelism is initialized differently, or the sizes do not divide the ranks.

    Communicates: like `initialize_model_parallel`.
    """
    config = {
        "tensor_parallel_size": tensor_parallel_size,
        "pipeline_parallel_size": pipeline_parallel_size,
        "pipeline_config": pipeline_config and dict(_checked_keys("pipeline_config", pipeline_config, _PIPELINE)),
        "activation_checkpoint_config": activation_checkpoint_config,
        "pad_model": pad_model,
        "sequence_parallel": sequence_parallel,
        "lora_config": lora_config,
    }
    for name, value in (("optimizer_config", optimizer_config), ("model_init_config", model_init_config)):
        config[name] = {**_DEFAULTS[name], **_checked_keys(name, value, _DEFAULTS[name])}
    _check_values(config)
    warn_idle(
        "neuronx_distributed_config", "float32 weights are the masters", mixed_precision_config=mixed_precision_config
    )
    pipeline = config["pipeline_config"] or {}
    idle = {name: pipeline[name] for name in _PIPELINE_IDLE.intersection(pipeline)}
    warn_idle("pipeline_config", "layers, inputs and the loss are found by running a small model", **idle)
    if parallel_state.opened_mesh() is not None or dist.is_initialized() or is_launched():
        initialize(config)
    elif tensor_parallel_size == pipeline_parallel_size == 1:
        parallel_state.initialize_later(shards=config["optimizer_config"]["zero_one_enabled"])
    return config


def initialize(config: Mapping[str, Any]) -> None:
    """Initializes model parallelism by a config; checks the sizes if it is already initialized."""
    if not isinstance(config, Mapping) or not _DEFAULTS.keys() <= config.keys():
        raise ConfigError("nxd_config is no config", fix="pass what neuronx_distributed_config(...) returned")
    tensor, pipeline = config["tensor_parallel_size"], config["pipeline_parallel_size"]
    shards = config["optimizer_config"]["zero_one_enabled"]
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(tensor, pipeline, shards=shards)
    mesh = parallel_state.current_mesh()
    if (tensor, pipeline) != (mesh.size("tp"), mesh.size("pp")):
        raise MeshError(
            f"tensor_parallel_size {tensor} and pipeline_parallel_size {pipeline} on {mesh.shape}",
            why="model parallel is initialised already, with other sizes",
            fix="use the same sizes, or call parallel_state.destroy_model_parallel() first",
        )
    if shards and mesh.size("ddp") > 1:
        raise MeshError(
            f"zero_one_enabled on {mesh.shape}",
            why="model parallel is initialised already, and replicates over data ranks",
            fix="call neuronx_distributed_config(...) instead of initialize_model_parallel, and give a Lightning "
            "Trainer NeuronXLAStrategy(nxd_config)",
        )


def _checked_keys(name: str, value: Any, known: Any) -> Mapping[str, Any]:
    check_kind(name, value, Mapping | None, fix="use a dictionary")
    for key in value or ():
        if key not in known and not str(key).startswith("_"):  # theirs, private
            hint = did_you_mean(str(key), known)
            raise ConfigError(f"{name} has no key {key!r}{hint}", fix=f"use {', '.join(sorted(known))}")
    return value or {}


def _check_values(config: Mapping[str, Any]) -> None:
    optimizer, init, pipeline = (config[f"{name}_config"] or {} for name in ("optimizer", "model_init", "pipeline"))
    for name, value in {
        "zero_one_enabled": optimizer["zero_one_enabled"],
        "grad_clipping": optimizer["grad_clipping"],
        "meta_device_init": init["meta_device_init"],
        "pad_model": config["pad_model"],
        "sequence_parallel": config["sequence_parallel"],
    }.items():
        check_kind(name, value, bool, fix="use True or False")
    norm = optimizer["max_grad_norm"]
    if optimizer["grad_clipping"] and not (isinstance(norm, int | float) and norm > 0):
        raise ConfigError(f"max_grad_norm is {norm!r}", fix="use a positive number, or grad_clipping False")
    check_kind("lora_config", config["lora_config"], LoraConfig | None, fix="use modules.lora.LoraConfig")
    for name in ("num_microbatches", "virtual_pipeline_size"):
        check_count(f"pipeline_config {name}", pipeline.get(name, 1))
    check_count("sequential_move_factor", init["sequential_move_factor"])


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
        order = pipeline = None
        if mesh.size("pp") > 1:
            kind = config.get("transformer_layer_cls")
            named = [name for name, each in base.named_modules() if kind is not None and isinstance(each, kind)]
            order = layer_order_by_hand(base, mesh, layers=named)
            pipeline = _pipeline_of(base, config, order)
        adopt_model(model, mesh, policy=policy, recompute=recompute, order=order, pipeline=pipeline)
        check_equal_replicas(model)
    else:
        why = "it pads parallel layers; the ranks of a model of transformers hold whole heads"
        warn_idle("neuronx_distributed_config", why, pad_model=nxd_config["pad_model"])
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
    """Converts `activation_checkpoint_config`: every block, or the outermost modules of some classes."""
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
