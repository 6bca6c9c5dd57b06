"""Models that are loaded before their mesh is known: nothing is read until they are split.

# [Note: lazy loading is one thread's]
While some thread loads lazily, a function stands in the place of `from_pretrained` that asks who calls: whoever entered
`loading_lazily` is given a model on the meta device, everybody else what transformers does (docs/decisions/0026).
"""

from __future__ import annotations

import inspect
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedConfig, PreTrainedModel

from shardwise.api.sources import SOURCE, WeightSource, build_meta
from shardwise.errors import UnsupportedError
from shardwise.parallel.build import read_config
from shardwise.weights.locate import HUB_OPTIONS

__all__ = ["build_lazily", "loading_lazily"]

_IS_LAZY: ContextVar[bool] = ContextVar("_shardwise_is_lazy", default=False)

_NEEDLESS = frozenset(
    """
    _commit_hash _fast_init _from_auto _from_pipeline adapter_kwargs adapter_name code_revision disable_mmap from_flax
    from_tf low_cpu_mem_usage mirror offload_buffers offload_state_dict tqdm_class trust_remote_code use_safetensors
    weights_only
    """.split()  # noqa: SIM905
)
"""Options of `from_pretrained` that say how weights are read, which happens otherwise here."""

_REFUSED = frozenset(
    """
    device_map max_memory offload_folder quantization_config load_in_8bit load_in_4bit gguf_file state_dict
    fusion_config use_kernels kernel_config tp_plan tp_size device_mesh distributed_config
    """.split()  # noqa: SIM905
)
"""Options of `from_pretrained` that a model which is to be split cannot have."""


class _Patch:
    """Replaces `PreTrainedModel.from_pretrained` while some thread loads lazily."""

    def __init__(self) -> None:
        self._lock, self._number = threading.Lock(), 0
        self._before: Any = None

    @contextmanager
    def installed(self) -> Iterator[None]:
        with self._lock:
            self._number += 1
            if self._number == 1:
                self._before = PreTrainedModel.__dict__["from_pretrained"]
                PreTrainedModel.from_pretrained = classmethod(self._from_pretrained)
        try:
            yield
        finally:
            with self._lock:
                self._number -= 1
                if self._number == 0:
                    PreTrainedModel.from_pretrained = self._before

    def _from_pretrained(self, cls: Any, *args: Any, **options: Any) -> Any:
        return (build_lazily if _IS_LAZY.get() else self._before.__func__)(cls, *args, **options)


_PATCH = _Patch()


class _MetaModules(TorchFunctionMode):
    """Builds linears and embeddings of this thread on the meta device, unless they are told another."""

    _BUILT = (nn.Linear.__init__.__code__, nn.Embedding.__init__.__code__)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.empty and kwargs.get("device") is None and sys._getframe(1).f_code in self._BUILT:
            kwargs = {**kwargs, "device": "meta"}
        return func(*args, **kwargs)


@contextmanager
def loading_lazily() -> Iterator[None]:
    """Inside, and in this thread alone, `from_pretrained` of transformers' models reads no weights, and every
    `nn.Linear` and `nn.Embedding` is built on the meta device; `split_lazily` gives them their values.
    """
    with _PATCH.installed(), _MetaModules():
        token = _IS_LAZY.set(True)
        try:
            yield
        finally:
            _IS_LAZY.reset(token)


def build_lazily(
    cls: Any,
    pretrained_model_name_or_path: str | os.PathLike[str],
    *model_args: Any,
    config: Any = None,
    **options: Any,
) -> Any:
    """What `cls.from_pretrained` returns, on the meta device: `split_lazily` reads its weights, each rank its part.

    Args:
        pretrained_model_name_or_path: a directory or hub id.
        options: of `from_pretrained`: those that say what the model is and where it comes from are honoured, those that
            say how its weights are read are without meaning. What the checkpoint has none of starts at random values.

    Returns:
        The model; with `output_loading_info` also what is missing, unexpected and mismatched. Its `_weight_map` says in
        which file a parameter begins.

    Raises:
        LoadError: there are no weights, or they do not fit.
        UnsupportedError: an option cannot be had for a model that is to be split.
    """
    place = pretrained_model_name_or_path
    for name in _REFUSED & options.keys():
        if options[name] not in (None, False, {}, ""):
            why = "each rank reads its part of plain safetensors onto its own device when the model is split"
            raise UnsupportedError(f"{name} of a model that is loaded by parts", why=why, fix="leave it out")
    options = {name: value for name, value in options.items() if name not in _REFUSED | _NEEDLESS}
    wants_info, generation = options.pop("output_loading_info", False), options.pop("generation_config", None)
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
    if generation is not None:
        model.generation_config = generation
    model.__dict__[SOURCE] = source
    model.__dict__["resize_token_embeddings"] = MethodType(_resize, model)
    model._weight_map = {fqn: index[each.keys[0]].path for fqn, each in found.tensors.items() if each.keys}
    info = {
        "missing_keys": set(found.missing),
        "unexpected_keys": set(found.unexpected),
        "mismatched_keys": {(fqn, *shapes) for fqn, shapes in found.mismatched.items()},
        "error_msgs": [],
    }
    return (model, info) if wants_info else model


def _resize(model: Any, *args: Any, **kwargs: Any) -> Any:
    """As the model's own, with embedding and head read in full first."""
    source: WeightSource = model.__dict__[SOURCE]
    ends = [each for each in (model.get_input_embeddings(), model.get_output_embeddings()) if each is not None]
    own = {id(value) for end in ends for value in end.parameters() if value.is_meta}
    source.read_full(model, own, seed=torch.initial_seed())
    return type(model).resize_token_embeddings(model, *args, **kwargs)
