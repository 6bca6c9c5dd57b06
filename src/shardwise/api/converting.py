"""Converts a checkpoint, ours or another system's, to a plain Hugging Face directory, in one process without ranks."""

import importlib
import os
import random
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy
import torch
import transformers
from torch import nn

from shardwise.api.building import load, parallelize
from shardwise.api.checkpoints import export_pretrained, load_checkpoint
from shardwise.api.prepare import decide
from shardwise.api.sources import Place
from shardwise.checkpoint.collect import model_key, state_for_groups
from shardwise.checkpoint.export import tokenizer_at
from shardwise.checkpoint.manifest import INDEX, MANIFEST
from shardwise.checkpoint.store import find_tag
from shardwise.checkpoint.stored import StoredParts, decode_tree, open_checkpoint
from shardwise.checkpoint.trainer_files import TRAINER_STATE, trained_names
from shardwise.errors import LoadError, UnsupportedError
from shardwise.lora.files import stored_names, write_adapter_files
from shardwise.lora.inject import inject, read_adapter_config
from shardwise.mesh import Mesh
from shardwise.parallel.build import build_meta_model, read_config
from shardwise.parallel.loading import Allowed, find_weights
from shardwise.plan.options import ParallelSpec
from shardwise.runtime.adapter_facts import find_model
from shardwise.sharding.layout import Layout
from shardwise.topology.shape import MeshShape
from shardwise.weights.conversion import has_tied_weights, plan_export, untie
from shardwise.weights.foreign import config_place, open_weights
from shardwise.weights.index import CheckpointIndex
from shardwise.weights.locate import ADAPTER_CONFIG, NXD, OPTIMUM_NEURON, kind_of
from shardwise.weights.neuron_files import open_nxd, open_optimum_neuron
from shardwise.weights.staging import disk_errors
from shardwise.weights.write import PretrainedWriter

_SHARD_BYTES = 5 * 10**9


def open_anywhere(path: Place, tag: str | None = None) -> StoredParts:
    """Opens a checkpoint by the directory of checkpoints and a tag (default: the newest), or by its own directory."""
    directory = Path(path).absolute()
    if tag is None and (directory / MANIFEST).is_file():
        return open_checkpoint(directory)
    return open_checkpoint(find_tag(directory, tag))


def convert_to_hf(
    stored: StoredParts, directory: Place, *, dtype: torch.dtype | None = None, tokenizer: Any = None
) -> None:
    """Writes the model of a checkpoint for `from_pretrained`, tensor by tensor.

    Holds one tensor in memory at a time (or the tensors that the format of the model's checkpoints fuses into one).

    Args:
        directory: the target; it appears complete or not at all.
        dtype: dtype of floating-point tensors. Default: as saved.
    """
    if stored.manifest.content != "all" or ADAPTER_CONFIG in stored.manifest.files:
        raise UnsupportedError(
            f"{stored.manifest.tag} holds a model with adapters",
            at=str(stored.directory),
            fix="write its adapter with --adapter, or put it into its base with --merge-adapter; or load it into the\n"
            "model that it belongs to, and use shardwise.export_pretrained",
        )
    model = meta_model(stored)
    names = {key.removeprefix("model/"): key for key in stored.index.tensors if key.startswith("model/")}
    names |= {alias: names[name] for alias, name in stored.index.tied.items() if name in names}
    stored_as = {name: stored.index.tensors[key] for name, key in names.items()}
    metas = {name: _meta(each.shape, each.dtype, dtype) for name, each in stored_as.items()}
    expected = {name for name in model.state_dict() if name not in (model._keys_to_ignore_on_save or ())}
    if missing := sorted(expected - metas.keys()):
        raise LoadError(f"the checkpoint has no {', '.join(missing[:5])}", at=str(stored.directory))

    def read(name: str) -> torch.Tensor:
        found = stored.read(names[name], dtype=metas[name].dtype)
        stored.drop()
        return found

    generation = None
    if "generation_config.json" in stored.manifest.files and model.can_generate():
        stored.check_file("generation_config.json")
        generation = transformers.GenerationConfig.from_pretrained(stored.directory)
    _write(model, metas, directory, read, tied=stored.index.tied, companions=(generation, tokenizer))


def convert_weights_to_hf(
    path: Place,
    directory: Place,
    *,
    config: Place | None = None,
    dtype: torch.dtype | None = None,
    tokenizer: Any = None,
) -> None:
    """Runs `convert_to_hf` for other formats: DCP, transformers' `distributed_checkpoint=True`, Optimum Neuron, NxD,
    Hugging Face.

    Args:
        config: a directory or file with the model's config. Default: `path`.
    """
    found, _ = read_config(config if config is not None else config_place(path), {})
    named = [getattr(transformers, name, None) for name in found.architectures or ()]
    model = build_meta_model(found, next(filter(None, named), None), dtype=None, options={})
    with _open(Path(path), model) as index:
        lazies = find_weights(model, index, allowed=Allowed()).tensors
        metas = {name: _meta(each.shape, each.dtype, dtype) for name, each in lazies.items()}

        def read(name: str) -> torch.Tensor:
            return lazies[name].read(dtype=metas[name].dtype)

        _write(model, metas, directory, read, tied=model.all_tied_weights_keys, companions=(tokenizer,))


def _open(path: Path, model: nn.Module) -> CheckpointIndex:
    """Opens the weights at `path`, including those of NxD and Optimum Neuron."""

    def layouts(tp_size: int) -> dict[str, Layout]:
        plan = decide(model, MeshShape(tp_size=tp_size), ParallelSpec())
        by_name = {name: planned.layout for name, planned in plan.parameters.items()}
        return {**by_name, **{alias: by_name[name] for alias, name in plan.tied.items()}}

    kind = kind_of(path)
    if kind == NXD:
        return open_nxd(path, layouts)
    return open_optimum_neuron(path) if kind == OPTIMUM_NEURON else open_weights(path)


def _write(
    model: Any,
    metas: Mapping[str, torch.Tensor],
    directory: Place,
    read: Callable[[str], torch.Tensor],
    *,
    tied: Mapping[str, str],
    companions: Iterable[Any],
) -> None:
    """Writes the weights that `read` returns by name, the config of `model`, and the `companions` that exist."""
    if not (is_tied := has_tied_weights(model, tied)):
        untie(model.config)
    groups = plan_export(model, metas, is_tied=is_tied)
    planned = [each for group in groups for each in group.described]
    with PretrainedWriter(directory, max_shard_bytes=_SHARD_BYTES, planned=planned) as writer:
        for group in groups:
            for name, tensor in group.build({name: read(name) for name in group.fqns}):
                writer.add(name, tensor)
                del tensor  # before the next one is made
        dtypes = [value.dtype for value in metas.values() if value.dtype.is_floating_point]
        model.config.dtype = next(iter(dtypes), model.config.dtype)
        with writer.companions() as staging:
            for each in (model.config, *companions):
                if each is not None:
                    each.save_pretrained(staging)
        writer.finish({"total_parameters": sum(v.numel() for name, v in metas.items() if name not in tied)})


def meta_model(stored: StoredParts) -> Any:
    """Returns the model of a checkpoint on the meta device; the base if it has adapters."""
    if "config.json" not in stored.manifest.files:
        raise UnsupportedError(
            f"{stored.manifest.tag} is of a {stored.manifest.model}, which is no transformers model",
            at=str(stored.directory),
            fix="load it into the model, and use shardwise.full_state_dict",
        )
    stored.check_file("config.json")
    config, _ = read_config(stored.directory / "config.json", {})
    chosen = getattr(transformers, stored.manifest.model, None)
    model = build_meta_model(config, chosen, dtype=None, options={})
    model.config.architectures = [stored.manifest.model]
    return model


def _meta(shape: Sequence[int], stored: torch.dtype, dtype: torch.dtype | None) -> torch.Tensor:
    """Returns the meta tensor of `shape`; floating-point tensors in `dtype`."""
    chosen = dtype if dtype is not None and stored.is_floating_point else stored
    return torch.empty(tuple(shape), dtype=chosen, device="meta")


def convert_to_trainer(stored: StoredParts, directory: Place) -> None:
    """Writes a checkpoint of a Trainer of `shardwise.trainer` as transformers' Trainer in one process writes it.

    Copies the weights and the Trainer's state, which are in the checkpoint in transformers' format. Holds all states of
    the optimizer in memory, and changes the random states of this process.

    Raises:
        UnsupportedError: no Trainer saved it, it holds no optimizer, or its weights have other names in files than in
            the model, by which transformers' Trainer does not find them when it resumes.
        LoadError: the optimizer had other groups of parameters than Trainer's.
    """
    saved, values, out = stored.index.optimizers.get(""), stored.index.values, Path(directory)
    if saved is None or not (stored.directory / TRAINER_STATE).is_file():
        raise UnsupportedError(
            f"{stored.manifest.tag}, in which no Trainer saved an optimizer",
            at=str(stored.directory),
            fix="convert it with --to hf",
        )
    is_adapter = ADAPTER_CONFIG in stored.manifest.files
    model = find_model((_adapted_model if is_adapter else meta_model)(stored)).to_empty(device="cpu")
    for name, value in model.named_parameters():
        value.requires_grad_(name in saved["parameters"])
        value.data = value.to(stored.index.tensors.get(model_key(name), value).dtype)
    if not is_adapter:
        _check_names(stored.directory, model)
    names, (module, _, kind) = trained_names(model), saved["class"].rpartition(".")
    with Mesh.open("tp1", device="cpu") as mesh, disk_errors(f"cannot write to {str(directory)[:100]!r}"):
        named = dict(parallelize(model, mesh).named_parameters())
        groups: list[dict[str, Any]] = [{"params": [named[name] for name in group]} for group in names]
        optimizer: torch.optim.Optimizer = getattr(importlib.import_module(module), kind)(groups)
        load_checkpoint(stored.directory.parent, stored.directory.name, optimizer=optimizer)
        groups = optimizer.param_groups
        for number, group in enumerate(groups):
            if not group["params"]:
                group |= {**groups[1 - number], "params": [], "weight_decay": 0.0}
        ours = {MANIFEST, INDEX, TRAINER_STATE, *stored.index.files}
        shutil.copytree(stored.directory, out, ignore=lambda _, names: ours & {*names}, dirs_exist_ok=True)
        torch.save(optimizer.state_dict(), out / "optimizer.pt")
        if "scheduler" in values:
            state = decode_tree(values["scheduler"], stored.read_all("scheduler"))
            torch.save(state_for_groups(state, groups), out / "scheduler.pt")
        states = {"python": random.getstate(), "numpy": numpy.random.get_state(), "cpu": torch.get_rng_state()}
        if (key := "random/0.0.0/cuda") in stored.index.tensors:
            states["cuda"] = stored.read(key)
        torch.save(states, out / "rng_state.pth")
        shutil.copy(stored.directory / TRAINER_STATE, out)  # last: without it nothing resumes from here


def _check_names(directory: Path, model: nn.Module) -> None:
    with CheckpointIndex.open(directory) as index:
        unknown = min(index.keys() - model.state_dict().keys(), default=None)
    if unknown is not None:
        raise UnsupportedError(
            f"a {type(model).__name__} in transformers' Trainer, which would resume without its weights",
            at=str(directory),
            why=f"it loads files by the names of modules, and {unknown} is none",
            fix="convert it with --to hf, and start a run from those weights",
        )


def _adapted_model(stored: StoredParts) -> Any:
    """Returns the base of a checkpoint with its adapter, on the meta device."""
    config, base = read_adapter_config(stored.directory), meta_model(stored)
    base.name_or_path = config.base_model_name_or_path  # else PEFT takes the checkpoint for it
    return inject(base, config)


def convert_adapter(stored: StoredParts, directory: Place, *, tokenizer: Any = None) -> None:
    """Writes the adapter of a checkpoint in PEFT's format, without reading the weights of its base.

    Args:
        tokenizer: saved with the adapter. Default: that of the base's directory, if there is one.
    """
    _check_adapter(stored)
    model = _adapted_model(stored)
    keys = {key: model_key(stored.index.tied.get(name, name)) for key, name in stored_names(model).items()}
    if lacking := [key for key in keys.values() if key not in stored.index.tensors]:
        raise UnsupportedError(
            f"the adapter of {stored.manifest.tag} by itself",
            at=str(stored.directory),
            why=f"PEFT's file of it also holds {lacking[0]}, which was not trained and is not in the checkpoint",
            fix="load the checkpoint into its model, and use shardwise.export_pretrained",
        )
    state = {key: stored.read(own) for key, own in keys.items()}
    source = read_adapter_config(stored.directory).base_model_name_or_path
    own, text = tokenizer_at(source) if tokenizer is None else tokenizer, stored.directory / ADAPTER_CONFIG
    with disk_errors(f"cannot write to {str(directory)[:100]!r}"):
        write_adapter_files(Path(directory), state, text.read_bytes(), tokenizer=own)


def merge_adapter(
    base: Place,
    adapter: Place,
    directory: Place,
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


def _is_checkpoint(place: Place) -> bool:
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
