"""Models that are loaded before their mesh is known: nothing is read until they are split.

# [Note: lazy loading is one thread's]
Scripts that load first and split later call `from_pretrained` themselves. What that call does can only be changed where
it is defined, so while some thread loads lazily a function stands there that asks who calls: the thread, or the task,
that entered `loading_lazily` is given a model on the meta device, everybody else what transformers does. The last one
to leave takes it away. Linears and embeddings go to the meta device by torch's own modes, which belong to a thread.
"""

from __future__ import annotations

import functools
import inspect
import os
import platform
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

from shardwise.api.by_hand import adopt_model
from shardwise.api.checkpoints import load_checkpoint
from shardwise.api.converting import open_anywhere
from shardwise.api.filling import Filling, build_unfilled, filling_for
from shardwise.api.prepare import prepare
from shardwise.comm.agree import raise_on_all_ranks
from shardwise.comm.operations import all_gather_objects
from shardwise.errors import UnsupportedError
from shardwise.mesh import Mesh
from shardwise.parallel.build import read_class_config
from shardwise.parallel.materialize import put_tensor
from shardwise.parameters.canonical import local_tensor
from shardwise.parameters.registry import Registry, is_split, registry_of
from shardwise.plan.options import ParallelSpec
from shardwise.runtime.adapters import find_model, has_adapters
from shardwise.weights.locate import HUB_OPTIONS

__all__ = ["Values", "build_lazily", "loading_lazily", "split_lazily", "split_rewritten"]

Place = str | os.PathLike[str]

_FILLING = "_shardwise_filling"
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
    model.__dict__[_FILLING] = filling
    model.__dict__["resize_token_embeddings"] = MethodType(_resize, model)
    model.register_load_state_dict_pre_hook(_refuse_state)


def _resize(model: Any, *args: Any, **kwargs: Any) -> Any:
    """As the model's own, with embedding and head read in full first."""
    filling: Filling = model.__dict__[_FILLING]
    ends = [each for each in (model.get_input_embeddings(), model.get_output_embeddings()) if each is not None]
    own = {id(value) for end in ends for value in end.parameters() if value.is_meta}
    filling.read_full(model, own, seed=torch.initial_seed())
    return type(model).resize_token_embeddings(model, *args, **kwargs)


def _refuse_state(module: Any, state: Mapping[str, Any], prefix: str, metadata: Any, *rest: Any) -> None:
    waits = module.__dict__.get(_FILLING) is not None and not metadata.get("assign_to_params_buffers")
    meta = {f"{prefix}{name}" for name, value in module.named_parameters() if value.is_meta} if waits else set()
    if lost := sorted(meta.intersection(state)):
        raise UnsupportedError(
            f"loading {lost[0]} into a model whose weights are read when it is split",
            why="it is on the meta device, which keeps no values",
            fix="load the state after the split, or build the model outside of lazy loading",
        )


class Values:
    """Where the values of a model come from that is about to be split, the same way on every rank. A context manager.

    Args:
        model: real, or on the meta device in part or in full; with PEFT's around it or in it.
        checkpoint: a sharded checkpoint, which is loaded instead.
        ranks_at_a_time: how many ranks of a machine read or draw at the same time; all where None or not positive.

    Attributes:
        filling: what the tensors on the meta device will be; None where there are none.

    Raises:
        LoadError: there is no such checkpoint.
        UnsupportedError: nothing says what they will be.

    Communicates: two gathers of small objects over all ranks.
    """

    def __init__(
        self, model: nn.Module, mesh: Mesh, *, checkpoint: Place | None = None, ranks_at_a_time: int | None = None
    ) -> None:
        self._model, self._checkpoint, self._group = model, checkpoint, mesh.group()
        self._inner: Any = find_model(model)
        with raise_on_all_ranks(self._group, "looking for its weights"):
            self.filling = _filling_of(self._inner)
            self._reads = checkpoint is None or _holds_part(checkpoint)
        told = all_gather_objects((torch.initial_seed(), platform.node()), self._group)
        nodes, own = [node for _, node in told], 0 if self._group is None else self._group.rank()
        most = max(map(nodes.count, nodes))
        at_a_time = ranks_at_a_time if ranks_at_a_time is not None and ranks_at_a_time > 0 else most
        self._seed = told[0][0]
        self._turn, self._num_turns = nodes[:own].count(nodes[own]) // at_a_time, -(-most // at_a_time)

    def put(self, registry: Registry) -> None:
        """Puts them into the model, which has been split.

        Raises:
            LoadError: weights cannot be read, or the checkpoint does not fit; on every rank.

        Communicates: one gather of a small object over all ranks for every turn; as `load_checkpoint`.
        """
        if self._reads:
            self._fill(registry)
        if self._checkpoint is not None:
            load_checkpoint(self._checkpoint, model=self._model)
        if not self._reads:
            self._fill(registry)

    def _fill(self, registry: Registry) -> None:
        for turn in range(self._num_turns):
            with raise_on_all_ranks(self._group, "loading"):
                if self.filling is not None and turn == self._turn:
                    self.filling.fill(self._inner, registry, seed=self._seed, reads=self._reads)
                    self._inner.to(registry.mesh.device)  # what was real before

    def __enter__(self) -> Values:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if kind is None:  # else the model may be split another way
            if self.filling is not None:
                self.filling.__exit__(kind, *error)
            self._inner.__dict__.pop(_FILLING, None)


def split_lazily(
    model: nn.Module,
    mesh: Mesh,
    spec: ParallelSpec,
    *,
    checkpoint: Place | None = None,
    ranks_at_a_time: int | None = None,
) -> Registry:
    """Splits a model, and gives what of it is on the meta device its values: those that `from_pretrained` would have
    read, or those that the model starts with, drawn from rank 0's `torch.initial_seed()`.

    Args:
        model, checkpoint, ranks_at_a_time: as of `Values`.

    Raises:
        PlanError, RankError, UnsupportedError: as `shardwise.parallelize`.
        LoadError: weights cannot be read, or the checkpoint does not fit.

    Communicates: as `shardwise.parallelize` and `Values`.
    """
    with Values(model, mesh, checkpoint=checkpoint, ranks_at_a_time=ranks_at_a_time) as values:
        registry = prepare(model, mesh, spec)
        values.put(registry)
    return registry


def split_rewritten(
    model: nn.Module,
    mesh: Mesh,
    rewrite: Callable[[], nn.Module],
    *,
    checkpoint: Place | None = None,
    ranks_at_a_time: int | None = None,
) -> nn.Module:
    """Splits a model by what `rewrite` puts in place of its modules, modules that divide themselves; a parameter of
    theirs that has the name and the full shape of one of before is given that one's part.

    Args:
        rewrite: changes the model, and returns it.
        model, checkpoint, ranks_at_a_time: as of `Values`.

    Returns:
        What `rewrite` returns.

    Raises:
        UnsupportedError: the mesh has stages.

    Communicates: as `shardwise.api.by_hand.adopt_model` and `Values`; nothing where `rewrite` has split the model.
    """
    with Values(model, mesh, checkpoint=checkpoint, ranks_at_a_time=ranks_at_a_time) as values:
        before = dict(model.named_parameters(remove_duplicate=False))
        with raise_on_all_ranks(mesh.group(), "rewriting the model"):
            model = rewrite()
            if mesh.size("pp") > 1 and not is_split(model):
                raise UnsupportedError(
                    f"a model rewritten by hand on {mesh.shape}",
                    why="nobody cuts it into stages",
                    fix="use pp_size 1, or the automatic split",
                )
        if not is_split(model):
            adopt_model(model, mesh)
        registry = registry_of(model)
        if registry.local_state:
            _take_over(model, registry, before)
            if values.filling is None:
                model.to(mesh.device)
        values.put(registry)
    return model


def _take_over(model: nn.Module, registry: Registry, before: Mapping[str, nn.Parameter]) -> None:
    """Gives new parameters their part of those that had their names; meta where these were."""
    for fqn, value in list(model.named_parameters()):
        old, entry = before.get(fqn), registry.entry(fqn)
        if old is None or old is value or tuple(old.shape) != entry.layout.shape:
            continue
        shape = entry.layout.local_shape(registry.mesh.coords)
        if old.is_meta:
            own = torch.empty(shape, dtype=old.dtype, device="meta")
        else:
            own = local_tensor(old.detach(), entry.layout, registry.mesh.coords).to(registry.mesh.device)
        put_tensor(model, registry, entry.fqn, own)


def _filling_of(model: Any) -> Filling | None:
    """What fills what of the model is on the meta device; None where nothing is."""
    values = (*model.parameters(), *model.buffers())
    own: Filling | None = model.__dict__.get(_FILLING)
    if not any(value.is_meta for value in values):
        return None
    parts = [name for name, module in model.named_modules() if module is not model and _FILLING in module.__dict__]
    if parts or not isinstance(model, PreTrainedModel):
        raise UnsupportedError(
            f"{type(model).__name__}, " + (f"of which {parts[0]} was loaded lazily" if parts else "on the meta device"),
            why="nothing says what its other tensors are",
            fix="load all of it by from_pretrained of its own class, or nothing of it lazily",
        )
    if own is None:
        return filling_for(model)
    return own.with_adapters_of(model) if has_adapters(model) else own


def _holds_part(checkpoint: Place) -> bool:
    """Whether a checkpoint holds the trained parameters alone."""
    with open_anywhere(checkpoint) as stored:
        return stored.manifest.content != "all"
