"""Merges adapters into weights for exports, from full tensors, so that the result is the same for every layout."""

import functools
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.errors import ConfigError, UnsupportedError
from shardwise.parameters.canonical import canonical_tensor, dtypes_of
from shardwise.parameters.registry import entries_of, find_parameters, registry_of
from shardwise.plan.structure import fqn_of
from shardwise.runtime.adapter_facts import find_model, is_adapter, is_saved_copy, places_in, unwrapped

WeightDelta = Callable[[Tensor], Tensor]


def base_tensors(model: nn.Module, *, merged: bool) -> dict[str, str]:
    """Name in the base of each of its parameters and persistent buffers, to its name in the model.

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
    copies: dict[str, str] = {}
    for place in places_in(model):
        if is_saved_copy(place.module):
            chosen: Any = place.module
            copies[place.fqn] = f"{place.fqn}.modules_to_save.{chosen.active_adapters[0]}" if merged else ""
        if place.is_wrapper:
            continue
        around = next((fqn for fqn in copies if f"{place.fqn}.".startswith(f"{fqn}.")), None)
        is_chosen = not place.is_copy
        if around is not None and copies[around]:
            is_chosen = f"{place.fqn}.".startswith(f"{copies[around]}.")
        known = entries_of(place.module)  # also what other stages hold
        for own, value in {**dict.fromkeys(known), **place.module._parameters, **place.module._buffers}.items():
            is_there = value is not None or own in known
            if is_chosen and is_there and own not in place.module._non_persistent_buffers_set:
                found[fqn_of(place.base, own)] = fqn_of(place.fqn, own)
    return found


class Merger:
    """Adds the active adapters to full weights, like PEFT's `merge_and_unload`.

    Args:
        model: split; all ranks call alike.

    Communicates: over pp, one gather of dtypes.
    """

    def __init__(self, model: nn.Module) -> None:
        model = find_model(model)
        self._registry = registry_of(model)
        held = {entry.fqn: value for _, value, entry in find_parameters(model) if entry is not None}
        self._dtypes = dtypes_of(held, self._registry.mesh)
        self._wrappers: dict[str, list[tuple[str, Any]]] = {}
        for module in model.modules():
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
                self._wrappers.setdefault(known[own].fqn, []).append((own, wrapper))

    @torch.no_grad()
    def delta_of(self, fqn: str) -> WeightDelta:
        """Function that adds the adapters' contribution to the full parameter `fqn`.

        Communicates: over all axes, all-gathers of the adapters' parameters; the returned function: nothing.
        """
        wrappers = self._wrappers.get(self._registry.tied.get(fqn, fqn), ())
        added = [self._added(*each, adapter) for each in wrappers for adapter in each[1].active_adapters]
        return functools.partial(_with_added, added=[each for each in added if each is not None])

    def _added(self, own: str, wrapper: Any, adapter: str) -> WeightDelta | None:
        """Contribution of one adapter to a full bias or weight; None if there is none."""
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


@torch.no_grad()
def _with_added(full: Tensor, added: Sequence[WeightDelta]) -> Tensor:
    for change in added:
        full = full + change(full).to(full.dtype)
    return full


class _Unsplit:
    """Adapters with full tensors, for PEFT's formula."""

    def __init__(self, wrapper: Any, parts: dict[str, dict[str, Any]], weight: Tensor) -> None:
        self.__dict__.update(parts, _wrapper=wrapper, _weight=weight)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_wrapper"], name)

    def get_param(self) -> Tensor:
        """The full weight of stacked experts."""
        return self.__dict__["_weight"]
