"""Builds a transformers model on the meta device, and records how, to compute the value of any tensor later.

# [Note: recorded construction]
transformers initializes weights in two steps. Constructors give values (a head's bias of zeros, a table of
multipliers). Then `_init_weights` overwrites most of them, module by module. Both steps read sizes and counts of
modules, so they must run on the unsplit model, which may not fit in memory. So the unsplit model is built on the meta
device, and every operation that makes or changes a tensor is recorded. To get a tensor's value, the operations that
lead to it are replayed on the CPU.
"""

import copy
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only
from transformers import AutoConfig, GenerationConfig, PreTrainedConfig, PreTrainedModel

from shardwise.errors import ConfigError, LoadError, UnsupportedError, as_error
from shardwise.weights.locate import HUB_OPTIONS, check_no_checkpoint, locate_source


class _Operation(NamedTuple):
    """One recorded call that made or changed tensors. `written`: ids of the storages that it wrote."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    out: Any
    written: frozenset[int]


class Construction(TorchDispatchMode):
    """Context manager that records the operations on tensors inside, and keeps the (meta) tensors alive."""

    def __init__(self) -> None:
        super().__init__()
        self._operations: list[_Operation] = []
        self._from_data = _DataRecorder(self._record)

    def __enter__(self) -> "Construction":
        self._from_data.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._from_data.__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if not func.is_view and "empty" not in func.__name__:  # neither gives a tensor any value
            self._record(func, args, kwargs or {}, out)
        return out

    def _record(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        written = frozenset(map(_storage, _tensors(out)))
        if written:  # parameters may be given other memory when the model is split: aliases keep this one
            args, kwargs, out = tree_map_only(Tensor, Tensor.detach, (args, kwargs, out))
            self._operations.append(_Operation(function, args, kwargs, out, written))

    @torch.no_grad()
    def values(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Computes the values of meta tensors on the CPU, by running the recorded operations on real tensors. Elements
        that were never written are NaN.

        Random values are drawn anew from torch's default generator, once for all of `tensors`.
        """
        needed, operations = {_storage(value) for value in tensors}, []
        for operation in reversed(self._operations):
            if operation.written & needed:
                needed.update(map(_storage, _tensors((operation.args, operation.kwargs))))
                operations.append(operation)
        replay = _Replay()
        for operation in reversed(operations):
            replay.run(operation)
        return [replay.real(value).clone() for value in tensors]


class _DataRecorder(TorchFunctionMode):
    """Records the functions that leave no trace below Python when they copy data to the meta device."""

    def __init__(self, record: Callable[..., None]) -> None:
        super().__init__()
        self._record = record

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in (torch.tensor, torch.as_tensor):
            self._record(func, args, kwargs or {}, out)
        return out


class _Replay:
    """Replays recorded operations on the CPU."""

    def __init__(self) -> None:
        self._storages: dict[int, torch.UntypedStorage] = {}

    def run(self, operation: _Operation) -> None:
        """Runs one operation. The operations that made its inputs must have run."""

        def real(value: Any) -> Any:
            is_recorded = isinstance(value, Tensor) and (value.is_meta or _storage(value) in self._storages)
            return self.real(value) if is_recorded else value

        args, kwargs = tree_map(real, (operation.args, operation.kwargs))
        if kwargs.get("device") is not None:
            kwargs["device"] = "cpu"
        found = operation.function(*args, **kwargs)
        for recorded, value in zip(_tensors(operation.out), _tensors(found), strict=True):
            if _storage(recorded) not in self._storages:
                self.real(recorded).copy_(value)

    def real(self, recorded: Tensor) -> Tensor:
        """Returns the real tensor for a recorded one: a view of a real storage that starts as NaN."""
        key, dtype = _storage(recorded), recorded.dtype
        if key not in self._storages:
            values = torch.zeros(recorded.untyped_storage().nbytes() // recorded.itemsize, dtype=dtype)
            self._storages[key] = (values.fill_(torch.nan) if dtype.is_floating_point else values).untyped_storage()
        place = recorded.storage_offset(), recorded.shape, recorded.stride()
        return torch.empty(0, dtype=dtype).set_(self._storages[key], *place)


def _tensors(values: Any) -> Iterator[Tensor]:
    return (value for value in tree_leaves(values) if isinstance(value, Tensor))


def _storage(tensor: Tensor) -> int:
    """Returns the id that is equal for tensors that share memory."""
    return tensor.untyped_storage()._cdata


def initialize_meta(model: nn.Module) -> None:
    """Initializes a meta model on the CPU, in place. A real model is not changed.

    Draws from torch's default generator, which must be seeded alike on every rank.
    """
    if not has_meta(model):
        return
    if isinstance(model, PreTrainedModel):
        fresh = dict(type(model)(copy.deepcopy(model.config)).to(model.dtype).named_modules())
        for name, module in model.named_modules():
            other = fresh.get(name)
            if other is not None and type(other) is type(module):  # else a parallel layer has taken its place
                _take_values(module, other)
    holding = [(name, module) for name, module in model.named_modules() if has_meta(module, recurse=False)]
    unable = [name for name, module in holding if not callable(getattr(module, "reset_parameters", None))]
    if unable:
        raise UnsupportedError(
            f"{unable[0] or type(model).__name__} is on the meta device and has no reset_parameters()",
            fix="give it one that sets every parameter and buffer, or build the model on a real device",
        )
    allocate_meta(model)
    for _, module in holding:
        module.reset_parameters()


def _take_values(module: nn.Module, fresh: nn.Module) -> None:
    for name, value in module._parameters.items():
        if value is not None and (start := fresh._parameters[name]) is not None:
            start.__dict__.update(vars(value))
            start.requires_grad = value.requires_grad
            module._parameters[name] = start
    module._buffers.update(fresh._buffers)


def allocate_meta(model: nn.Module, device: torch.device | str = "cpu") -> None:
    """Allocates meta parameters and buffers with undefined values, in place. Real tensors stay.

    Unlike `Module.to_empty`, shared tensors stay shared, and parameters keep their attributes.
    """
    made: dict[Tensor, Tensor] = {}
    for module in list(model.modules()):
        for held in (module._parameters, module._buffers):
            for name, value in held.items():
                if value is None or not value.is_meta:
                    continue
                if value not in made:
                    made[value] = torch.empty_like(value, device=device)
                    if isinstance(value, nn.Parameter):
                        made[value] = nn.Parameter(made[value], value.requires_grad)
                        made[value].__dict__.update(vars(value))
                held[name] = made[value]  # type: ignore[assignment]


def has_meta(module: nn.Module, *, recurse: bool = True) -> bool:
    """Returns whether a module holds meta tensors."""
    return any(value.is_meta for value in (*module.parameters(recurse), *module.buffers(recurse)))


def as_dtype(dtype: torch.dtype | str | None) -> torch.dtype | None:
    """Returns the torch dtype for a user's name; None for "auto" or None."""
    if dtype is None or dtype == "auto" or isinstance(dtype, torch.dtype):
        return None if isinstance(dtype, str) else dtype
    found = getattr(torch, dtype, None) if isinstance(dtype, str) else None
    if not isinstance(found, torch.dtype):
        raise ConfigError(f"unknown dtype {dtype!r}", fix='use a torch dtype or its name, such as "bfloat16"')
    return found


_REFUSED = {
    name: (why, fix)
    for names, why, fix in (
        (
            "device_map max_memory offload_folder offload_state_dict offload_buffers",
            "the layout and the mesh say which rank holds what",
            'leave it out; open a mesh of a layout, such as Mesh.open("fsdp2"), with one rank per device',
        ),
        (
            "quantization_config load_in_4bit load_in_8bit",
            "quantized weights cannot be split yet",
            'leave it out; dtype="bfloat16" halves the memory of float32',
        ),
        (
            "tp_plan tp_size device_mesh distributed_config",
            "the layout and the mesh say how a model is split",
            'leave it out; open a mesh of a layout, such as Mesh.open("tp2"); plan= takes rules of your own',
        ),
    )
    for name in names.split()
}
"""Options of `from_pretrained` that are refused: why, and what to do instead."""


def take_model_options(options: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Returns the `torch_dtype` among the options of `from_pretrained`, and the options that are passed on.

    `low_cpu_mem_usage` is dropped: each rank reads only its parts. So are refused options that are off.

    Raises:
        UnsupportedError: an option says in another way where or how weights are held.
    """
    for name, (why, fix) in _REFUSED.items():
        if options.get(name):
            raise UnsupportedError(f"the option {name}={options[name]!r:.100}", why=why, fix=fix)
    ours = {"torch_dtype", "low_cpu_mem_usage", *_REFUSED}
    return options.get("torch_dtype"), {name: value for name, value in options.items() if name not in ours}


def read_config(
    source: str | os.PathLike[str] | Mapping[str, Any], options: Mapping[str, Any], config_class: Any = AutoConfig
) -> tuple[PreTrainedConfig, dict[str, Any]]:
    """Reads a config and applies the config values among `options`. Returns the config and the other options.

    Args:
        source: a directory with a config.json, a .json file, a hub id, or the values themselves.
        config_class: class that reads the config. A class for a part of the model reads the config of that part.
    """
    where = _config_place(options)
    rest = {name: value for name, value in options.items() if name not in HUB_OPTIONS}
    if not isinstance(source, Mapping) and not os.path.isfile(source):  # noqa: PTH113 - pathlib raises: a name too long
        locate_source(source, **{name: value for name, value in where.items() if name != "subfolder"})
        check_no_checkpoint(source)
    what = "config values" if isinstance(source, Mapping) else f"config {os.fspath(source)!r}"
    fix = "correct it, or point at a directory that save_pretrained wrote"
    with as_error(LoadError, f"transformers cannot read the model {what}", fix=fix):
        if isinstance(source, Mapping):
            return AutoConfig.for_model(**source), rest
        found: Any = config_class.from_pretrained(os.fspath(source), return_unused_kwargs=True, **where, **rest)
    return found


def _config_place(options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options that say where a config is. `variant` is none of them: configs have no variants."""
    return {name: options[name] for name in HUB_OPTIONS if name in options and name != "variant"}


def named_class(config: PreTrainedConfig) -> Any:
    """Returns the first class in the config's `architectures` that transformers has for this config; else None."""
    for name in config.architectures or ():
        model_class: Any = getattr(transformers, name, None)
        is_model = isinstance(model_class, type) and issubclass(model_class, PreTrainedModel)
        if is_model and isinstance(config, model_class.config_class or object):
            return model_class
    return None


def model_class_of(config: PreTrainedConfig) -> Any:
    """Returns the default class of a model: the class in the config's `architectures`, else `AutoModelForCausalLM`."""
    causal, named = transformers.AutoModelForCausalLM, named_class(config)
    if type(config) in causal._model_mapping:
        return causal if named in (None, causal._model_mapping[type(config)]) else named
    if named is not None:
        return named
    if causal.__name__ in (getattr(config, "auto_map", None) or {}):
        return causal
    raise UnsupportedError(
        f"no class is known for a model of type {config.model_type!r}",
        why="transformers has no causal language model of this type, and `architectures` in the config names no class",
        fix="pass auto_class, such as transformers.AutoModel, or name the class in the config",
    )


def build_meta_model(
    config: PreTrainedConfig, auto_class: Any, *, dtype: torch.dtype | None, options: dict[str, Any]
) -> PreTrainedModel:
    """Builds an instance of `auto_class` for `config` on the meta device.

    Args:
        auto_class: a transformers auto class or model class; None: the class that `model_class_of` returns.
        options: keyword arguments of the model class (`attn_implementation`, …).
    """
    chosen = model_class_of(config) if auto_class is None else auto_class
    build = getattr(chosen, "from_config", None) or getattr(chosen, "_from_config", None)
    if build is None:
        raise UnsupportedError(
            f"auto_class {chosen!r} is no transformers class", fix="pass an auto class or a model class of transformers"
        )
    if getattr(config, "quantization_config", None) is not None:
        raise UnsupportedError(
            f"a quantized model ({type(config).__name__} with quantization_config)",
            why="quantized weights cannot be split yet",
            fix="load the checkpoint it was quantized from",
        )
    what = f"{getattr(chosen, '__name__', chosen)} cannot build a model of type {config.model_type!r}"
    fix = "pass the auto_class (of a run model.task, of a verb --task) that fits it, and options that it takes"
    with as_error(UnsupportedError, what, fix=fix, limit=300), torch.device("meta"):
        model = build(config, **({} if dtype is None else {"dtype": dtype}), **options)
    _empty(model)
    model.eval()
    return model


def _empty(model: nn.Module) -> None:
    """Moves tensors to the meta device that `torch.FloatTensor` and similar constructors made on the CPU."""
    moved: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, value in module._parameters.items():
            if value is not None and not value.is_meta:
                empty = nn.Parameter(value.detach().to("meta"), requires_grad=value.requires_grad)
                module._parameters[name] = moved.setdefault(value, empty)


def num_positions(config: PreTrainedConfig) -> int | None:
    """Returns the maximum number of positions of the model; None if it has no limit."""
    found = getattr(config.get_text_config(), "max_position_embeddings", None)
    return found if isinstance(found, int) and found > 0 else None


def read_generation_config(model: PreTrainedModel, source: str | os.PathLike[str], options: dict[str, Any]) -> None:
    """Reads the generation config beside the weights into the model, if there is one."""
    if not model.can_generate():
        return
    what = f"cannot read the generation_config.json of {os.fspath(source)!r}"
    path = Path(source) / (options.get("subfolder") or "") / "generation_config.json"
    # Where there is none, as in most checkpoints, the model's defaults stand.
    with as_error(LoadError, what), nullcontext() if os.path.lexists(path) else suppress(OSError):
        model.generation_config = GenerationConfig.from_pretrained(os.fspath(source), **_config_place(options))
