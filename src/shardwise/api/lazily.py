"""Models that are loaded before their mesh is known: nothing is read until they are split.

# [Note: lazy loading is one thread's]
While some thread loads lazily, a function stands in the place of `from_pretrained` that asks who calls: whoever entered
`loading_lazily` is given a model on the meta device, everybody else what transformers does (docs/decisions/0026).
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from shardwise.api.filling import Filling, build_unfilled
from shardwise.errors import UnsupportedError
from shardwise.parallel.build import read_class_config
from shardwise.weights.locate import HUB_OPTIONS

__all__ = ["FILLING", "build_lazily", "loading_lazily"]

Place = str | os.PathLike[str]

FILLING = "_shardwise_filling"
"""The attribute of a model that keeps what will fill it."""
_IS_LAZY: ContextVar[bool] = ContextVar("_shardwise_is_lazy", default=False)

_NEEDLESS = frozenset(
    """
    _commit_hash _fast_init _from_auto _from_pipeline adapter_kwargs adapter_name code_revision disable_mmap from_flax
    from_tf low_cpu_mem_usage mirror offload_buffers offload_state_dict tqdm_class trust_remote_code use_safetensors
    weights_only
    """.split()  # noqa: SIM905
)
"""Options of `from_pretrained` that say how weights are read, which happens otherwise here."""

_REFUSED = {
    "device_map": "each rank keeps its part on its own device",
    "max_memory": "each rank keeps its part on its own device",
    "offload_folder": "each rank keeps its part on its own device",
    "quantization_config": "quantized weights cannot be split yet",
    "load_in_8bit": "quantized weights cannot be split yet",
    "load_in_4bit": "quantized weights cannot be split yet",
    "gguf_file": "only safetensors are read by parts",
    "state_dict": "its tensors are in memory already",
    "fusion_config": "it replaces modules",
    "use_kernels": "they replace modules",
    "kernel_config": "they replace modules",
    "tp_plan": "two libraries would split one model",
    "tp_size": "two libraries would split one model",
    "device_mesh": "two libraries would split one model",
    "distributed_config": "two libraries would split one model",
}
"""Options of `from_pretrained` that a model which is to be split cannot have, and why."""


class _Patch:
    """Replaces `PreTrainedModel.from_pretrained` while some thread loads lazily."""

    def __init__(self) -> None:
        self._lock, self._number = threading.Lock(), 0
        self._before: Any = None
        self._own: Any = None

    @contextmanager
    def installed(self) -> Iterator[None]:
        with self._lock:
            self._number += 1
            if self._number == 1:
                self._before = PreTrainedModel.__dict__["from_pretrained"]
                self._own = classmethod(_choosing_by_caller(self._before))
                PreTrainedModel.from_pretrained = self._own
        try:
            yield
        finally:
            with self._lock:
                self._number -= 1
                if self._number == 0 and PreTrainedModel.__dict__["from_pretrained"] is self._own:
                    PreTrainedModel.from_pretrained = self._before


_PATCH = _Patch()


def _choosing_by_caller(before: Any) -> Callable[..., Any]:
    @functools.wraps(before.__func__)
    def from_pretrained(cls: Any, pretrained_model_name_or_path: Any, *args: Any, **options: Any) -> Any:
        chosen = build_lazily if _IS_LAZY.get() else before.__func__
        return chosen(cls, pretrained_model_name_or_path, *args, **options)

    return from_pretrained


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
    cls: Any, pretrained_model_name_or_path: Place, *model_args: Any, config: Any = None, **options: Any
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
    source = pretrained_model_name_or_path
    refused = [name for name in options if name in _REFUSED and options[name] not in (None, False, {}, "")]
    if refused:
        name = refused[0]
        raise UnsupportedError(f"{name} of a model that is loaded by parts", why=_REFUSED[name], fix="leave it out")
    options = {name: value for name, value in options.items() if name not in _REFUSED and name not in _NEEDLESS}
    wants_info, generation = options.pop("output_loading_info", False), options.pop("generation_config", None)
    dtypes = [options.pop(name, None) for name in ("dtype", "torch_dtype")]
    where = {name: value for name in HUB_OPTIONS if (value := options.pop(name, None)) not in (None, "")}
    config, options = read_class_config(cls.config_class, source, config, where, options)
    names = list(inspect.signature(cls.__init__).parameters)[2:]
    options |= dict(zip(names, model_args, strict=False))
    options = {"allow_missing": True, "allow_unused": True, **options, **where}
    model, filling = build_unfilled(
        source, cls, config=config, dtype=next((each for each in dtypes if each is not None), None), options=options
    )
    assert filling.index is not None
    assert filling.found is not None
    if generation is not None:
        model.generation_config = generation
    _attach_filling(model, filling)
    model._weight_map = {
        fqn: filling.index[each.keys[0]].path for fqn, each in filling.found.tensors.items() if each.keys
    }
    mismatched = {(fqn, *shapes) for fqn, shapes in filling.found.mismatched.items()}
    info = {
        "missing_keys": set(filling.found.missing),
        "unexpected_keys": set(filling.found.unexpected),
        "mismatched_keys": mismatched,
        "error_msgs": [],
    }
    return (model, info) if wants_info else model


def _attach_filling(model: PreTrainedModel, filling: Filling) -> None:
    """Attaches `filling` to the model, and makes what cannot be done on the meta device possible, or an error."""
    model.__dict__[FILLING] = filling
    model.__dict__["resize_token_embeddings"] = MethodType(_resize, model)
    model.register_load_state_dict_pre_hook(_refuse_state)


def _resize(model: Any, *args: Any, **kwargs: Any) -> Any:
    """As the model's own, with embedding and head read in full first."""
    filling: Filling = model.__dict__[FILLING]
    ends = [each for each in (model.get_input_embeddings(), model.get_output_embeddings()) if each is not None]
    own = {id(value) for end in ends for value in end.parameters() if value.is_meta}
    filling.read_full(model, own, seed=torch.initial_seed())
    return type(model).resize_token_embeddings(model, *args, **kwargs)


def _refuse_state(module: Any, state: Mapping[str, Any], prefix: str, metadata: Any, *rest: Any) -> None:
    waits = module.__dict__.get(FILLING) is not None and not metadata.get("assign_to_params_buffers")
    meta = {f"{prefix}{name}" for name, value in module.named_parameters() if value.is_meta} if waits else set()
    if lost := sorted(meta.intersection(state)):
        raise UnsupportedError(
            f"loading {lost[0]} into a model whose weights are read when it is split",
            why="it is on the meta device, which keeps no values",
            fix="load the state after the split, or build the model outside of lazy loading",
        )
