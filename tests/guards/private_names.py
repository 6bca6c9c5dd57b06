"""The private names of torch that the package uses, with the versions in which they were read."""

from __future__ import annotations

import importlib
import inspect
import re

_IN_ALL = """
torch.ScriptObject:_type
torch.Tensor._make_wrapper_subclass
torch.Tensor:_backward_hooks
torch.Tensor:_is_view
torch.Tensor:_post_accumulate_grad_hooks
torch.Tensor:_version
torch.UntypedStorage:_cdata
torch._C.DisableTorchFunctionSubclass
torch._C._autograd._top_saved_tensors_default_hooks
torch._C._current_graph_task_id
torch._C._disabled_torch_function_impl
torch._C._functorch.peek_interpreter_stack
torch._C._len_torch_dispatch_stack
torch._C._will_engine_execute_node
torch._amp_foreach_non_finite_check_and_unscale_
torch._amp_update_scale_
torch._assert_async
torch._dynamo.config
torch._dynamo.eval_frame.OptimizedModule:_orig_mod
torch._foreach_copy_
torch._foreach_div_
torch._foreach_mul_
torch._foreach_norm
torch._functorch.config
torch._ops.OpOverload:_schema
torch._subclasses.fake_tensor
torch._subclasses.fake_tensor.DataDependentOutputException
torch._subclasses.fake_tensor.DynamicOutputShapeException
torch._subclasses.fake_tensor.FakeTensor
torch._subclasses.fake_tensor.FakeTensorMode
torch._subclasses.fake_tensor.unset_fake_temporarily
torch.autograd.Variable._execution_engine.queue_callback
torch.distributed.DeviceMesh:_flatten
torch.distributed.ProcessGroup:_device_types
torch.distributed._composable.replicate_with_fsdp.replicate
torch.distributed._functional_collectives.AsyncCollectiveTensor
torch.distributed.checkpoint.filesystem._StorageInfo
torch.distributed.checkpoint.metadata._MEM_FORMAT_ENCODING
torch.distributed.distributed_c10d._abort_process_group
torch.distributed.distributed_c10d._get_default_store
torch.distributed.fsdp.FSDPModule:_get_fsdp_state
torch.distributed.fsdp._fully_shard._fsdp_param.FSDPParam:_module_info
torch.distributed.fsdp._fully_shard._fsdp_param.FSDPParam:_unsharded_param
torch.distributed.fsdp._fully_shard._fsdp_param.FSDPParam:sharded_param
torch.distributed.fsdp._fully_shard._fsdp_param.FSDPParam:unsharded_accumulated_grad
torch.distributed.fsdp._fully_shard._fsdp_param_group.FSDPParamGroup:_partial_reduce_output
torch.distributed.fsdp._fully_shard._fsdp_param_group.FSDPParamGroup:_register_post_backward_hook
torch.distributed.fsdp._fully_shard._fsdp_param_group.FSDPParamGroup:_reset_sharded_params
torch.distributed.fsdp._fully_shard._fsdp_param_group.FSDPParamGroup:_training_state
torch.distributed.fsdp._fully_shard._fsdp_param_group.FSDPParamGroup:fsdp_params
torch.distributed.fsdp._fully_shard._fsdp_param_group.FSDPParamGroup:is_sharded
torch.distributed.fsdp._fully_shard._fsdp_param_group.FSDPParamGroup:is_unsharded
torch.distributed.fsdp._fully_shard._fsdp_param_group.FSDPParamGroup:post_backward
torch.distributed.fsdp._fully_shard._fsdp_param_group.FSDPParamGroup:reduce_grads
torch.distributed.fsdp._fully_shard._fsdp_state.FSDPState:_fsdp_param_group
torch.distributed.fsdp._fully_shard._fsdp_state.FSDPState:_is_root
torch.distributed.fsdp._fully_shard._fsdp_state.FSDPState:_post_forward
torch.distributed.fsdp._fully_shard._fsdp_state.FSDPState:_pre_forward
torch.distributed.fsdp._fully_shard._fsdp_state.FSDPState:_state_ctx
torch.distributed.fsdp._fully_shard._fsdp_state.FSDPStateContext:all_states
torch.distributed.fsdp._fully_shard._fsdp_state.FSDPStateContext:post_backward_final_callback_queued
torch.distributed.fsdp._fully_shard._fully_shard:_orig_cls_mro_index
torch.distributed.pipelining._backward
torch.distributed.pipelining._backward.stage_backward_input
torch.distributed.pipelining._backward.stage_backward_weight
torch.distributed.pipelining.schedules._Action.from_str
torch.distributed.pipelining.schedules._PipelineSchedule:_has_backward
torch.distributed.pipelining.schedules._PipelineScheduleRuntime
torch.distributed.pipelining.schedules._PipelineScheduleRuntime:_prepare_schedule_with_comms
torch.distributed.pipelining.schedules._PipelineScheduleRuntime:_step_microbatches
torch.distributed.pipelining.stage._PipelineStageBase
torch.distributed.tensor.DTensor:_local_tensor
torch.distributed.tensor._dtensor_spec.DTensorSpec
torch.distributed.tensor._dtensor_spec.TensorMeta
torch.distributed.tensor._sharding_prop.ShardingPropagator
torch.distributed.tensor._sharding_prop.ShardingPropagator:_propagate_tensor_meta_non_cached
torch.nn.Module:_buffers
torch.nn.Module:_forward_hooks
torch.nn.Module:_forward_pre_hooks
torch.nn.Module:_modules
torch.nn.Module:_non_persistent_buffers_set
torch.nn.Module:_parameters
torch.nn._reduction.legacy_get_string
torch.nn.modules.batchnorm._BatchNorm
torch.nn.modules.conv._ConvNd
torch.nn.parallel.DistributedDataParallel:_active_ddp_module
torch.ops._c10d_functional
torch.ops._c10d_functional.wait_tensor
torch.ops.aten._grouped_mm
torch.ops.aten._is_any_true
torch.ops.aten._reshape_alias
torch.ops.aten._scaled_dot_product_cudnn_attention
torch.ops.aten._scaled_dot_product_efficient_attention
torch.ops.aten._scaled_dot_product_flash_attention
torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
torch.ops.aten._to_copy
torch.ops.aten._unsafe_view
torch.optim.Optimizer:_optimizer_state_dict_pre_hooks
torch.optim.Optimizer:_optimizer_step_post_hooks
torch.optim.lr_scheduler.LRScheduler:_last_lr
torch.optim.lr_scheduler.SequentialLR:_schedulers
torch.optim.optimizer._foreach_supported_types
torch.overrides._pop_mode
torch.overrides._pop_mode_temporarily
torch.overrides._push_mode
torch.serialization._get_layout
torch.testing._internal.distributed.fake_pg.FakeStore
torch.utils._foreach_utils._foreach_supported_types
torch.utils._python_dispatch.TorchDispatchMode
torch.utils._pytree.keystr
torch.utils._pytree.tree_flatten
torch.utils._pytree.tree_flatten_with_path
torch.utils._pytree.tree_iter
torch.utils._pytree.tree_leaves
torch.utils._pytree.tree_map
torch.utils._pytree.tree_map_only
torch.utils._pytree.tree_unflatten
"""
_IN_LATER = """
torch.distributed.fsdp._fully_shard._fsdp_state.FSDPState:_fsdp_param_groups
torch.distributed.fsdp._fully_shard._fsdp_state.FSDPState:_reset_iter_state
torch.distributed.pipelining._backward._autograd_grad_for_inputs
"""

PRIVATE_NAMES = {
    **dict.fromkeys(_IN_ALL.split(), ("2.11", "2.13", "2.14")),
    **dict.fromkeys(_IN_LATER.split(), ("2.13", "2.14")),
}
"""A dotted name, or after a colon an attribute of a class, also one that its code gives to instances -> versions."""


def has_private_name(name):
    """Whether the installed torch has a name of `PRIVATE_NAMES`."""
    path, _, attribute = name.partition(":")
    try:
        value = _resolve(path)
    except (ImportError, AttributeError):
        return False
    if not attribute or hasattr(value, attribute):
        return True
    try:
        return re.search(rf"\b{attribute}\b", inspect.getsource(value)) is not None
    except (OSError, TypeError):
        return False


def _resolve(path):
    """The module, class or function of a dotted name. A module takes precedence over an attribute of the same name."""
    parts = path.split(".")
    value = importlib.import_module(parts[0])
    for number, part in enumerate(parts[1:], 2):
        try:
            is_module = inspect.ismodule(value)
            value = importlib.import_module(".".join(parts[:number])) if is_module else getattr(value, part)
        except ImportError:
            value = getattr(value, part)
    return value
