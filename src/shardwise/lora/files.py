"""Adapter files in PEFT's format, read and written, the same for every layout."""

import copy
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn

from shardwise.comm.agree import gather_from_all
from shardwise.errors import LoadError, counted, one_line
from shardwise.lora.inject import named_biases, peft
from shardwise.parameters.canonical import canonical_tensor, dtypes_of, names_only, state_names
from shardwise.parameters.registry import Registry, named_entries, registry_of, reshard
from shardwise.plan.structure import fqn_of
from shardwise.runtime.adapter_facts import find_model
from shardwise.weights.locate import ADAPTER_CONFIG
from shardwise.weights.staging import atomic_file

_PREFIX = "base_model.model."


def adapter_state(model: nn.Module, name: str) -> dict[str, Tensor]:
    """Tensors of PEFT's file of an adapter: full CPU tensors by PEFT's names, on rank 0; an empty dict on other ranks.

    These are all parts of a model that training an adapter changes: A and B, trained copies of modules, and biases.

    Communicates: over all ranks, one gather of names, and over pp one of dtypes; per tensor, what `canonical_tensor`
    does.
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
    """PEFT's name of every tensor in the file, to the model's name. Rank 0 asks PEFT."""

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


def write_adapter_files(directory: Path, state: Mapping[str, Tensor], config: bytes) -> None:
    """Writes an adapter's weights, and its config to a file and to the weights' header.

    Args:
        state: full CPU tensors by PEFT's names.
    """
    (directory / ADAPTER_CONFIG).unlink(missing_ok=True)  # an older one must not stand beside new weights
    header = {"format": "pt", "adapter_config": json.dumps(json.loads(config), sort_keys=True)}
    with atomic_file(directory / "adapter_model.safetensors") as partial:
        try:
            save_file(dict(state), partial, metadata=header)
        except SafetensorError as error:  # a full disk, too
            raise OSError(str(error)) from error
    with atomic_file(directory / ADAPTER_CONFIG) as partial:  # with it, the directory holds an adapter
        partial.write_bytes(config)


def adapter_companions(model: nn.Module) -> dict[str, bytes]:
    """Files besides tensors, for a model with one adapter of the default name: its config in PEFT's format."""
    configs = getattr(find_model(model), "peft_config", {})
    return {ADAPTER_CONFIG: adapter_config_text(model, "default")} if list(configs) == ["default"] else {}


def stored_names(model: nn.Module) -> dict[str, str]:
    """PEFT's name of every tensor in the default adapter's file, to its name in the unsplit model with adapters."""
    shown = {fqn: value.to("meta") for fqn, value in model.state_dict().items()}
    names = {id(value): fqn.removeprefix(_PREFIX) for fqn, value in shown.items()}
    state = peft().get_peft_model_state_dict(model, state_dict=shown)
    return {key: names[id(value)] for key, value in state.items()}


def adapter_config_text(model: nn.Module, name: str) -> bytes:
    """PEFT's `adapter_config.json`."""
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
    try:
        weights = dict(peft().load_peft_weights(where, device=str(registry_of(model).mesh.device)))
    except Exception as error:  # no file, a damaged file, no network
        raise LoadError(f"no adapter weights at {where!r}", why=one_line(error, limit=300)) from error
    try:
        with names_only(registry_of(model)):
            result = peft().set_peft_model_state_dict(model, dict(weights))
    except (RuntimeError, KeyError, ValueError) as error:
        raise LoadError(
            f"the adapter at {where!r} does not fit the model",
            why="\n".join(str(error).splitlines()[:4]),
            fix="load it with its own config and base model",
        ) from error
    entries, registry = named_entries(model), registry_of(model)
    missing = [key for key in result.missing_keys if key not in entries or registry.holds(entries[key].fqn)]
    lost = [key for key in missing if ".lora_" in key and ".default" in key]
    if result.unexpected_keys or lost:
        raise LoadError(
            f"the adapter at {where!r} is none of this model",
            why=f"it has {counted(len(result.unexpected_keys), 'tensor')} without a place here, such as "
            f"{(result.unexpected_keys or ['none'])[0]}, and lacks {len(lost)}, such as {(lost or ['none'])[0]}",
            fix="load it with its own config and base model",
        )
    return weights
