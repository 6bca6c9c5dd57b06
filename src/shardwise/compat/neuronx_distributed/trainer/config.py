"""`neuronx_distributed_config`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardwise.compat.neuronx_distributed.parallel_layers.parallel_state import (
    current_mesh,
    initialize_model_parallel,
    model_parallel_is_initialized,
)
from shardwise.compat.warned import warn_once
from shardwise.errors import ConfigError, MeshError, did_you_mean

__all__ = ["neuronx_distributed_config"]

_DEFAULTS: dict[str, dict[str, Any]] = {
    "optimizer_config": {"zero_one_enabled": False, "grad_clipping": True, "max_grad_norm": 1.0},
    "model_init_config": {"sequential_move_factor": 11, "meta_device_init": False, "param_init_fn": None},
    "mixed_precision_config": {
        "use_master_weights": False,
        "use_fp32_grad_acc": False,
        "use_master_weights_in_ckpt": False,
    },
}
_PIPELINE = frozenset(
    """
    transformer_layer_cls num_microbatches virtual_pipeline_size output_loss_value_spec return_mb_loss
    broadcast_and_average_loss use_zero1_optimizer use_model_wrapper use_optimizer_wrapper pipeline_cuts input_names
    leaf_module_cls autowrap_functions autowrap_modules autowrap_obj_methods tracer_cls param_init_fn trace_file_path
    return_loss_on_cpu deallocate_pipeline_outputs auto_partition fuse_microbatches manual_pp_partition
    manual_pp_stage_partition_fn manual_pp_loss_fn
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
    """What the training functions take, complete; initialises model parallelism, unless that has been done alike.

    Args:
        pipeline_config, optimizer_config, model_init_config, mixed_precision_config: dictionaries, which stay as they
            are; keys that are left out have their documented defaults.
        others: as documented.

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
    _check_keys("pipeline_config", pipeline_config, _PIPELINE)
    sub = {name: {**_DEFAULTS[name], **(value or {})} for name, value in given.items()}
    if sequential_move_factor is not None:
        sub["model_init_config"]["sequential_move_factor"] = sequential_move_factor
    _check_values(sub["model_init_config"]["sequential_move_factor"], activation_checkpoint_config)
    _warn_of_unused(mixed_precision_config=any(sub["mixed_precision_config"].values()), pad_model=pad_model)
    shards = bool(sub["optimizer_config"]["zero_one_enabled"])
    sizes = tensor_parallel_size, pipeline_parallel_size
    if not model_parallel_is_initialized():
        initialize_model_parallel(*sizes, context_parallel_size, expert_parallel_size, shards=shards)
    _check_sizes(*sizes)
    return {
        "tensor_parallel_size": tensor_parallel_size,
        "pipeline_parallel_size": pipeline_parallel_size,
        "expert_parallel_size": expert_parallel_size,
        "context_parallel_size": context_parallel_size,
        "pipeline_config": dict(pipeline_config or {}),
        "activation_checkpoint_config": activation_checkpoint_config,
        "pad_model": pad_model,
        "sequence_parallel": sequence_parallel,
        "lora_config": lora_config,
        **sub,
    }


def _check_keys(name: str, value: Mapping[str, Any] | None, known: Any) -> None:
    unknown = [key for key in value or () if key not in known]
    if unknown:
        raise ConfigError(
            f"{name} has no key {unknown[0]!r}{did_you_mean(str(unknown[0]), known)}",
            fix=f"use {', '.join(sorted(known))}",
        )


def _check_values(factor: Any, activation_checkpoint_config: Any) -> None:
    if type(factor) is not int or factor < 1:
        raise ConfigError(f"sequential_move_factor is {factor!r}", why="it counts processes", fix="use 1 to 32")
    if isinstance(activation_checkpoint_config, str) and activation_checkpoint_config != "full":
        raise ConfigError(
            f"activation_checkpoint_config is {activation_checkpoint_config!r}"
            + did_you_mean(activation_checkpoint_config, ["full"]),
            fix='use None, "full", a module class or several',
        )


def _check_sizes(tensor: int, pipeline: int) -> None:
    if (tensor, pipeline) != (current_mesh().size("tp"), current_mesh().size("pp")):
        raise MeshError(
            f"tensor_parallel_size {tensor} and pipeline_parallel_size {pipeline} on {current_mesh().shape}",
            why="model parallel is initialised already, with other sizes",
            fix="use the same sizes, or call parallel_state.destroy_model_parallel() first",
        )


def _warn_of_unused(*, mixed_precision_config: bool, pad_model: bool) -> None:
    if mixed_precision_config:
        warn_once("neuronx_distributed_config: mixed_precision_config changes nothing: float32 weights are the masters")
    if pad_model:
        warn_once("neuronx_distributed_config: pad_model changes nothing: heads need not divide by the number of ranks")
