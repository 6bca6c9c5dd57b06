"""`nemo_automodel.distributed.parallelizer`: the same functions, over `shardwise.parallelize`.

What differs from the original, and why, is in docs/migrate/nemo_automodel.md.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel.style import ParallelStyle

from shardwise.api.device_meshes import adopt_device_mesh
from shardwise.api.prepare import prepare
from shardwise.compat.nemo_automodel.nvfsdp import Strategy, read_strategy, warn_of_unused
from shardwise.errors import ConfigError
from shardwise.mesh import Mesh
from shardwise.parallel.starting_values import initialize_meta
from shardwise.parallel.torch_precision import cast_output, own_dtype, precision_of
from shardwise.parallel.torch_styles import hf_plan, read_plan, style_of
from shardwise.parameters.canonical import canonical_tensor
from shardwise.parameters.registry import entry_of
from shardwise.plan.imports import import_classes as import_classes_from_paths
from shardwise.plan.options import FsdpPolicy, ParallelSpec
from shardwise.search.planning import plan_for

__all__ = [
    "HAVE_NVFSDP", "fsdp2_strategy_parallelize", "get_hf_tp_shard_plan", "import_classes_from_paths",
    "nvfsdp_strategy_parallelize", "to_cpu", "translate_to_torch_parallel_style",
]  # fmt: skip

HAVE_NVFSDP = False
"""nvFSDP itself is not used: `nvfsdp_strategy_parallelize` does what it does with FSDP2, and works all the same."""

Plan = Mapping[str, ParallelStyle | str] | str | None


def fsdp2_strategy_parallelize(
    model: nn.Module,
    device_mesh: DeviceMesh,
    mp_policy: MixedPrecisionPolicy | None = None,
    tp_shard_plan: Plan = None,
    offload_policy: CPUOffloadPolicy | None = None,
) -> nn.Module:
    """Splits `model` over the tensor-parallel dim of `device_mesh` and shards it over its data and context ones, in
    place. Gradients are means over the data ranks, and complete when `backward()` returns.

    Args:
        model: any `nn.Module`, real and the same on every rank, or on the meta device (its weights are loaded after).
        device_mesh: see `adopt_device_mesh` for the names of its dims.
        mp_policy: by default bfloat16 for forward and backward, float32 for the reduction of gradients.
        tp_shard_plan: see `read_plan`; by default the automatic plan, of any architecture. Modules that a plan does not
            name are split as the automatic plan says; name them "replicate" to keep them.
        offload_policy: a `CPUOffloadPolicy` keeps parameters, gradients and optimizer states in host memory.

    Returns:
        `model` itself.

    Raises:
        MeshError: the device mesh cannot be taken over.
        PlanError: the plan cannot be followed.

    Communicates: as `shardwise.parallelize`.
    """
    offloads = isinstance(offload_policy, CPUOffloadPolicy)
    mesh = adopt_device_mesh(device_mesh)
    default = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    policy = default if mp_policy is None else mp_policy
    return _parallelize(model, mesh, tp_shard_plan, policy, fsdp=FsdpPolicy(cpu_offload=offloads))


def nvfsdp_strategy_parallelize(
    model: nn.Module,
    device_mesh: DeviceMesh,
    nvfsdp_unit_modules: list[str] | None = None,
    tp_shard_plan: Plan = None,
    data_parallel_sharding_strategy: str = "optim_grads_params",
    init_nvfsdp_with_meta_device: bool = False,
    grad_reduce_in_fp32: bool = False,
    preserve_fp32_weights: bool = False,
    overlap_grad_reduce: bool = True,
    overlap_param_gather: bool = True,
    check_for_nan_in_grad: bool = True,
    average_in_collective: bool = False,
    disable_bucketing: bool = False,
    calculate_per_token_loss: bool = False,
    keep_fp8_transpose_cache_when_using_custom_fsdp: bool = False,
    nccl_ub: bool = False,
    fsdp_double_buffer: bool = False,
) -> nn.Module:
    """As `fsdp2_strategy_parallelize`, with nvFSDP's arguments, each as FSDP2 does it (docs/migrate/nemo_automodel.md).

    Args:
        nvfsdp_unit_modules: import paths of the classes whose instances are gathered one by one; None: the whole model.
        data_parallel_sharding_strategy: "optim_grads_params", "optim_grads", "optim", "no_shard" (ZeRO 3 to 0), or the
            document's "params" and "grads_params" (3).
        init_nvfsdp_with_meta_device: initialise a meta model; each rank holds all of it for a moment.
        check_for_nan_in_grad: optimizer steps raise `GradientError` on all ranks where a gradient is infinite or NaN.
        calculate_per_token_loss: gradients are summed over data ranks, not averaged.

    Raises:
        ConfigError: the strategy is unknown, a path leads to no class, or no module is an instance of one.
        UnsupportedError: `nccl_ub` without CUDA or with an older torch.
    """
    strategy = read_strategy(data_parallel_sharding_strategy)
    warn_of_unused(
        overlap_grad_reduce=not overlap_grad_reduce,
        overlap_param_gather=not overlap_param_gather,
        disable_bucketing=disable_bucketing,
        keep_fp8_transpose_cache_when_using_custom_fsdp=keep_fp8_transpose_cache_when_using_custom_fsdp,
        fsdp_double_buffer=fsdp_double_buffer,
    )
    units = _unit_names(model, nvfsdp_unit_modules)
    if init_nvfsdp_with_meta_device:
        initialize_meta(model)
    mesh = adopt_device_mesh(device_mesh, shards=strategy is not Strategy.NO_SHARD)
    factor = 1.0 if calculate_per_token_loss else None
    fsdp = strategy.policy(units, gradient_divide_factor=factor, symmetric_memory=nccl_ub)
    own = own_dtype(model)
    policy = MixedPrecisionPolicy(param_dtype=own, reduce_dtype=torch.float32 if grad_reduce_in_fp32 else own)
    params, nonfinite = torch.float32 if preserve_fp32_weights else None, "raise" if check_for_nan_in_grad else "ignore"
    return _parallelize(model, mesh, tp_shard_plan, policy, fsdp=fsdp, params=params, nonfinite=nonfinite)


def get_hf_tp_shard_plan(model: nn.Module) -> dict[str, ParallelStyle]:
    """The tensor-parallel plan of a model, of any architecture: patterns of module names to styles, torch's where torch
    has them, else `RuleStyle`s.

    Raises:
        PlanError: there is none that computes the same.
    """
    return hf_plan(plan_for(model, ParallelSpec(), tp_size=2))


def translate_to_torch_parallel_style(style: str) -> ParallelStyle:
    """A new style object for a style string: the five of the document, all of transformers', and ours.

    Raises:
        PlanError: it is no string, or no style; suggests the nearest.
    """
    return style_of(style)


def to_cpu(v: Any) -> Any:
    """The full value of a `DTensor`, or of a parameter of a split model, on the CPU, on every rank; another tensor on
    the CPU; anything else as it is.

    Raises:
        ConfigError: a `DTensor` is on neither a GPU nor the CPU.

    Communicates: an all-gather over every mesh dim that shards it; all ranks of these must call.
    """
    if isinstance(v, DTensor) and v.device.type not in ("cuda", "cpu"):
        raise ConfigError(f"Unknown device {v.device}", why="a DTensor is on a GPU or the CPU")
    entry = entry_of(v) if isinstance(v, Tensor) else None
    if entry is not None:
        return canonical_tensor(v.detach(), entry.layout, entry.registry.mesh)
    if isinstance(v, DTensor):
        return v.full_tensor().detach().cpu()
    return v.cpu() if isinstance(v, Tensor) else v


def _destroy_dist_connection() -> None:
    """Ends torch's process groups, if there are any; an interrupt waits until that is done, and finds the handler that
    was there before.
    """
    is_main = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGINT, signal.SIG_IGN) if is_main else None
    try:
        if dist.is_available() and dist.is_initialized():
            dist.destroy_process_group()
    finally:
        if is_main:
            signal.signal(signal.SIGINT, signal.SIG_DFL if before is None else before)


def _parallelize(
    model: nn.Module,
    mesh: Mesh,
    tp_shard_plan: Plan,
    policy: MixedPrecisionPolicy,
    *,
    fsdp: FsdpPolicy,
    params: torch.dtype | None = None,
    nonfinite: str = "ignore",
) -> nn.Module:
    plan, sequence_parallel = read_plan(tp_shard_plan, model)
    precision = precision_of(policy, model, params=params, nonfinite=nonfinite)
    spec = ParallelSpec(plan=plan, sequence_parallel=sequence_parallel, fsdp=fsdp, precision=precision)
    prepare(model, mesh, spec, dtype=params)
    cast_output(model, policy.output_dtype)
    return model


def _unit_names(model: nn.Module, paths: list[str] | None) -> tuple[str, ...]:
    classes = tuple(import_classes_from_paths(paths or []))
    names = {name: type(module) for name, module in model.named_modules() if name and isinstance(module, classes)}
    missing = [
        path
        for path, cls in zip(paths or [], classes, strict=True)
        if not any(map(cls.__subclasscheck__, names.values()))
    ]
    if missing:
        raise ConfigError(
            f"nvfsdp_unit_modules: no module of {type(model).__name__} is a {' or a '.join(missing)}",
            fix=f"use classes of its layers, such as {_layer_class(model)}",
        )
    return tuple(names)


def _layer_class(model: nn.Module) -> str:
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList) and len(module)]
    layer = type(lists[0][0]) if lists else type(next(model.children(), model))
    return f"{layer.__module__}.{layer.__qualname__}"
