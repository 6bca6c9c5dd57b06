"""Export: a split model as a plain Hugging Face directory, streamed."""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoTokenizer, PreTrainedModel

from shardwise.comm.agree import raise_on_all_ranks
from shardwise.errors import UnsupportedError
from shardwise.runtime.canonical import canonical_tensor, state_tensors
from shardwise.runtime.registry import ParameterEntry, named_entries, registry_of, reshard
from shardwise.runtime.replicas import check_replicas
from shardwise.weights.conversion import ExportGroup, plan_export
from shardwise.weights.write import PretrainedWriter

__all__ = ["export_bytes", "write_pretrained"]

_TOKENIZER_FILES = ("tokenizer_config.json", "tokenizer.json", "tokenizer.model", "vocab.txt", "vocab.json")


def write_pretrained(
    model: nn.Module, directory: str | os.PathLike[str], *, max_shard_bytes: int, tokenizer: Any
) -> None:
    """Writes `model` to `directory`; see `shardwise.export_pretrained`."""
    registry = registry_of(model)
    reshard(model)
    check_replicas(model)
    with raise_on_all_ranks(registry.mesh.group(), "preparing the export"):
        if not isinstance(model, PreTrainedModel):
            raise UnsupportedError(
                f"exporting a {type(model).__name__}", why="it is no transformers model", fix="use full_state_dict"
            )
        values, entries = state_tensors(model), named_entries(model)
        groups = plan_export(model, {name: _canonical_meta(value, entries.get(name)) for name, value in values.items()})
        writer = PretrainedWriter(directory, max_shard_bytes=max_shard_bytes) if registry.mesh.rank == 0 else None
    try:
        fault = _stream(groups, values, entries, writer)
        with raise_on_all_ranks(registry.mesh.group(), "writing the export"):
            if fault is not None:
                raise fault
            if writer is not None:
                _write_companions(model, writer.staging, tokenizer)
                writer.finish({"total_parameters": sum(value.numel() for value in _wholes(model))})
    finally:
        if writer is not None:
            writer.abort()


def export_bytes(model: nn.Module) -> int:
    """Bytes of the weights that an export of the split `model` writes."""
    return sum(value.nbytes for value in _wholes(model))


def _stream(
    groups: tuple[ExportGroup, ...],
    values: Mapping[str, Tensor],
    entries: Mapping[str, ParameterEntry],
    writer: PretrainedWriter | None,
) -> Exception | None:
    """Gathers and writes group by group. A fault of the writer is kept: the others still expect to gather."""
    fault: Exception | None = None
    for group in groups:
        state = {}
        for fqn in group.fqns:
            entry, local = entries.get(fqn), values[fqn]
            if entry is None:
                state[fqn] = local.detach().cpu()
            elif (full := canonical_tensor(local, entry.layout, entry.registry.mesh, rank0_only=True)) is not None:
                state[fqn] = full
        if writer is None or fault is not None:
            continue
        try:
            for name, tensor in group.build(state).items():
                writer.add(name, tensor)
        except Exception as error:  # noqa: BLE001 - whatever it is, it is raised on every rank afterwards
            fault = error
    return fault


def _canonical_meta(value: Tensor, entry: ParameterEntry | None) -> Tensor:
    shape = value.shape if entry is None else entry.layout.shape
    return torch.empty(shape, dtype=value.dtype, device="meta")


def _wholes(model: nn.Module) -> list[Tensor]:
    """What an export writes, each tied tensor once, as meta tensors."""
    entries, tied = named_entries(model), registry_of(model).tied
    return [
        _canonical_meta(value, entries.get(name)) for name, value in state_tensors(model).items() if name not in tied
    ]


def _write_companions(model: PreTrainedModel, directory: Path, tokenizer: Any) -> None:
    """Config, generation config and tokenizer, next to the weights."""
    config = copy.deepcopy(model.config)
    config.architectures = [type(model).__name__]
    config.dtype = next(model.parameters()).dtype
    config.save_pretrained(directory)
    if model.can_generate():
        model.generation_config.save_pretrained(directory)
    if tokenizer is None:
        tokenizer = _tokenizer_of(model)
    if tokenizer is not None:
        tokenizer.save_pretrained(directory)


def _tokenizer_of(model: PreTrainedModel) -> Any:
    """The tokenizer of the directory the model was loaded from, None where there is none."""
    source = Path(model.name_or_path or "")
    if model.name_or_path and any((source / name).is_file() for name in _TOKENIZER_FILES):
        return AutoTokenizer.from_pretrained(source)
    return None
