"""`nemo_automodel.distributed.parallelizer`: the same functions, on top of `shardwise.parallelize`.

docs/migrate/nemo_automodel.md lists the differences from the original and the reasons.
"""

import fnmatch
import inspect
import pkgutil
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
)
from torch.distributed.tensor.parallel.style import ParallelStyle
from torch.utils._pytree import tree_map_only
from transformers import PreTrainedModel

from shardwise.api.prepare import prepare
from shardwise.comm.collectives import copy_to_region
from shardwise.compat.warned import warn_idle
from shardwise.errors import ConfigError, MeshError, PlanError, UnsupportedError, did_you_mean
from shardwise.job.groups import end_process_groups
from shardwise.mesh import Mesh
from shardwise.parallel.build import Construction, build_meta_model, initialize_meta
from shardwise.parallel.loading import draw_values, record_missing
from shardwise.parameters.canonical import full_value
from shardwise.plan.options import FsdpPolicy, ParallelSpec, Precision, check_choice, check_kind
from shardwise.plan.rule import STYLES, Rule
from shardwise.plan.spec import FOUND_ANYWAY, Plan, match
from shardwise.runtime.adapter_facts import find_model
from shardwise.runtime.reading import read_in_forward
from shardwise.search.planning import AUTOMATIC, plan_for

__all__ = [
    "HAVE_NVFSDP", "fsdp2_strategy_parallelize", "get_hf_tp_shard_plan", "import_classes_from_paths",
    "nvfsdp_strategy_parallelize", "to_cpu", "translate_to_torch_parallel_style",
]  # fmt: skip

HAVE_NVFSDP = False
"""nvFSDP itself is not used: `nvfsdp_strategy_parallelize` does what it does with FSDP2, and works all the same."""

_STAGES = {"no_shard": 0, "optim": 1, "optim_grads": 2, "optim_grads_params": 3} | {"params": 3, "grads_params": 3}
_AXES = {"pp": "pp", "pipeline_parallel": "pp", "dp_replicate": "ddp", "ddp": "ddp"}
_AXES |= dict.fromkeys(("data_parallel", "dp", "dp_shard", "fsdp", "context_parallel", "cp"), "data")
_AXES |= {"tensor_parallel": "tp", "tp": "tp"}
"""The names of dims, to what they are here. Parameters are sharded over data and context parallel ranks together."""
_destroy_dist_connection = end_process_groups
_ShardPlan = Mapping[str, ParallelStyle | str] | str | None


def adopt_device_mesh(device_mesh: DeviceMesh, *, shards: bool = True) -> Mesh:
    """Converts a `DeviceMesh` whose dims have names used by torch, NeMo Automodel or Shardwise to a mesh.

    Args:
        device_mesh: mesh of the whole job. Context-parallel ranks count as data ranks.
        shards: whether data ranks shard the parameters, or replicate them (`no_shard`).

    Communicates: like `Mesh.adopt`; if data and context-parallel dims are not flattened, creates their common group.
    """
    fix = 'use torch.distributed.device_mesh.init_device_mesh("cuda", (2, 4), mesh_dim_names=("dp", "tp"))'
    check_kind("device_mesh", device_mesh, DeviceMesh, fix=fix)
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
    tp_shard_plan: _ShardPlan = None,
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
    tp_shard_plan: _ShardPlan = None,
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
    """Runs `fsdp2_strategy_parallelize` with nvFSDP's arguments; FSDP2 implements them
    (docs/migrate/nemo_automodel.md).

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
    """Returns the classes at dotted paths.

    Raises:
        ConfigError: the argument is no list, or some paths lead to no class; lists every one.
    """
    check_kind("class paths", class_paths, list | tuple, fix="pass a list of package.module.ClassName")
    classes: list[type] = []
    problems: list[str] = []
    for path in class_paths:
        try:
            value = _import_from_path(path)
            check_kind(path, value, type, fix="")
            classes.append(value)
        except ConfigError as error:
            problems.append(f"{error.summary} {error.why or ''}")
    if problems:
        raise ConfigError("cannot import every class", why="\n".join(problems), fix="use package.module.ClassName")
    return classes


def _unit_names(model: nn.Module, paths: list[str]) -> tuple[str, ...]:
    """Returns the names of the modules that are instances of the classes at `paths`."""
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
    """Returns the tensor-parallel plan of a model, for any architecture: patterns of module names to torch's styles, or
    to `RuleStyle`s where torch has none.

    Raises:
        PlanError: there is no plan that computes the same.
    """
    check_kind("the model", model, nn.Module, fix="pass a model, not its class or name")
    styles: dict[str, list[str]] = {}
    for rule in plan_for(model, ParallelSpec(), num_parts=2).rules:
        styles.setdefault(rule.pattern, []).append(rule.style)
    return {
        pattern: translate_to_torch_parallel_style(own[0]) if len(own) == 1 else RuleStyle(*own)
        for pattern, own in styles.items()
    }


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
    tp_shard_plan: _ShardPlan,
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
    compute = policy.param_dtype or own
    dtypes = {"params": own, "compute": compute, "reduce": policy.reduce_dtype or compute}
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
    """Returns the dtype of the model's first floating-point parameter."""
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
            module.get_submodule(owner)._buffers[own] = value.to(module.get_buffer(name))

    handle = model.register_forward_pre_hook(fill)


_OF_TORCH: dict[str, tuple[type[ParallelStyle], dict[str, Any]]] = {
    "colwise": (ColwiseParallel, {}),
    "rowwise": (RowwiseParallel, {}),
    "colwise_rep": (ColwiseParallel, {"output_layouts": Replicate()}),
    "colwise_gather_output": (ColwiseParallel, {"output_layouts": Replicate()}),
    "embedding_colwise": (ColwiseParallel, {"output_layouts": Replicate()}),
    "rowwise_rep": (RowwiseParallel, {"input_layouts": Replicate()}),
    "rowwise_split_input": (RowwiseParallel, {"input_layouts": Replicate()}),
    "embedding_rowwise": (RowwiseParallel, {"input_layouts": Replicate()}),
    "sequence_parallel": (SequenceParallel, {}),
}


class RuleStyle(ParallelStyle):
    """A style without a torch class. It carries the equivalent rules.

    Attributes:
        styles: one style for each section of a plan that has a rule for the module.
    """

    def __init__(self, *styles: str) -> None:
        super().__init__()
        self.styles = styles

    def __repr__(self) -> str:
        return f"RuleStyle({', '.join(self.styles)})"

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        """Called by torch's own `parallelize_module`: keeps the module's parameters replicated; sums gradients."""
        if self.styles == ("replicated_with_grad_allreduce",):
            group = device_mesh.get_group()

            def read(parameter: Tensor) -> Tensor:  # no hook on the parameter, in whose place FSDP2 puts another
                return copy_to_region(parameter, group)

            for owner in module.modules():
                read_in_forward(owner, [name for name, _ in owner.named_parameters(recurse=False)], read)
            return module
        raise UnsupportedError(
            f"{self} in torch's parallelize_module",
            why="it divides what DTensor cannot, so torch has no such style",
            fix="pass the plan to fsdp2_strategy_parallelize, nvfsdp_strategy_parallelize or shardwise.parallelize",
        )


def translate_to_torch_parallel_style(style: str) -> ParallelStyle:
    """Returns the style object for a style string of transformers or Shardwise.

    Raises:
        PlanError: the argument is no string, or no style.
    """
    if not isinstance(style, str):
        raise PlanError(
            f"Unsupported parallel style type: {type(style).__name__}", fix='use a string such as "colwise"'
        )
    if style in _OF_TORCH:
        build, options = _OF_TORCH[style]
        return build(**options)
    if style not in FOUND_ANYWAY:
        try:
            Rule.of("*", style)
        except PlanError as error:
            known = set(_OF_TORCH).union(*STYLES.values())
            raise PlanError(
                f"Unknown parallel style: {style}{did_you_mean(style, known)}",
                fix=f"use one of {', '.join(sorted(known))}",
            ) from error
    return RuleStyle(style)


def _import_from_path(path: str) -> Any:
    """Returns the object at a dotted path such as `package.module.Name`."""
    try:
        if "." not in path:
            raise ValueError("it names a module and an object in it")
        return pkgutil.resolve_name(path)
    except (TypeError, ValueError, ImportError, AttributeError) as error:
        hint = did_you_mean(error.name, dir(error.obj)) if isinstance(error, AttributeError) and error.name else ""
        raise ConfigError(f"cannot import {path!r}{hint}", why=str(error), fix="use package.module.Name") from error


def read_plan(plan: Any, model: nn.Module) -> tuple[str | Plan, bool]:
    """Converts a plan of torch's styles to rules. Also returns whether it uses sequence parallelism.

    Args:
        plan: patterns to torch's styles or style strings; the import path of such a dictionary, or of a function that
            returns one (of the model, if it takes an argument); "auto", "declared" or "derived"; None for "auto".
    """
    check_kind("the model", model, nn.Module, fix="pass the model itself, first")
    if isinstance(plan, str) and plan not in AUTOMATIC:
        plan = _import_from_path(plan)
    if callable(plan) and not isinstance(plan, Mapping):
        plan = plan(model) if inspect.signature(plan).parameters else plan()
    if plan is None or isinstance(plan, Plan) or (isinstance(plan, str) and plan in AUTOMATIC):
        return plan or "auto", False
    if not isinstance(plan, Mapping):
        raise PlanError(
            f"a tp_shard_plan cannot be a {type(plan).__name__}",
            fix='use a dict such as {"model.layers.*.mlp.up_proj": ColwiseParallel()}, or the import path of one',
        )
    rules: list[Rule] = []
    for pattern, style in plan.items():
        names = [name for name, _ in model.named_modules() if _matches(str(pattern), name)]
        for each in _styles(pattern, style, model, names):
            rules += [Rule.of(target, each) for target in ([pattern] if _is_ours(pattern) else names)]
    is_sequence = any(
        isinstance(style, SequenceParallel)
        or style == "sequence_parallel"
        or (isinstance(style, RowwiseParallel) and style.output_layouts[0] == Shard(1))
        for style in plan.values()
    )
    return Plan(tuple({(type(rule), rule.pattern): rule for rule in rules}.values())), is_sequence


def _is_ours(pattern: str) -> bool:
    """Returns whether a pattern means the same for `fnmatch`, which torch uses, and for us."""
    return all(part in ("*", "**") or not set(part) & set("*?[") for part in pattern.split("."))


def _matches(pattern: str, name: str) -> bool:
    if _is_ours(pattern):
        return match(pattern, name)
    parts, own = pattern.split("."), name.split(".")
    return len(parts) == len(own) and all(map(fnmatch.fnmatch, own, parts))


def _styles(pattern: str, style: Any, model: nn.Module, names: Sequence[str]) -> tuple[str, ...]:
    """Returns our styles for the user's style of a pattern; empty if sequence parallelism itself covers it."""
    if isinstance(style, str):
        style = translate_to_torch_parallel_style(style)
    if isinstance(style, RuleStyle):
        return tuple(each for each in style.styles if each not in FOUND_ANYWAY)
    if isinstance(style, SequenceParallel | PrepareModuleInput | PrepareModuleOutput | PrepareModuleInputOutput):
        return ()
    modules = [model.get_submodule(name) for name in names]
    is_embedding = bool(modules) and all(isinstance(module, nn.Embedding) for module in modules)
    if isinstance(style, ColwiseParallel):
        head = getattr(model, "get_output_embeddings", lambda: None)()
        gathers = style.output_layouts[0].is_replicate() or any(module is head for module in modules)
        return ("embedding_colwise",) if is_embedding else ("colwise_gather_output" if gathers else "colwise",)
    if isinstance(style, RowwiseParallel):
        if is_embedding:
            return ("embedding_rowwise",)
        return ("rowwise_split_input" if style.input_layouts[0].is_replicate() else "rowwise",)
    raise PlanError(
        f"the plan has a {type(style).__name__} for {pattern!r}",
        fix="use ColwiseParallel, RowwiseParallel, SequenceParallel, PrepareModuleInput, PrepareModuleOutput, a style "
        'string such as "colwise", or what get_hf_tp_shard_plan gives',
    )
