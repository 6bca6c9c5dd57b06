"""Adapters as they are saved: files in PEFT's format, and weights merged from full tensors. No layout changes them."""

import copy
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn

from shardwise.comm.agree import gather_from_all
from shardwise.errors import ConfigError, LoadError, UnsupportedError, as_error, counted
from shardwise.lora.inject import named_biases, peft
from shardwise.parameters.canonical import canonical_tensor, dtypes_of, names_only, state_names
from shardwise.parameters.registry import Registry, entries_of, find_parameters, named_entries, registry_of, reshard
from shardwise.plan.structure import fqn_of, is_within
from shardwise.runtime.adapter_facts import find_model, is_adapter, is_saved_copy, places_in, unwrapped
from shardwise.weights.locate import ADAPTER_CONFIG
from shardwise.weights.staging import atomic_file

_PREFIX = "base_model.model."


def adapter_state(model: nn.Module, name: str) -> dict[str, Tensor]:
    """Returns the tensors of PEFT's file of an adapter: full CPU tensors by PEFT's names, on rank 0; an empty dict on
    other ranks.

    These are all parts of a model that training an adapter changes: A and B, trained copies of modules, and biases.

    Communicates: over all ranks, one gather of names, and over pp one of dtypes; per tensor, like `canonical_tensor`.
    """
    registry = registry_of(model)
    reshard(model)
    values, entries = state_names(model, remove_duplicate=False), named_entries(model)
    dtypes = dtypes_of({fqn: value for fqn, value in values.items() if value is not None}, registry.mesh)
    shown = {
        fqn: torch.empty(entries[fqn].layout.shape if value is None or fqn in entries else value.shape, device="meta")
        for fqn, value in values.items()
    }
    found = _chosen(model, shown, name, registry)
    held = {id(entries[fqn]): value for fqn, value in values.items() if fqn in entries and value is not None}
    state = {}
    for key, fqn in found.items():
        value = held.get(id(entries[fqn])) if fqn in entries else values[fqn]  # a tied one has other names elsewhere
        local = None if value is None else value.detach()
        if fqn not in entries:
            full = None if local is None else local.to("cpu", copy=True)
        else:
            layout, mesh = entries[fqn].layout, registry.mesh
            full = canonical_tensor(local, layout, mesh, rank0_only=True, dtype=dtypes.get(fqn))
        if full is not None and not registry.mesh.rank:
            state[key] = full.contiguous()
    return state


def _chosen(model: nn.Module, shown: Mapping[str, Tensor], name: str, registry: Registry) -> dict[str, str]:
    """Returns PEFT's name of every tensor in the file, to the model's name. Rank 0 asks PEFT."""

    def choose() -> dict[str, str]:
        if registry.mesh.rank:
            return {}
        names = {id(value): fqn for fqn, value in shown.items()}
        with names_only(registry):
            by_fqn = {fqn_of("", key): key for key in model.state_dict()}  # PEFT looks for compiled modules by its key
            keyed = {by_fqn.get(fqn, fqn): value for fqn, value in shown.items()}
            state = peft().get_peft_model_state_dict(model, state_dict=keyed, adapter_name=name)
        base: Any = find_model(model)
        state |= {fqn: shown[fqn] for fqn in named_biases(model, base.peft_config[name])}
        prefix = "" if find_model(model) is not model else _PREFIX
        return {fqn_of("", f"{prefix}{key}"): names[id(value)] for key, value in state.items()}

    return gather_from_all(registry.mesh.group(), "naming the tensors of an adapter", choose)[0]


def write_adapter_files(directory: Path, state: Mapping[str, Tensor], config: bytes, *, tokenizer: Any = None) -> None:
    """Writes an adapter's weights, its config to a file and to the weights' header, and a tokenizer if there is one.

    Args:
        state: full CPU tensors by PEFT's names.
    """
    (directory / ADAPTER_CONFIG).unlink(missing_ok=True)  # an older one must not stand beside new weights
    with tempfile.TemporaryDirectory() as place:
        if tokenizer is not None:
            tokenizer.save_pretrained(place)
        for file in (each for each in Path(place).rglob("*") if each.is_file()):
            with atomic_file(directory / file.relative_to(place)) as partial:
                shutil.copyfile(file, partial)
    header = {"format": "pt", "adapter_config": json.dumps(json.loads(config), sort_keys=True)}
    full_disk = as_error(LoadError, "the adapter cannot be written", SafetensorError, at=str(directory))
    with full_disk, atomic_file(directory / "adapter_model.safetensors") as partial:
        save_file(dict(state), partial, metadata=header)
    with atomic_file(directory / ADAPTER_CONFIG) as partial:  # with it, the directory holds an adapter
        partial.write_bytes(config)


def adapter_companions(model: nn.Module) -> dict[str, bytes]:
    """Returns a model's files besides tensors: with one adapter, of the default name, its config in PEFT's format."""
    configs = getattr(find_model(model), "peft_config", {})
    return {ADAPTER_CONFIG: adapter_config_text(model, "default")} if list(configs) == ["default"] else {}


def stored_names(model: nn.Module) -> dict[str, str]:
    """Maps PEFT's name of every tensor in the default adapter's file to its name in the unsplit model with adapters."""
    shown = {fqn: value.to("meta") for fqn, value in model.state_dict().items()}
    names = {id(value): fqn.removeprefix(_PREFIX) for fqn, value in shown.items()}
    state = peft().get_peft_model_state_dict(model, state_dict=shown)
    return {key: names[id(value)] for key, value in state.items()}


def adapter_config_text(model: nn.Module, name: str) -> bytes:
    """Returns PEFT's `adapter_config.json`."""
    base: Any = find_model(model)
    config = copy.deepcopy(base.peft_config[name])
    config.base_model_name_or_path = config.base_model_name_or_path or getattr(base, "name_or_path", None) or None
    config.inference_mode = True
    mapping = None
    if config.task_type is None:
        own_class = type(base)
        mapping = {"base_model_class": own_class.__name__, "parent_library": own_class.__module__}
    with tempfile.TemporaryDirectory() as place:
        config.save_pretrained(place, auto_mapping_dict=mapping)
        return (Path(place) / ADAPTER_CONFIG).read_bytes()


def load_adapter_weights(model: nn.Module, place: str | os.PathLike[str]) -> dict[str, Tensor]:
    """Fills the default adapter with the weights at `place`; each rank its parts. Returns the full tensors.

    Communicates: nothing.
    """
    where = os.fspath(place)
    entries, registry = named_entries(model), registry_of(model)
    with as_error(LoadError, f"no adapter weights at {where!r}", limit=300):  # no file, a damaged file, no network
        weights = dict(peft().load_peft_weights(where, device=str(registry.mesh.device)))
    what, fix = f"the adapter at {where!r} does not fit the model", "load it with its own config and base model"
    with as_error(LoadError, what, RuntimeError, KeyError, ValueError, fix=fix, limit=400), names_only(registry):
        result = peft().set_peft_model_state_dict(model, dict(weights))
    missing = [key for key in result.missing_keys if key not in entries or registry.holds(entries[key].fqn)]
    lost = [key for key in missing if ".lora_" in key and ".default" in key]
    if result.unexpected_keys or lost:
        raise LoadError(
            f"the adapter at {where!r} is none of this model",
            why=f"it has {counted(len(result.unexpected_keys), 'tensor')} without a place here, such as "
            f"{(result.unexpected_keys or ['none'])[0]}, and lacks {len(lost)}, such as {(lost or ['none'])[0]}",
            fix=fix,
        )
    return weights


WeightDelta = Callable[[Tensor], Tensor]


def base_tensors(model: nn.Module, *, merged: bool) -> dict[str, str]:
    """Maps the base's name of each of its parameters and persistent buffers to the name in the model.

    Args:
        merged: whether to use the trained copies of modules instead of the originals.
    """
    model = find_model(model)
    for name, module in model.named_modules():
        if not (is_adapter(module) or is_saved_copy(module)):
            continue
        adapter: Any = module
        if adapter.merged_adapters:
            raise ConfigError(f"{name} has its adapters merged into its weight", fix="call unmerge_adapter() first")
        if merged and (adapter.disable_adapters or not adapter.active_adapters):
            raise ConfigError(
                f"the adapters of {name} are switched off",
                why="merged they would be on",
                fix='enable them, or export the base with adapter="with_base"',
            )
    found: dict[str, str] = {}
    active: set[str] = set()  # copies, which come after their originals and take their places
    for place in places_in(model):
        wrapper: Any = place.module
        if merged and is_saved_copy(wrapper):
            active.add(f"{place.fqn}.modules_to_save.{wrapper.active_adapters[0]}")
        if place.is_wrapper or (place.is_copy and not is_within(place.fqn, active)):
            continue
        known = entries_of(place.module)  # also what other stages hold
        for own, value in {**dict.fromkeys(known), **place.module._parameters, **place.module._buffers}.items():
            is_there = value is not None or own in known
            if is_there and own not in place.module._non_persistent_buffers_set:
                found[fqn_of(place.base, own)] = fqn_of(place.fqn, own)
    return found


class Merger:
    """Adds the active adapters to full weights, like PEFT's `merge_and_unload`.

    Unlike in PEFT, a tied weight is exported once for each module if only one has adapters, or both have their own.

    Args:
        model: split; all ranks call alike.

    Attributes:
        changed: names of the weights and biases that have adapters; of a tied weight, its names with adapters.

    Communicates: over pp, one gather of dtypes.
    """

    def __init__(self, model: nn.Module) -> None:
        model = find_model(model)
        self._registry = registry_of(model)
        held = {entry.fqn: value for _, value, entry in find_parameters(model) if entry is not None}
        self._dtypes = dtypes_of(held, self._registry.mesh)
        self._wrappers: dict[str, list[tuple[str, Any]]] = {}
        name_of = {module: name for name, module in model.named_modules()}
        for module in name_of:
            if not is_adapter(module):
                continue
            wrapper: Any = module
            if not hasattr(wrapper, "lora_A") or wrapper.lora_variant:
                raise UnsupportedError(
                    f"merging adapters of {type(wrapper).__module__}", fix="export them by themselves"
                )
            known, weight = entries_of(unwrapped(wrapper)), getattr(wrapper, "parameter_name", "weight")
            if weight not in known:
                raise UnsupportedError(
                    f"merging adapters of {type(unwrapped(wrapper)).__name__} without {weight!r}",
                    fix="export them by themselves",
                )
            for own in known.keys() & {weight, "bias"}:
                self._wrappers.setdefault(fqn_of(name_of[unwrapped(wrapper)], own), []).append((own, wrapper))
        self.changed = {name for name, several in self._wrappers.items() if any(_adds(*each) for each in several)}

    @torch.no_grad()
    def delta_of(self, fqn: str) -> WeightDelta:
        """Returns a function that adds the adapters' contribution to the full parameter `fqn`.

        Communicates: over all axes, all-gathers of the adapters' parameters; the returned function: nothing.
        """
        wrappers = self._wrappers.get(fqn, ())
        added = [self._added(*each, adapter) for each in wrappers for adapter in each[1].active_adapters]

        @torch.no_grad()
        def change(full: Tensor) -> Tensor:
            for delta in filter(None, added):
                full = full + delta(full).to(full.dtype)
            return full

        return change

    def _added(self, own: str, wrapper: Any, adapter: str) -> WeightDelta | None:
        """Returns the contribution of one adapter to a full bias or weight; None if there is none."""
        if own == "bias":
            has_bias = adapter in wrapper.lora_B and getattr(wrapper.lora_B[adapter], "bias", None) is not None
            bias = self._full(wrapper.lora_B[adapter], "bias") if has_bias else None
            return None if bias is None else lambda full: bias * wrapper.scaling[adapter]
        parts: dict[str, dict[str, Any]] = {}
        for kind in ("lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B"):
            held = getattr(wrapper, kind)
            if adapter in held:
                is_module = isinstance(held[adapter], nn.Module)
                first = next(iter(entries_of(held[adapter])), "weight") if is_module else ""  # or "weight_qkv"
                value = self._full(held[adapter], first) if is_module else self._full(held, adapter)
                parts[kind] = {adapter: SimpleNamespace(weight=value) if is_module else value}
        return (lambda full: type(wrapper).get_delta_weight(_Unsplit(wrapper, parts, full), adapter)) if parts else None

    def _full(self, owner: nn.Module, own: str) -> Tensor | None:
        parameter, entry = owner._parameters.get(own), entries_of(owner).get(own)
        if entry is None:
            return None if parameter is None else parameter.detach().cpu()
        local, dtype = None if parameter is None else parameter.detach(), self._dtypes.get(entry.fqn)
        return canonical_tensor(local, entry.layout, self._registry.mesh, dtype=dtype)


def _adds(own: str, wrapper: Any) -> bool:
    """Returns whether an active adapter adds something to a weight or bias of the module that `wrapper` is around."""
    active = set(wrapper.active_adapters)
    if own == "bias":
        return any(getattr(wrapper.lora_B[each], "bias", None) is not None for each in active & {*wrapper.lora_B})
    return not active.isdisjoint({*wrapper.lora_A, *wrapper.lora_embedding_A})


class _Unsplit:
    """Adapters with full tensors, for PEFT's formula."""

    def __init__(self, wrapper: Any, parts: dict[str, dict[str, Any]], weight: Tensor) -> None:
        self.__dict__.update(parts, _wrapper=wrapper, _weight=weight)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_wrapper"], name)

    def get_param(self) -> Tensor:
        """Returns the full weight of stacked experts."""
        return self.__dict__["_weight"]
