"""Lazy loading and lazy optimizers."""

import inspect
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from shardwise.api.sources import SOURCE, build_meta
from shardwise.compat.optimum_neuron.distributed.moved_optimizer import lazy_class as make_optimizer_constructor_lazy
from shardwise.parallel.build import read_config
from shardwise.plan.options import check_count
from shardwise.weights.locate import HUB_OPTIONS

__all__ = ["from_pretrained_for_mp", "lazy_load_for_parallelism", "make_optimizer_constructor_lazy"]

_NEEDLESS = frozenset(
    """
    _commit_hash _fast_init _from_auto _from_pipeline adapter_kwargs adapter_name code_revision disable_mmap from_flax
    from_tf low_cpu_mem_usage mirror offload_buffers offload_state_dict tqdm_class trust_remote_code use_safetensors
    weights_only
    """.split()  # noqa: SIM905
)
"""Options of `from_pretrained` that say how weights are read, which happens otherwise here."""


@contextmanager
def lazy_load_for_parallelism(tensor_parallel_size: int = 1, pipeline_parallel_size: int = 1) -> Iterator[None]:
    """Context manager: `from_pretrained` reads no weights (in other threads too), and modules are built on the meta
    device.

    `Parallelizer.parallelize` then reads or initializes each rank's part. Does nothing if both sizes are 1.

    Raises:
        ConfigError: a size is no integer of at least 1.
    """
    check_count("tensor_parallel_size", tensor_parallel_size)
    check_count("pipeline_parallel_size", pipeline_parallel_size)
    if tensor_parallel_size == pipeline_parallel_size == 1:
        yield
        return
    before = PreTrainedModel.__dict__["from_pretrained"]
    PreTrainedModel.from_pretrained = classmethod(from_pretrained_for_mp)
    try:
        with torch.device("meta"):
            yield
    finally:
        PreTrainedModel.from_pretrained = before


def from_pretrained_for_mp(
    cls: Any,
    pretrained_model_name_or_path: str | os.PathLike[str],
    *model_args: Any,
    config: Any = None,
    **options: Any,
) -> Any:
    """Like `cls.from_pretrained`, on the meta device: the weights are read when the model is split.

    Args:
        pretrained_model_name_or_path: a directory or hub id.
        options: options of `from_pretrained`. Those about the model and its source are used; those about reading
            weights have no effect. Parameters that the checkpoint lacks are initialized.

    Returns:
        The model; with `output_loading_info` also the missing, unexpected and mismatched keys. Its `_weight_map` gives
            the file in which a parameter begins.

    Raises:
        LoadError: there are no weights, or they do not fit.
        UnsupportedError: an option is impossible for a model that will be split.
    """
    place = pretrained_model_name_or_path
    options = {name: value for name, value in options.items() if name not in _NEEDLESS and value is not None}
    wants_info = options.pop("output_loading_info", False)
    other_name = options.pop("torch_dtype", None)
    dtype = options.pop("dtype", None) or other_name
    where = {name: value for name in HUB_OPTIONS if (value := options.pop(name, None)) not in (None, "")}
    if not isinstance(config, PreTrainedConfig):
        config, options = read_config(place if config is None else config, {**options, **where}, cls.config_class)
    names = list(inspect.signature(cls.__init__).parameters)[2:]
    options |= dict(zip(names, model_args, strict=False))
    options = {"allow_missing": True, "allow_unused": True, **options, **where}
    model, source = build_meta(place, cls, config=config, dtype=dtype, options=options)
    index, found = source.index, source.found
    assert index is not None
    assert found is not None
    model.__dict__[SOURCE] = source
    model._weight_map = {fqn: index[each.keys[0]].path for fqn, each in found.tensors.items() if each.keys}
    info = {
        "missing_keys": set(found.missing),
        "unexpected_keys": set(found.unexpected),
        "mismatched_keys": {(fqn, *shapes) for fqn, shapes in found.mismatched.items()},
        "error_msgs": [],
    }
    return (model, info) if wants_info else model
