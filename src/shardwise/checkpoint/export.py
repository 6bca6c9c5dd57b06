"""Exports a split model as a plain Hugging Face directory; `shards.py` assembles the tensors."""

import copy
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoTokenizer, PreTrainedModel

from shardwise.checkpoint.shards import Export, ExportSelection
from shardwise.comm.agree import raise_on_all_ranks
from shardwise.comm.operations import all_gather_objects
from shardwise.parameters.at_rest import reshard
from shardwise.parameters.canonical import dtypes_of, state_names
from shardwise.parameters.registry import find_parameters, named_entries, registry_of
from shardwise.parameters.replicas import check_replicas
from shardwise.weights.conversion import has_tied_weights, plan_export, untie
from shardwise.weights.write import PlannedShards, PretrainedWriter

_TOKENIZER_FILES = ("tokenizer_config.json", "tokenizer.json", "tokenizer.model", "vocab.txt", "vocab.json")


def write_pretrained(
    model: nn.Module,
    directory: str | os.PathLike[str],
    *,
    max_shard_bytes: int,
    tokenizer: Any,
    base: ExportSelection | None = None,
) -> None:
    """Writes `model` to `directory`; see `shardwise.export_pretrained`."""
    registry = registry_of(model)
    group = registry.mesh.group()
    reshard(model)
    check_replicas(model)
    dtypes = _dtypes(model)
    with raise_on_all_ranks(group, "preparing the export"):
        base = base or ExportSelection(names={name: name for name in state_names(model)})
        every = _full_metas(model, dtypes)
        entries = named_entries(model)
        tensor_of = {name: entries[own].fqn for name, own in base.names.items() if own in entries}
        if not (is_tied := has_tied_weights(model, tensor_of)):
            base = replace(base, names=_with_all_ties(model, base.names))
        metas = {name: every[own] for name, own in base.names.items()}
        groups = plan_export(model, metas, is_tied=is_tied)
        planned = [each for group in groups for each in group.described]
        is_first = registry.mesh.rank == 0
        writer = PretrainedWriter(directory, max_shard_bytes=max_shard_bytes, planned=planned) if is_first else None
    try:
        staging = all_gather_objects(writer and writer.staging, group)[0]
        sees = os.path.isdir(staging)  # noqa: PTH112 - pathlib raises where a rank may not look
        writers = [rank for rank, sees in enumerate(all_gather_objects(sees, group)) if sees]
        own = writer.shards if writer is not None else None
        shards = own or PlannedShards(staging, planned, max_shard_bytes=max_shard_bytes)
        with Export(model, metas, base, shards) as export:
            fault = export.write(groups, writers)
        with raise_on_all_ranks(group, "writing the export"):
            if fault is not None:
                raise fault
        with raise_on_all_ranks(group, "completing the export"):
            if writer is not None:
                with writer.companions() as staging:
                    _write_companions(model, staging, tokenizer, is_tied=is_tied)
                    base.add(staging)
                written = {own: every[own] for own in base.names.values()}
                writer.finish({"total_parameters": _total(model, written, Tensor.numel)})
    finally:
        if writer is not None:
            writer.abort()


def _with_all_ties(model: Any, names: Mapping[str, str]) -> dict[str, str]:
    """`names` extended by all names that transformers ties, for a model whose config says that nothing is tied."""
    ties = model.all_tied_weights_keys.items()
    return {**{target: names[source] for target, source in ties if source in names}, **names}


def export_bytes(model: nn.Module) -> int:
    """Size in bytes of the weights that an export of the split `model` writes. Communicates nothing."""
    return _total(model, _full_metas(model, {}), lambda value: value.nbytes)


def _full_metas(model: nn.Module, dtypes: Mapping[str, torch.dtype]) -> dict[str, Tensor]:
    """The unsplit model's state by name, as meta tensors; modules with several names occur once.

    Args:
        dtypes: dtypes by canonical name of what other stages hold; unknown ones get the dtype of this rank's first
            tensor.
    """
    entries, found = named_entries(model), {}
    usual = next((value.dtype for value in model.parameters()), torch.float32)
    for name, value in state_names(model).items():
        entry = entries.get(name)
        shape = value.shape if entry is None and value is not None else entries[name].layout.shape
        dtype = value.dtype if value is not None else dtypes.get(entries[name].fqn, usual)
        found[name] = torch.empty(shape, dtype=dtype, device="meta")
    return found


def _dtypes(model: nn.Module) -> dict[str, torch.dtype]:
    """Dtype of every parameter by its canonical name. Communicates: over pp, one gather of them."""
    held = {entry.fqn: parameter for _, parameter, entry in find_parameters(model) if entry is not None}
    return dtypes_of(held, registry_of(model).mesh)


def _total(model: nn.Module, metas: Mapping[str, Tensor], size: Callable[[Tensor], int]) -> int:
    """Total size of what an export writes, each tied tensor once."""
    tied = registry_of(model).tied
    return sum(size(value) for name, value in metas.items() if name not in tied)


def _write_companions(model: nn.Module, directory: Path, tokenizer: Any, *, is_tied: bool) -> None:
    """Writes config, generation config and tokenizer beside the weights; for other models only a tokenizer."""
    if isinstance(model, PreTrainedModel):
        config = copy.deepcopy(model.config)
        config.architectures = [type(model).__name__]
        config.dtype = next(model.parameters()).dtype
        if not is_tied:
            untie(config)
        config.save_pretrained(directory)
        if model.can_generate():
            model.generation_config.save_pretrained(directory)
        tokenizer = _tokenizer_of(model) if tokenizer is None else tokenizer
    if tokenizer is not None:
        tokenizer.save_pretrained(directory)


def _tokenizer_of(model: PreTrainedModel) -> Any:
    """Tokenizer of the directory from which the model was loaded; None if there is none."""
    source = Path(model.name_or_path or "")
    if model.name_or_path and any((source / name).is_file() for name in _TOKENIZER_FILES):
        return AutoTokenizer.from_pretrained(source)
    return None
