"""`neuronx_distributed_config`."""

from collections.abc import Mapping
from typing import Any

import torch.distributed as dist

from shardwise.compat.neuronx_distributed.modules.lora import LoraConfig
from shardwise.compat.neuronx_distributed.parallel_layers import parallel_state
from shardwise.compat.warned import warn_idle
from shardwise.errors import ConfigError, MeshError, did_you_mean
from shardwise.job.rendezvous import is_launched
from shardwise.plan.options import check_count, check_kind

__all__ = ["initialize", "neuronx_distributed_config"]

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

    Args:
        others: as documented; missing keys of dictionaries have their defaults.

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
    """Initializes model parallelism by a config; checks the sizes if it is already initialized.

    Raises:
        ConfigError: the argument is no config.
        MeshError: it is initialized differently, or the sizes do not divide the ranks.
    """
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
