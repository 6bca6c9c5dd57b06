"""Converts adapters: from checkpoints to PEFT's format, and merged into their base, in one process without ranks."""

import os
from pathlib import Path
from typing import Any

import torch

from shardwise.api.building import load
from shardwise.api.checkpoints import load_checkpoint
from shardwise.api.converting import meta_model, open_anywhere
from shardwise.api.state import export_pretrained
from shardwise.checkpoint.collect import model_key
from shardwise.checkpoint.manifest import MANIFEST
from shardwise.checkpoint.reader import StoredParts
from shardwise.errors import UnsupportedError
from shardwise.lora.files import stored_names, write_adapter_files
from shardwise.lora.inject import inject, read_adapter_config
from shardwise.mesh import Mesh
from shardwise.weights.kinds import ADAPTER_CONFIG
from shardwise.weights.staging import disk_errors


def convert_adapter(stored: StoredParts, directory: str | os.PathLike[str]) -> None:
    """Writes the adapter of a checkpoint in PEFT's format, without reading its base.

    Raises:
        LoadError: the checkpoint is damaged, or the directory cannot be written.
        UnsupportedError: the checkpoint holds no adapter, or PEFT's file would also hold weights of the base, as for an
            adapter around an embedding.
    """
    _check_adapter(stored)
    model = inject(meta_model(stored), read_adapter_config(stored.directory))
    keys = {key: model_key(stored.index.tied.get(name, name)) for key, name in stored_names(model).items()}
    if lacking := [key for key in keys.values() if key not in stored.index.tensors]:
        raise UnsupportedError(
            f"the adapter of {stored.manifest.tag} by itself",
            at=str(stored.directory),
            why=f"PEFT's file of it also holds {lacking[0]}, which was not trained and is not in the checkpoint",
            fix="load the checkpoint into its model, and use shardwise.export_pretrained",
        )
    state = {key: stored.read(own) for key, own in keys.items()}
    with disk_errors(f"cannot write to {str(directory)[:100]!r}"):
        write_adapter_files(Path(directory), state, (stored.directory / ADAPTER_CONFIG).read_bytes())


def merge_adapter(
    base: str | os.PathLike[str],
    adapter: str | os.PathLike[str],
    directory: str | os.PathLike[str],
    *,
    tag: str | None = None,
    dtype: torch.dtype | None = None,
    tokenizer: Any = None,
) -> None:
    """Writes a model with an adapter added to its weights for `from_pretrained`, tensor by tensor.

    Args:
        base: directory or hub id of a transformers model; it is not changed.
        adapter: a directory that PEFT or Shardwise wrote, a hub id, or a checkpoint that holds the adapter and whose
            fingerprint of the base matches.
        tag: name of the checkpoint. Default: the newest.

    Raises:
        LoadError: a file is damaged, or base and adapter do not belong together.
        UnsupportedError: the checkpoint holds no adapter, or also holds weights of the base.
    """
    with Mesh.open("tp1") as mesh:
        if not _is_checkpoint(adapter):
            model = load(base, mesh, adapter=adapter, dtype=dtype)
        else:
            with open_anywhere(adapter, tag) as stored:
                _check_adapter(stored)
                place = stored.directory
                if stored.index.values.get("source") is None:
                    raise UnsupportedError(
                        f"merging the adapter of {stored.manifest.tag} into {os.fspath(base)!r}",
                        at=str(place),
                        why="the checkpoint also holds the weights that the adapter was trained on",
                        fix="write its adapter with --adapter, and merge that",
                    )
            model = load(base, mesh, adapter=read_adapter_config(place), dtype=dtype)
            load_checkpoint(place.parent, place.name, model=model)
        export_pretrained(model, directory, tokenizer=tokenizer, adapter="merged")


def _is_checkpoint(place: str | os.PathLike[str]) -> bool:
    directory = Path(place)
    return any(directory.glob(f"*/{MANIFEST}")) or (directory / MANIFEST).is_file()


def _check_adapter(stored: StoredParts) -> None:
    if ADAPTER_CONFIG not in stored.manifest.files:
        raise UnsupportedError(
            f"{stored.manifest.tag} holds no adapter named default",
            at=str(stored.directory),
            fix="name a checkpoint of a model that was trained with one adapter",
        )
    stored.check_file(ADAPTER_CONFIG)
