"""`neuronx_distributed_config`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from torch import nn

from shardwise.compat.neuronx_distributed.modules.lora import LoraConfig
from shardwise.compat.neuronx_distributed.parallel_layers import parallel_state
from shardwise.compat.warned import warn_once
from shardwise.errors import ConfigError, MeshError, did_you_mean
from shardwise.job.rendezvous import is_launched
from shardwise.plan.options import check_count, check_kind

__all__ = ["initialize", "neuronx_distributed_config"]

_MASTERS = ("use_master_weights", "use_fp32_grad_acc", "use_master_weights_in_ckpt")
_DEFAULTS: dict[str, dict[str, Any]] = {
    "optimizer_config": {"zero_one_enabled": False, "grad_clipping": True, "max_grad_norm": 1.0},
    "model_init_config": {"sequential_move_factor": 11, "meta_device_init": False, "param_init_fn": None},
    "mixed_precision_config": dict.fromkeys(_MASTERS, False),
}
_PIPELINE_IDLE = frozenset(
    """
    output_loss_value_spec use_zero1_optimizer use_model_wrapper use_optimizer_wrapper input_names leaf_module_cls
    autowrap_functions autowrap_modules autowrap_obj_methods tracer_cls param_init_fn trace_file_path
    return_loss_on_cpu deallocate_pipeline_outputs fuse_microbatches
    """.split()  # noqa: SIM905
)
_PIPELINE = _PIPELINE_IDLE | frozenset(
    """
    transformer_layer_cls num_microbatches virtual_pipeline_size return_mb_loss broadcast_and_average_loss
    auto_partition pipeline_cuts manual_pp_partition manual_pp_stage_partition_fn manual_pp_loss_fn
    """.split()  # noqa: SIM905
)


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
    expert_parallel_size: int = 1,
    context_parallel_size: int = 1,
    mixed_precision_config: Mapping[str, Any] | None = None,
    sequential_move_factor: int | None = None,
    lnc_size: int = 1,
) -> dict[str, Any]:
    """Returns what the training functions take, complete, and initialises model parallelism. Where no launcher has
    started ranks, that waits until it is needed, because a Lightning Trainer may start them.

    Args:
        others: as documented; dictionaries stay as they are, and keys that are left out have their defaults.

    Raises:
        ConfigError: a key is unknown, or a value none of those documented.
        MeshError: model parallelism is initialised with other sizes, or the sizes do not divide the ranks.

    Communicates: as `initialize_model_parallel`.
    """
    given = {
        "optimizer_config": optimizer_config,
        "model_init_config": model_init_config,
        "mixed_precision_config": mixed_precision_config,
    }
    for name, value in given.items():
        _check_keys(name, value, _DEFAULTS[name])
    _check_pipeline(pipeline_config)
    sub = {name: {**_DEFAULTS[name], **(value or {})} for name, value in given.items()}
    if sequential_move_factor is not None:
        sub["model_init_config"]["sequential_move_factor"] = sequential_move_factor
    switches = {"pad_model": pad_model, "sequence_parallel": sequence_parallel}
    _check_values(sub, activation_checkpoint_config, lora_config, **switches)
    _note_masters(mixed_precision_config, sub)
    config = {
        "tensor_parallel_size": tensor_parallel_size,
        "pipeline_parallel_size": pipeline_parallel_size,
        "expert_parallel_size": expert_parallel_size,
        "context_parallel_size": context_parallel_size,
        "pipeline_config": pipeline_config and dict(pipeline_config),
        "activation_checkpoint_config": activation_checkpoint_config,
        "pad_model": pad_model,
        "sequence_parallel": sequence_parallel,
        "lora_config": lora_config,
        **sub,
    }
    sizes = tensor_parallel_size, pipeline_parallel_size
    is_wrong = any(type(size) is not int or size < 1 for size in sizes)
    if is_wrong or parallel_state.opened_mesh() is not None or dist.is_initialized() or is_launched():
        initialize(config)
    elif sizes == (1, 1):
        parallel_state.initialize_later(shards=sub["optimizer_config"]["zero_one_enabled"])
    return config


def initialize(config: Mapping[str, Any]) -> None:
    """Initialises model parallelism as a config says; checks the sizes where that has been done.

    Raises:
        MeshError: it has been done with other sizes, or the sizes do not divide the ranks.
    """
    tensor, pipeline = checked(config)["tensor_parallel_size"], config["pipeline_parallel_size"]
    if not parallel_state.model_parallel_is_initialized():
        others = config["context_parallel_size"], config["expert_parallel_size"]
        parallel_state.initialize_model_parallel(
            tensor, pipeline, *others, shards=config["optimizer_config"]["zero_one_enabled"]
        )
    mesh = parallel_state.current_mesh()
    if (tensor, pipeline) != (mesh.size("tp"), mesh.size("pp")):
        raise MeshError(
            f"tensor_parallel_size {tensor} and pipeline_parallel_size {pipeline} on {mesh.shape}",
            why="model parallel is initialised already, with other sizes",
            fix="use the same sizes, or call parallel_state.destroy_model_parallel() first",
        )
    if config["optimizer_config"]["zero_one_enabled"]:
        parallel_state.shard_data_ranks()


def _note_masters(given: Any, sub: dict[str, dict[str, Any]]) -> None:
    if given is None and sub["optimizer_config"]["zero_one_enabled"]:
        sub["mixed_precision_config"] |= dict.fromkeys(_MASTERS[:2], True)
    elif any(sub["mixed_precision_config"].values()):
        warn_once("neuronx_distributed_config: mixed_precision_config changes nothing: float32 weights are the masters")


def checked(config: Any) -> Mapping[str, Any]:
    """The config itself, or a ConfigError where it is none."""
    if not isinstance(config, Mapping) or not _DEFAULTS.keys() <= config.keys():
        raise ConfigError("nxd_config is no config", fix="pass what neuronx_distributed_config(...) returned")
    return config


def _check_keys(name: str, value: Any, known: Any) -> None:
    check_kind(name, value, Mapping | None, fix="use a dictionary")
    unknown = [key for key in value or () if key not in known and not str(key).startswith("_")]  # theirs, private
    if unknown:
        raise ConfigError(
            f"{name} has no key {unknown[0]!r}{did_you_mean(str(unknown[0]), known)}",
            fix=f"use {', '.join(sorted(known))}",
        )


def _check_pipeline(given: Any) -> None:
    _check_keys("pipeline_config", given, _PIPELINE)
    config = given or {}
    if idle := sorted(name for name in _PIPELINE_IDLE.intersection(config) if config[name]):
        warn_once(
            f"pipeline_config: {', '.join(idle)} change nothing: the layers, what passes between them and what the "
            "loss is are found by running a small model"
        )
    for name in ("num_microbatches", "virtual_pipeline_size"):
        check_count(f"pipeline_config {name}", config.get(name, 1))
    if config.get("return_mb_loss") and config.get("broadcast_and_average_loss"):
        raise ConfigError("pipeline_config return_mb_loss and broadcast_and_average_loss", fix="leave one of them out")
    manual = [name for name in ("manual_pp_stage_partition_fn", "manual_pp_loss_fn") if config.get(name)]
    if manual and not config.get("manual_pp_partition"):
        raise ConfigError(
            f"pipeline_config {manual[0]} without manual_pp_partition", fix="add manual_pp_partition=True"
        )


def _check_values(
    sub: Mapping[str, Mapping[str, Any]], activation_checkpoint_config: Any, lora_config: Any, **switches: Any
) -> None:
    optimizer, init = sub["optimizer_config"], sub["model_init_config"]
    switches = {
        "optimizer_config zero_one_enabled": optimizer["zero_one_enabled"],
        "optimizer_config grad_clipping": optimizer["grad_clipping"],
        "model_init_config meta_device_init": init["meta_device_init"],
        **switches,
    }
    for name, value in switches.items():
        if type(value) is not bool:
            raise ConfigError(f"{name} is {value!r}", fix="use True or False")
    norm = sub["optimizer_config"]["max_grad_norm"]
    if sub["optimizer_config"]["grad_clipping"] and not (isinstance(norm, int | float) and norm > 0):
        raise ConfigError(f"max_grad_norm is {norm!r}", fix="use a positive number, or grad_clipping False")
    check_kind("lora_config", lora_config, LoraConfig | None, fix="use modules.lora.LoraConfig")
    check_count("sequential_move_factor", sub["model_init_config"]["sequential_move_factor"])
    asked = activation_checkpoint_config
    classes = asked if isinstance(asked, tuple | list | set) else [asked]
    if asked not in (None, "full") and not all(isinstance(each, type | nn.Module) for each in classes):
        near = did_you_mean(str(asked), ["full"])
        raise ConfigError(
            f"activation_checkpoint_config is {asked!r}{near}", fix='use None, "full", a module, its class or several'
        )
