"""Exports of a split model: full state dict, full gradients, plain Hugging Face directories."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from shardwise.checkpoint.export import ExportSelection, write_pretrained
from shardwise.comm.agree import check_calls, raise_on_all_ranks
from shardwise.errors import ConfigError, did_you_mean
from shardwise.lora.files import adapter_config_text, adapter_state, write_adapter_files
from shardwise.lora.merging import Merger, base_tensors
from shardwise.optim.gradients import gradients_of
from shardwise.parameters.at_rest import reshard
from shardwise.parameters.canonical import canonical_tensors, computed_buffer, state_names
from shardwise.parameters.registry import find_parameters, named_entries, registry_of
from shardwise.parameters.replicas import check_replicas
from shardwise.runtime.adapter_facts import find_model, has_adapters
from shardwise.runtime.same_batch import describe_steps
from shardwise.weights.staging import disk_errors

_ADAPTER_MODES = ("only", "with_base", "merged")


def full_state_dict(model: nn.Module, *, rank0_only: bool = False) -> dict[str, Tensor]:
    """State dict of the unsplit model: Hugging Face names, full CPU tensors, tied names included.

    Args:
        rank0_only: return it on rank 0 only; other ranks get an empty dict and hold one full tensor at a time.

    Communicates: over all ranks, one all-gather of 40 bytes; over tp, one all-gather of each split parameter; over pp,
    one broadcast of each parameter and persistent buffer.
    """
    registry, model = registry_of(model), _named_as_split(model)
    _meet(model, "full_state_dict")
    reshard(model)
    entries, values = named_entries(model), {name: each.detach() for name, each, _ in find_parameters(model)}
    found = {entries[name].fqn: full for name, full in canonical_tensors(model, values, rank0_only=rank0_only)}
    state: dict[str, Tensor] = {}
    for fqn, value in state_names(model, remove_duplicate=False).items():
        full = found.get(entries[fqn].fqn) if fqn in entries else None
        if fqn not in entries and value is not None:
            buffer = computed_buffer(fqn, value, registry)
            full = buffer.to("cpu", copy=True) if not (rank0_only and registry.mesh.rank) else None
        if full is not None:
            state[fqn] = full
    return state


def full_gradients(model: nn.Module, *, rank0_only: bool = False) -> dict[str, Tensor]:
    """Gradients of the unsplit model by Hugging Face name: full CPU tensors, for parameters that have one.

    Communicates: gathers like `full_state_dict`.
    """
    model = _named_as_split(model)
    _meet(model, "full_gradients")
    reshard(model)
    gradients_of(model).complete()
    found = {name: each.grad for name, each, _ in find_parameters(model) if each.grad is not None}
    full = canonical_tensors(model, found, rank0_only=rank0_only)
    return {name: gradient for name, gradient in full if gradient is not None}


def export_pretrained(
    model: nn.Module,
    directory: str | os.PathLike[str],
    *,
    max_shard_bytes: int = 5 * 10**9,
    tokenizer: Any = None,
    adapter: str | None = None,
) -> None:
    """Writes a split model as a plain Hugging Face directory, which `from_pretrained` loads without Shardwise.

    For other models it writes only the weights, for `safetensors.torch.load_model`. Weights are streamed tensor by
    tensor, in the names and format of the checkpoint they came from. The ranks that see the directory take turns
    writing files (with merged adapters, rank 0 writes all). A writing rank holds one full tensor at a time (or the
    tensors that the format fuses, such as experts), and a receive buffer. Files are moved into the directory when all
    are written; the file that `from_pretrained` looks for first comes last.

    Args:
        directory: the target. Older weights and files of the same names are replaced; no other file is touched.
        max_shard_bytes: bytes of tensors per file.
        tokenizer: saved with the weights. Default: the tokenizer of the directory from which the model was loaded, if
            any.
        adapter: for a model with adapters. "only" (default): the adapters in PEFT's format, further ones in directories
            of their names. "with_base": the base, and the adapters in the subdirectory `adapter`. "merged": the model
            with its active adapters added to its weights. Files are the same for every layout.

    Raises:
        ConfigError: ranks pass different arguments; `adapter` has another value, or the model has no adapters; or
            adapters are already merged, or would be merged but are disabled.
        LoadError: a file cannot be written. The same error on every rank.
        LayoutError: ranks hold different copies of a parameter.

    Communicates: over all ranks, gathers of digests and small objects, and messages with the parts of each parameter
    that the writing rank does not hold.
    """
    model = _named_as_split(model)
    _meet(model, "export_pretrained", directory=directory, max_shard_bytes=max_shard_bytes, adapter=adapter)
    mode = _adapter_mode(model, adapter)
    if not isinstance(directory, str | os.PathLike):
        raise ConfigError(f"{directory!r:.100} cannot be a directory", fix="pass a str or pathlib.Path")
    directory = os.path.expanduser(directory)  # noqa: PTH111 - pathlib refuses some
    mesh = registry_of(model).mesh
    if mode is None:
        write_pretrained(model, directory, max_shard_bytes=max_shard_bytes, tokenizer=tokenizer)
        return
    check_replicas(model)
    adapters: Any = () if mode == "merged" else model.peft_config
    states = {name: adapter_state(model, name) for name in adapters}
    if mode == "only":
        with raise_on_all_ranks(mesh.group(), "writing the adapter"):
            if mesh.rank == 0:
                _write_adapters(model, Path(directory), states)
        return
    with raise_on_all_ranks(mesh.group(), "preparing the export"):
        names = base_tensors(model, merged=mode == "merged")
        base = ExportSelection(names=names, add=lambda staging: _write_adapters(model, staging / "adapter", states))
        if mode == "merged":
            base = ExportSelection(names=names, change=Merger(model).delta_of)
    inner = find_model(model)
    write_pretrained(inner, directory, max_shard_bytes=max_shard_bytes, tokenizer=tokenizer, base=base)


def _named_as_split(model: nn.Module) -> nn.Module:
    """The split model, or PEFT's wrapper around it, if the modules around it hold no tensors (`torch.compile`'s
    wrapper, a LightningModule); else `model`.
    """
    root = registry_of(model).model()
    inner = next((each for each in model.modules() if each is root or find_model(each) is root), model)
    own, held = ({id(value) for value in (*each.parameters(), *each.buffers())} for each in (inner, model))
    return inner if own == held else model


def _meet(model: nn.Module, doing: str, **asked: object) -> None:
    """Raises on all ranks unless all call this function with the same arguments."""
    registry = registry_of(model)
    fields = {name: str(value) for name, value in asked.items()} | describe_steps(registry.context)
    check_calls(registry.mesh.group(), fields, doing=doing)


def _adapter_mode(model: nn.Module, adapter: str | None) -> str | None:
    """Validated export mode of the adapters; None if the model has none."""
    if adapter is not None and adapter not in _ADAPTER_MODES:
        raise ConfigError(
            f"unknown adapter mode {adapter!r}{did_you_mean(adapter, _ADAPTER_MODES)}",
            fix=f"use one of {', '.join(map(repr, _ADAPTER_MODES))}",
        )
    if has_adapters(model):
        return adapter or "only"
    if adapter is not None:
        raise ConfigError(f"an export of {type(model).__name__} with adapter={adapter!r}", why="it has no adapters")
    return None


def _write_adapters(model: nn.Module, directory: Path, states: Mapping[str, Mapping[str, Tensor]]) -> None:
    with disk_errors(f"cannot write to {str(directory)[:100]!r}", fix="pass a directory that can be made"):
        for name, state in states.items():
            place = directory if name == "default" else directory / name
            write_adapter_files(place, state, adapter_config_text(model, name))
