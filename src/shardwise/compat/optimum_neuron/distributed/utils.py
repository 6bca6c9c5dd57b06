"""Lazy loading, and optimizers that are built before the model is split and moved to its parameters afterwards."""

import copy
import functools
import inspect
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from shardwise.api.sources import SOURCE, build_meta
from shardwise.errors import ConfigError, UnsupportedError, counted
from shardwise.optim.elementwise import check_optimizer
from shardwise.optim.optimizer import KNOWN, divided_groups, groups_of
from shardwise.parallel.build import read_config
from shardwise.parameters.canonical import local_tensor
from shardwise.parameters.registry import entry_of, find_parameters
from shardwise.plan.options import check_count, check_kind
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
    assert index is not None and found is not None
    model.__dict__[SOURCE] = source
    model.register_load_state_dict_pre_hook(_allocate_loaded)
    model._weight_map = {fqn: index[each.keys[0]].path for fqn, each in found.tensors.items() if each.keys}
    info = {
        "missing_keys": set(found.missing),
        "unexpected_keys": set(found.unexpected),
        "mismatched_keys": {(fqn, *shapes) for fqn, shapes in found.mismatched.items()},
        "error_msgs": [],
    }
    return (model, info) if wants_info else model


def _allocate_loaded(module: nn.Module, state: Mapping[str, Any], prefix: str, *rest: Any) -> None:
    """Hook of `load_state_dict`: allocates the meta parameters that it fills, such as those of a saved adapter."""
    made: dict[nn.Parameter, nn.Parameter] = {}
    own = [(name, value) for name, value in module.named_parameters(remove_duplicate=False) if value.is_meta]
    filled = {value for name, value in own if f"{prefix}{name}" in state}
    for fqn, value in own:
        if value in filled:  # under every name of a tied one
            new = nn.Parameter(torch.empty_like(value, device="cpu"), requires_grad=value.requires_grad)
            owner, _, name = fqn.rpartition(".")
            module.get_submodule(owner)._parameters[name] = made.setdefault(value, new)


_ARGUMENTS = "_shardwise_arguments"


def make_optimizer_constructor_lazy(optimizer_cls: type[torch.optim.Optimizer]) -> type[torch.optim.Optimizer]:
    """Subclass whose optimizers record their arguments, and hold an empty parameter in place of each group.

    Its instances have the groups and options of real ones, so wrong arguments raise at once, but they cannot step.
    """

    class Lazy(optimizer_cls):  # type: ignore[misc, valid-type]
        @functools.wraps(optimizer_cls.__init__)  # type: ignore[misc]
        def __init__(self, params: Any, *args: Any, **kwargs: Any) -> None:
            groups = groups_of(params)
            places = [{**group, "params": [nn.Parameter(torch.empty(0))]} for group in groups]
            super().__init__(places, *args, **kwargs)
            self.__dict__[_ARGUMENTS] = optimizer_cls, groups, args, kwargs

        def step(self, closure: Any = None) -> Any:
            raise UnsupportedError(
                f"a step of a lazy {optimizer_cls.__name__}",
                why="it holds no parameters yet",
                fix="use what optimizer_for_mp returns",
            )

    Lazy.__name__ = Lazy.__qualname__ = f"Lazy{optimizer_cls.__name__}"
    return Lazy


def move_optimizer(optimizer: torch.optim.Optimizer, moved: Mapping[int, Tensor]) -> torch.optim.Optimizer:
    """Returns an optimizer like `optimizer` over the split parameters.

    A lazy optimizer is created as requested. Any other keeps its class, its options, those of its
    groups, and this rank's part of its state. Parameters of other stages are left out.
    """
    check_kind("the optimizer", optimizer, torch.optim.Optimizer, fix="pass the optimizer, then the mapping")
    if not isinstance(moved, Mapping) or not all(
        isinstance(key, int) and isinstance(value, Tensor) for key, value in moved.items()
    ):  # nobody's id would be one of another stage's
        raise ConfigError("the mapping is not one of ids to parameters", fix="map id(parameter) to parameters")
    lazy = optimizer.__dict__.get(_ARGUMENTS)
    given = lazy[1] if lazy is not None else optimizer.param_groups
    _check_all(given, moved)
    kept = [[moved[id(_own(each))] for each in group["params"] if id(_own(each)) in moved] for group in given]
    groups = divided_groups({**group, "params": params} for group, params in zip(given, kept, strict=True))
    groups = groups or [{**given[0], "params": []}]  # all are other stages'
    if lazy is not None:
        made: torch.optim.Optimizer = lazy[0](groups, *lazy[2], **lazy[3])
    else:
        made = _alike(optimizer, groups, moved)
    check_optimizer(made, lazy[3] if lazy is not None else {})
    return made


def _own(each: Any) -> Any:
    """Returns the parameter of an entry, which may be (name, parameter)."""
    return each[1] if isinstance(each, tuple) else each


def _check_all(groups: Iterable[Mapping[str, Any]], moved: Mapping[int, Tensor]) -> None:
    lost = [_own(each) for group in groups for each in group["params"] if id(_own(each)) not in moved]
    if not lost:
        return
    entry = next((entry for value in moved.values() if (entry := entry_of(value)) is not None), None)
    if entry is None or entry.registry.mesh.size("pp") == 1:
        raise ConfigError(
            f"what became of {counted(len(lost), 'parameter')} of the optimizer is not said",
            why=f"of shapes {', '.join(str(list(each.shape)) for each in lost[:3])}",
            fix="map the id of every parameter that the optimizer was built with to the one of the same name",
        )
    model, tied = entry.registry.model(), set(entry.registry.tied.values())
    mapped, shapes = {id(value) for value in moved.values()}, {tuple(each.shape) for each in lost}
    for fqn, value, own in find_parameters(model) if model is not None else ():
        is_lost = own is not None and own.fqn in tied and own.layout.shape in shapes and id(value) not in mapped
        if is_lost and value.requires_grad:
            raise ConfigError(
                f"what became of a parameter of the optimizer is not said, and nothing became {fqn}",
                why="it is tied, and this stage knows it by its other name",
                fix="map by all names: model.named_parameters(remove_duplicate=False)",
            )


def _alike(
    optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]], moved: Mapping[int, Tensor]
) -> torch.optim.Optimizer:
    made = object.__new__(type(optimizer))
    memo: dict[int, Any] = dict(moved)
    for name, value in optimizer.__dict__.items():
        if name.startswith("_optimizer_"):  # hooks
            made.__dict__[name] = copy.copy(value)
        elif name not in ("param_groups", "state", KNOWN) and not callable(value):
            made.__dict__[name] = copy.deepcopy(value, memo)
    made.__dict__["param_groups"] = groups
    made.__dict__["state"] = type(optimizer.state)(dict)
    for parameter, state in optimizer.state.items():
        if (now := moved.get(id(parameter))) is not None:
            made.state[now] = {name: _moved_state(value, now) for name, value in state.items()}
    return made


def _moved_state(value: Any, parameter: Tensor) -> Any:
    """Returns one state value for `parameter`: this rank's part if it has the full shape."""
    entry = entry_of(parameter)
    if entry is None or not isinstance(value, Tensor) or not value.ndim or value.shape != entry.layout.shape:
        return copy.deepcopy(value)
    return entry.wrap(local_tensor(value, entry.layout, entry.registry.mesh.coords).to(parameter.device))
