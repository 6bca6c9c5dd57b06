"""Every public item of the five documents, transcribed once: where it is, and its signature as the document has it."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["DOCUMENTED", "Item"]


@dataclass(frozen=True)
class Item:
    """One name.

    Attributes:
        document: its number in the list of documents.
        path: from `shardwise.compat` on.
        signature: parameters and defaults in order, without `self`; empty for a value or an attribute.
    """

    document: int
    path: str
    signature: str = ""


_FSDP2 = "(model, device_mesh, mp_policy=None, tp_shard_plan=None, offload_policy=None)"
_NVFSDP = (
    "(model, device_mesh, nvfsdp_unit_modules=None, tp_shard_plan=None, "
    "data_parallel_sharding_strategy='optim_grads_params', init_nvfsdp_with_meta_device=False, "
    "grad_reduce_in_fp32=False, preserve_fp32_weights=False, overlap_grad_reduce=True, overlap_param_gather=True, "
    "check_for_nan_in_grad=True, average_in_collective=False, disable_bucketing=False, "
    "calculate_per_token_loss=False, keep_fp8_transpose_cache_when_using_custom_fsdp=False, nccl_ub=False, "
    "fsdp_double_buffer=False)"
)
_NEMO = {
    "HAVE_NVFSDP": "",
    "fsdp2_strategy_parallelize": _FSDP2,
    "import_classes_from_paths": "(class_paths)",
    "nvfsdp_strategy_parallelize": _NVFSDP,
    "get_hf_tp_shard_plan": "(model)",
    "translate_to_torch_parallel_style": "(style)",
    "to_cpu": "(v)",
    "_destroy_dist_connection": "()",
}

_CONFIG = (
    "(tensor_parallel_size=1, pipeline_parallel_size=1, pipeline_config=None, optimizer_config=None, "
    "activation_checkpoint_config=None, pad_model=False, sequence_parallel=False, model_init_config=None, "
    "lora_config=None)"
)
_SAVE = (
    "(path, tag='', model=None, optimizer=None, scheduler=None, user_content=None, num_workers=8, use_xser=False, "
    "num_kept_ckpts=None, async_save=False, zero1_optimizer=False)"
)
_LOAD = "(path, tag=None, model=None, optimizer=None, scheduler=None, num_workers=8, strict=True)"
_PARALLEL_STATE = {
    "initialize_model_parallel": "(tensor_model_parallel_size=1, pipeline_model_parallel_size=1)",
    "get_data_parallel_world_size": "()",
    "get_data_parallel_size": "()",
    "get_data_parallel_rank": "()",
    "get_data_parallel_group": "(as_list=False)",
    "get_tensor_parallel_size": "()",
    "get_tensor_model_parallel_size": "()",
    "get_tensor_model_parallel_rank": "()",
    "get_tensor_model_parallel_group": "(as_list=False)",
    "get_pipeline_model_parallel_size": "()",
    "get_pipeline_model_parallel_rank": "()",
    "get_pipeline_model_parallel_group": "(as_list=False)",
    "model_parallel_is_initialized": "()",
    "destroy_model_parallel": "()",
}
_LAYERS = {
    "ColumnParallelLinear": "(input_size, output_size, bias=True, gather_output=True)",
    "RowParallelLinear": "(input_size, output_size, bias=True, input_is_parallel=False)",
    "ParallelEmbedding": "(num_embeddings, embedding_dim)",
    "move_model_to_device": "(model, device)",
    "clip_grad_norm": "(parameters, max_norm, norm_type=2)",
    "parallel_cross_entropy": "(vocab_parallel_logits, target, label_smoothing=0.0)",
    "pad_model": "(model, tp_degree, n_heads, wrapped_classes=(), pad_hook_fn=None)",
    "save": "(state_dict, save_dir, save_serially=True, save_xser=False, down_cast_bf16=False)",
    "load": "(load_dir, model_or_optimizer=None, model_key='model', load_xser=False, sharded=True)",
    "mappings": "",
    "parallel_state": "",
    "random": "",
}
_GQA = (
    "(input_size, output_size, bias=True, gather_output=True, sequence_parallel_enabled=False, dtype=torch.float32, "
    "device=None, kv_size_multiplier=1, fuse_qkv=True)"
)
_XM = {
    "optimizer_step": "(optimizer, barrier=False, optimizer_args=None, groups=None)",
    "mark_step": "()",
    "xla_device": "()",
    "rendezvous": "(tag)",
    "master_print": "(*args)",
}
_LORA_CONFIG = (
    "enable_lora lora_rank lora_alpha lora_dropout bias target_modules use_rslora init_lora_weights save_lora_base "
    "merge_lora save_lora_config_adapter load_lora_from_ckpt lora_save_dir lora_load_tag"
)
_MODULE = (
    "(model_fn, nxd_config, opt_cls, scheduler_cls, model_args=(), model_kwargs={}, opt_args=(), opt_kwargs={}, "
    "scheduler_args=(), scheduler_kwargs={}, grad_accum_steps=1, log_rank0=False, manual_opt=True)"
)
_STRATEGY = "(nxd_config=None, tensor_parallel_size=1, pipeline_parallel_size=1, save_load_xser=True)"

_PARALLELIZE = (
    "(model, device=None, parallelize_embeddings=True, sequence_parallel_enabled=False, kv_size_multiplier=None, "
    "pipeline_parallel_input_names=None, pipeline_parallel_num_microbatches=1, "
    "pipeline_parallel_use_zero1_optimizer=False, pipeline_parallel_gradient_checkpointing_enabled=False, "
    "checkpoint_dir=None, num_local_ranks_per_step=8)"
)
_OWN_PARALLELIZE = (
    "(model, device=None, parallelize_embeddings=True, sequence_parallel_enabled=False, "
    "should_parallelize_layer_predicate_func=None, **parallel_layer_specific_kwargs)"
)
_OPTIMUM = {
    "Parallelizer._parallelize": _OWN_PARALLELIZE,
    "Parallelizer.parallelize": _PARALLELIZE,
    "Parallelizer.optimizer_for_mp": "(optimizer, orig_param_to_parallel_param_on_xla)",
    "Parallelizer.save_model_sharded_checkpoint": (
        "(model, output_dir, optimizer=None, use_xser=True, async_save=False, num_local_ranks_per_step=8)"
    ),
    "Parallelizer.load_model_sharded_checkpoint": "(model, load_dir)",
    "Parallelizer.save_model_checkpoint": "(model, output_dir, as_regular=False, as_sharded=True, optimizer=None)",
    "Parallelizer.load_model_checkpoint": "(model, load_dir)",
    "ParallelizersManager.get_supported_model_types": "()",
    "ParallelizersManager.is_model_supported": "(model_type_or_model)",
    "ParallelizersManager.parallelizer_for_model": "(model_type_or_model)",
    "lazy_load_for_parallelism": "(tensor_parallel_size=1, pipeline_parallel_size=1)",
    "make_optimizer_constructor_lazy": "(optimizer_cls)",
    "utils.make_optimizer_constructor_lazy": "(optimizer_cls)",
    "utils.from_pretrained_for_mp": "(cls, pretrained_model_name_or_path, *model_args, config=None)",
}


def _items() -> list[Item]:
    nxd, optimum = "neuronx_distributed", "optimum_neuron.distributed"
    found = [Item(4, f"nemo_automodel.distributed.parallelizer.{name}", text) for name, text in _NEMO.items()]
    state = f"{nxd}.parallel_layers.parallel_state"
    found += [Item(1, f"{state}.{name}", text) for name, text in _PARALLEL_STATE.items()]
    found += [Item(1, f"{nxd}.parallel_state.initialize_model_parallel")]
    found += [Item(1, f"{nxd}.parallel_layers.{name}", text) for name, text in _LAYERS.items()]
    found += [Item(1, f"{nxd}.xm.{name}", text) for name, text in _XM.items()]
    for home in (nxd, f"{nxd}.trainer"):
        found += [
            Item(2, f"{home}.neuronx_distributed_config", _CONFIG),
            Item(2, f"{home}.initialize_parallel_model", "(nxd_config, model_fn, *model_args, **model_kwargs)"),
            Item(2, f"{home}.initialize_parallel_optimizer", "(nxd_config, optimizer_class, parameters, **defaults)"),
            Item(2, f"{home}.save_checkpoint", _SAVE),
            Item(2, f"{home}.load_checkpoint", _LOAD),
        ]
    model = f"{nxd}.trainer.model.NxDModel"
    found += [
        Item(2, f"{model}.{name}", text)
        for name, text in {
            "local_module": "()",
            "run_train": "(*args, **kwargs)",
            "run_eval": "(*args, **kwargs)",
            "named_parameters": "(*args, **kwargs)",
            "named_buffers": "(*args, **kwargs)",
            "named_modules": "(*args, **kwargs)",
            "named_children": "()",
            "config": "",
            "dtype": "",
        }.items()
    ]
    zero = f"{nxd}.optimizer.NeuronZero1Optimizer"
    found += [
        Item(2, f"{nxd}.modules.qkv_linear.GQAQKVColumnParallelLinear", _GQA),
        Item(2, zero, "(params, optimizer_class)"),
        Item(2, f"{zero}.save_sharded_state_dict", "(output_dir, save_serially=True)"),
        Item(2, f"{zero}.load_sharded_state_dict", "(output_dir, num_workers_per_step=8)"),
        Item(2, f"{nxd}.pipeline.NxDPPModel", "(module)"),
        Item(2, f"{nxd}.modules.lora.LoRAModel", "(module, LoraConfig)"),
        *(Item(2, f"{nxd}.modules.lora.LoraConfig.{name}") for name in _LORA_CONFIG.split()),
        Item(2, f"{nxd}.lightning.NeuronLTModule", _MODULE),
        Item(2, f"{nxd}.lightning.NeuronXLAStrategy", _STRATEGY),
        Item(2, f"{nxd}.lightning.NeuronXLAPrecisionPlugin", "()"),
        Item(2, f"{nxd}.lightning.NeuronTQDMProgressBar"),
        Item(2, f"{nxd}.lightning.NeuronTensorBoardLogger", "(save_dir)"),
    ]
    old = {"Parallelizer.save_model_checkpoint", "Parallelizer.load_model_checkpoint"}  # of the older version alone
    found += [Item(3 if name in old else 0, f"{optimum}.{name}", text) for name, text in _OPTIMUM.items()]
    return found


DOCUMENTED = _items()
