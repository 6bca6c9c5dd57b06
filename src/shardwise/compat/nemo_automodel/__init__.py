"""NeMo Automodel's parallelizer (`nemo_automodel.distributed.parallelizer`) over ours; see docs/migrate."""

from shardwise.compat.nemo_automodel.distributed.parallelizer import (
    HAVE_NVFSDP,
    fsdp2_strategy_parallelize,
    get_hf_tp_shard_plan,
    import_classes_from_paths,
    nvfsdp_strategy_parallelize,
    to_cpu,
    translate_to_torch_parallel_style,
)

__all__ = [
    "HAVE_NVFSDP",
    "fsdp2_strategy_parallelize",
    "get_hf_tp_shard_plan",
    "import_classes_from_paths",
    "nvfsdp_strategy_parallelize",
    "to_cpu",
    "translate_to_torch_parallel_style",
]
