"""`nemo_automodel.distributed.parallelizer`: the same functions, on top of `shardwise.parallelize`.

docs/migrate/nemo_automodel.md lists the differences from the original and the reasons.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel.style import ParallelStyle
from torch.utils._pytree import tree_map_only
from transformers import PreTrainedModel

from shardwise.api.prepare import prepare
from shardwise.compat.nemo_automodel.distributed.styles import hf_plan, import_from_path, read_plan
from shardwise.compat.nemo_automodel.distributed.styles import style_of as translate_to_torch_parallel_style
from shardwise.compat.warned import warn_idle
from shardwise.errors import ConfigError, MeshError, UnsupportedError, did_you_mean
from shardwise.job.groups import end_process_groups
from shardwise.mesh import Mesh
from shardwise.parallel.build import Construction, build_meta_model, initialize_meta
from shardwise.parallel.loading import draw_values, record_missing
from shardwise.parameters.canonical import full_value
from shardwise.plan.options import FsdpPolicy, ParallelSpec, Precision, check_choice, check_kind
from shardwise.runtime.adapter_facts import find_model
from shardwise.search.planning import plan_for

__all__ = [
    "HAVE_NVFSDP", "fsdp2_strategy_parallelize", "get_hf_tp_shard_plan", "import_classes_from_paths",
    "nvfsdp_strategy_parallelize", "to_cpu", "translate_to_torch_parallel_style",
]  # fmt: skip

HAVE_NVFSDP = False
"""nvFSDP itself is not used: `nvfsdp_strategy_parallelize` does what it does with FSDP2, and works all the same."""

_STAGES = {"no_shard": 0, "optim": 1, "optim_grads": 2, "optim_grads_params": 3} | {"params": 3, "grads_params": 3}
_AXES = {
    "pp": "pp",
    "pipeline_parallel": "pp",
    "dp_replicate": "ddp",
    "ddp": "ddp",
    "data_parallel": "data",
    "dp": "data",
    "dp_shard": "data",
    "fsdp": "data",
    "context_parallel": "data",
    "cp": "data",
    "tensor_parallel": "tp",
    "tp": "tp",
}
"""The names of dims, to what they are here. Parameters are sharded over data and context parallel ranks together."""
_destroy_dist_connection = end_process_groups

Plan = Mapping[str, ParallelStyle | str] | str | None


def adopt_device_mesh(device_mesh: DeviceMesh, *, shards: bool = True) -> Mesh:
    """Converts a `DeviceMesh` whose dims have names used by torch, NeMo Automodel or Shardwise to a mesh.

    Args:
        device_mesh: mesh of the whole job. Context-parallel ranks count as data ranks.
        shards: whether data ranks shard the parameters, or replicate them (`no_shard`).

    Raises:
        MeshError: the argument is no `DeviceMesh`, or a dim of several ranks has an unknown name.

    Communicates: like `Mesh.adopt`; if data and context-parallel dims are not flattened, creates their common group.
    """
    if not isinstance(device_mesh, DeviceMesh):
        raise MeshError(
            f"device_mesh cannot be a {type(device_mesh).__name__}",
            fix='use torch.distributed.device_mesh.init_device_mesh("cuda", (2, 4), mesh_dim_names=("dp", "tp"))',
        )
    names = device_mesh.mesh_dim_names or tuple(map(str, range(device_mesh.ndim)))
    wide = [name for name, size in zip(names, device_mesh.shape, strict=True) if size > 1]
    for name in wide:
        if name not in _AXES:
            why = f"{name!r} is no axis{did_you_mean(name, _AXES)}"
            fix = f"name them {', '.join(_AXES)}"
            raise MeshError(f"cannot tell what the dims {names} of the device mesh are for", why=why, fix=fix)
    sharding = "fsdp" if shards else "ddp"
    axes = {name: sharding if _AXES[name] == "data" else _AXES[name] for name in wide}
    together = [name for name in wide if axes[name] == sharding]
    if len(together) < 2:
        return Mesh.adopt(device_mesh, axes=axes)
    groups = {axes[name]: device_mesh.get_group(name) for name in wide if name not in together}
    groups[sharding] = device_mesh[tuple(together)]._flatten().get_group()
    return Mesh.adopt(groups)


def fsdp2_strategy_parallelize(
    model: nn.Module,
    device_mesh: DeviceMesh,
    mp_policy: MixedPrecisionPolicy | None = None,
    tp_shard_plan: Plan = None,
    offload_policy: CPUOffloadPolicy | None = None,
) -> nn.Module:
    """Splits `model` over the tensor-parallel dim of `device_mesh` and shards it over data and context dims.

    Gradients are means over the data ranks, and complete when `backward()` returns.

    Args:
        model: any `nn.Module`, real and the same on every rank, or meta (its weights are loaded afterwards).
        device_mesh: see `adopt_device_mesh` for the names of its dims.
        mp_policy: default: bfloat16 for forward and backward, float32 for the reduction of gradients.
        tp_shard_plan: see `read_plan`; default: the automatic plan, for any architecture. The automatic plan also
            splits modules that a plan does not name; name them "replicate" to keep them.
        offload_policy: a `CPUOffloadPolicy` keeps parameters, gradients and optimizer states in host memory.

    Returns:
        `model` itself.

    Raises:
        MeshError: the device mesh cannot be converted.
        PlanError: the plan cannot be applied.

    Communicates: like `shardwise.parallelize`.
    """
    check_kind("offload_policy", offload_policy, OffloadPolicy | None, fix="use CPUOffloadPolicy(...), or None")
    mesh = adopt_device_mesh(device_mesh)
    policy = mp_policy or MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    fsdp = FsdpPolicy(cpu_offload=isinstance(offload_policy, CPUOffloadPolicy))
    return _parallelize(model, mesh, tp_shard_plan, policy, fsdp=fsdp)


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
    """`fsdp2_strategy_parallelize` with nvFSDP's arguments, implemented by FSDP2 (docs/migrate/nemo_automodel.md).

    Args:
        nvfsdp_unit_modules: import paths of the classes whose instances are FSDP units; None: the whole model.
        data_parallel_sharding_strategy: "optim_grads_params", "optim_grads", "optim", "no_shard" (ZeRO 3 to 0), or the
            document's "params" and "grads_params" (3).
        init_nvfsdp_with_meta_device: initialize a meta model; each rank holds all of it for a moment.
        check_for_nan_in_grad: optimizer steps raise `GradientError` on all ranks if a gradient is infinite or NaN.
        calculate_per_token_loss: sum gradients over data ranks instead of averaging.

    Raises:
        ConfigError: the strategy is unknown, a path leads to no class, or no module is an instance of one.
        UnsupportedError: `nccl_ub` without CUDA or with an older torch.
    """
    check_choice("data_parallel_sharding_strategy", data_parallel_sharding_strategy, tuple(_STAGES))
    stage = _STAGES[data_parallel_sharding_strategy]
    warn_idle(
        "nvfsdp_strategy_parallelize",
        "FSDP2 has no equivalent",
        overlap_grad_reduce=not overlap_grad_reduce,
        overlap_param_gather=not overlap_param_gather,
        disable_bucketing=disable_bucketing,
        keep_fp8_transpose_cache_when_using_custom_fsdp=keep_fp8_transpose_cache_when_using_custom_fsdp,
        fsdp_double_buffer=fsdp_double_buffer,
    )
    check_kind("the model", model, nn.Module, fix="pass the model itself, first")
    units = _unit_names(model, nvfsdp_unit_modules or [])
    if init_nvfsdp_with_meta_device:
        initialize_meta(model)
    mesh = adopt_device_mesh(device_mesh, shards=stage > 0)
    factor = 1.0 if calculate_per_token_loss else None
    fsdp = FsdpPolicy(zero_stage=stage or 3, units=units, gradient_divide_factor=factor, symmetric_memory=nccl_ub)
    own = _own_dtype(model)
    policy = MixedPrecisionPolicy(param_dtype=own, reduce_dtype=torch.float32 if grad_reduce_in_fp32 else own)
    params, nonfinite = torch.float32 if preserve_fp32_weights else None, "raise" if check_for_nan_in_grad else "ignore"
    return _parallelize(model, mesh, tp_shard_plan, policy, fsdp=fsdp, params=params, nonfinite=nonfinite)


def import_classes_from_paths(class_paths: list[str]) -> list[type]:
    """The classes at dotted paths.

    Raises:
        ConfigError: the argument is no list, or some paths lead to no class; lists every one.
    """
    check_kind("class paths", class_paths, list | tuple, fix="pass a list of package.module.ClassName")
    classes: list[type] = []
    problems: list[str] = []
    for path in class_paths:
        try:
            value = import_from_path(path)
            check_kind(path, value, type, fix="")
            classes.append(value)
        except ConfigError as error:
            problems.append(f"{error.summary} {error.why or ''}")
    if problems:
        raise ConfigError("cannot import every class", why="\n".join(problems), fix="use package.module.ClassName")
    return classes


def _unit_names(model: nn.Module, paths: list[str]) -> tuple[str, ...]:
    """Names of the modules that are instances of the classes at `paths`."""
    classes = tuple(import_classes_from_paths(paths))
    modules = {name: module for name, module in model.named_modules() if name}
    for path, each in zip(paths, classes, strict=True):
        if not any(isinstance(module, each) for module in modules.values()):
            kinds = sorted({f"{type(own).__module__}.{type(own).__qualname__}" for own in modules.values()})
            raise ConfigError(
                f"nvfsdp_unit_modules: no module of {type(model).__name__} is a {path}",
                fix=f"use classes of its modules: {', '.join(kinds)}",
            )
    return tuple(name for name, module in modules.items() if isinstance(module, classes))


def get_hf_tp_shard_plan(model: nn.Module) -> dict[str, ParallelStyle]:
    """The tensor-parallel plan of a model, for any architecture: patterns of module names to torch's styles, or to
    `RuleStyle`s where torch has none.

    Raises:
        PlanError: there is no plan that computes the same.
    """
    check_kind("the model", model, nn.Module, fix="pass a model, not its class or name")
    return hf_plan(plan_for(model, ParallelSpec(), num_parts=2))


def to_cpu(v: Any) -> Any:
    """Copies a value to the CPU: the full value of a `DTensor` or of a split model's parameter, on every rank. Returns
    other objects unchanged.

    Raises:
        ConfigError: a `DTensor` is on neither a GPU nor the CPU.

    Communicates: an all-gather over every mesh dim that shards it; all ranks of these dims must call it.
    """
    if isinstance(v, DTensor) and v.device.type not in ("cuda", "cpu"):
        raise ConfigError(f"Unknown device {v.device}", why="a DTensor is on a GPU or the CPU")
    return full_value(v) if isinstance(v, Tensor) else v


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
    check_kind("mp_policy", policy, MixedPrecisionPolicy, fix="use torch.distributed.fsdp.MixedPrecisionPolicy(...)")
    if not policy.cast_forward_inputs:
        raise UnsupportedError(
            "MixedPrecisionPolicy(cast_forward_inputs=False)",
            why="inputs of every unit are cast to the dtype that it computes in",
            fix="cast inside the modules that compute in another dtype",
        )
    own = params or _own_dtype(model)
    dtypes = {
        "params": own,
        "compute": policy.param_dtype or own,
        "reduce": policy.reduce_dtype or policy.param_dtype or own,
    }
    precision = None
    if nonfinite != "ignore" or set(dtypes.values()) != {own}:
        named = {name: str(each).removeprefix("torch.") for name, each in dtypes.items()}
        precision = Precision(**named, nonfinite=nonfinite)
    unsaved = _unsaved_buffers(find_model(model))
    spec = ParallelSpec(plan=plan, sequence_parallel=sequence_parallel, fsdp=fsdp, precision=precision)
    prepare(model, mesh, spec, dtype=params)
    if (output_dtype := policy.output_dtype) is not None:
        model.register_forward_hook(
            lambda module, args, output: tree_map_only(
                Tensor, lambda each: each.to(output_dtype) if each.is_floating_point() else each, output
            )
        )
    if unsaved:
        _fill_at_first_forward(find_model(model), unsaved)
    return model


def _own_dtype(model: nn.Module) -> torch.dtype:
    """Dtype of the model's first floating-point parameter."""
    return next((each.dtype for each in model.parameters() if each.is_floating_point()), torch.float32)


def _unsaved_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Initial values, on the CPU, of a meta model's buffers that are in no state dict, such as `inv_freq`."""
    if not isinstance(model, PreTrainedModel) or not any(value.is_meta for value in model.buffers()):
        return {}
    with Construction() as construction:
        fresh = build_meta_model(model.config, type(model), dtype=model.dtype, options={})
    values = record_missing(fresh, construction, ())
    saved = fresh.state_dict().keys()
    names = [name for name, value in model.named_buffers() if value.is_meta and name in values and name not in saved]
    return {name: draw_values(construction, [values[name]], f"0/{name.rpartition('.')[0]}")[0] for name in names}


def _fill_at_first_forward(model: nn.Module, values: Mapping[str, Tensor]) -> None:
    """Sets these buffers at the first forward. `to_empty` leaves them undefined, and no state dict holds them."""

    def fill(module: nn.Module, args: Any) -> None:
        handle.remove()
        for name, value in values.items():
            owner, _, own = name.rpartition(".")
            buffers = module.get_submodule(owner)._buffers
            old = buffers[own]
            assert old is not None
            buffers[own] = value.to(old.device, old.dtype)

    handle = model.register_forward_pre_hook(fill)
