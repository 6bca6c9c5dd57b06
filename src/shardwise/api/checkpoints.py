"""`save_checkpoint` and `load_checkpoint`: the training state, saved from any layout and loaded into any other."""

import copy
import functools
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from shardwise.checkpoint.background import PendingSave, finish_all_saves, join_saves, writer_of
from shardwise.checkpoint.collect import by_name
from shardwise.checkpoint.export import ExportSelection, tokenizer_at, write_pretrained
from shardwise.checkpoint.load import LoadTarget, check_same_target, load_into, open_on_all_ranks
from shardwise.checkpoint.store import check_tag, root_of
from shardwise.checkpoint.stored import StoredParts
from shardwise.checkpoint.trainer_files import open_trainer
from shardwise.checkpoint.writer import SaveRequest, prepare_save
from shardwise.comm.agree import check_calls, raise_on_all_ranks
from shardwise.comm.collectives import all_gather_objects
from shardwise.errors import ConfigError
from shardwise.lora.files import (
    Merger,
    adapter_companions,
    adapter_config_text,
    adapter_state,
    base_tensors,
    write_adapter_files,
)
from shardwise.lora.inject import inject_alike
from shardwise.optim.gradients import gradients_of
from shardwise.optim.optimizer import model_under
from shardwise.optim.steps import check_steps
from shardwise.parallel.build import build_meta_model
from shardwise.parallel.loading import Allowed, find_weights, put_tensor, read_part
from shardwise.parameters.canonical import canonical_tensors, computed_buffer, state_names
from shardwise.parameters.registry import find_parameters, local_part, named_entries, registry_of, reshard
from shardwise.parameters.replicas import check_replicas
from shardwise.plan.options import check_choice
from shardwise.runtime.adapter_facts import find_model, has_adapters
from shardwise.runtime.same_batch import describe_steps
from shardwise.weights.foreign import open_weights
from shardwise.weights.staging import disk_errors

Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | Mapping[str, torch.optim.Optimizer]


def save_checkpoint(  # noqa: PLR0913 - the public surface: each is a choice of the user's
    path: str | os.PathLike[str],
    *,
    model: nn.Module,
    optimizer: Optimizers | None = None,
    scheduler: Any = None,
    extra: Any = None,
    step: int | None = None,
    tag: str | None = None,
    async_save: bool = False,
    keep_last: int | None = None,
    keep_every: int | None = None,
) -> PendingSave:
    """Saves a split model and its training state as one checkpoint, which any other layout can load.

    Saves parameters and persistent buffers by their Hugging Face names, the optimizer's states and options, the
    scheduler, the loss scale of float16 and the random states. Gradients are not saved: save after a step. With
    adapters, frozen parameters that are unchanged since they were read from a directory or the hub are left out.
    Replicas share the writing. The checkpoint appears complete or not at all (docs/checkpoint-format.md).

    Args:
        path: a directory of checkpoints that all ranks share. Only one job at a time may save there.
        model: model split by Shardwise, or a wrapper around it.
        optimizer: optimizer of its parameters, from `build_optimizer` or torch; or a list, or a dictionary by name, of
            several, which may share parameters. One that updates a part of the parameters is saved as it is: the states
            of optimizers that are not passed are not in the checkpoint.
        scheduler: any object whose `state_dict` holds JSON values and tensors; or a list or dictionary of several.
        extra: JSON values and tensors, the same on every rank, which `load_checkpoint` returns. "step" names the tag.
        step: number of the step, from 0: `extra["step"]`, for an `extra` that is None or a dictionary.
        tag: name of the checkpoint in `path`. Default: `step-N`, or `save-N` if no step is known. An existing
            checkpoint of this name is replaced when the new one is complete.
        async_save: return when everything is copied to host memory, and write in the background. The next save waits
            for this one. An error is raised by the next save or load, or makes the process exit with an error.
        keep_last: when the checkpoint is complete, delete all but this many of the newest complete checkpoints.
        keep_every: never delete checkpoints whose step is a multiple of this.

    Returns:
        The save. Its `wait()` returns the tag when the checkpoint is complete.

    Raises:
        ConfigError: something cannot be saved, or differs between ranks.
        GradientError: an earlier step had invalid gradients, and the host did not know yet; the weights are those
            before that step.
        LoadError: the checkpoint cannot be written, or the previous save failed; the same on every rank.

    Communicates: over all ranks, one all-gather of 40 bytes, one all-reduce of a number, and with adapters or
    `async_save` a gather of small objects; with `async_save` four more in the background, over their own group.
    """
    request = functools.partial(save_request, path, tag, extra, keep_last, keep_every, step=step, async_save=async_save)
    if step is not None and (extra is None or isinstance(extra, Mapping)):
        extra = {**(extra or {}), "step": step}
    return save_with(request, model=model, optimizer=optimizer, scheduler=scheduler, extra=extra)


@torch.inference_mode(mode=False)  # what is made here is used again outside of it
def save_with(
    request: Callable[[], SaveRequest],
    *,
    model: nn.Module,
    optimizer: Optimizers | None,
    scheduler: Any,
    extra: Any,
    add_files: Callable[[Path], None] | None = None,
) -> PendingSave:
    """Does the work of `save_checkpoint`.

    Args:
        request: returns the destination; its error is raised on every rank.
        add_files: writes further files into the unfinished checkpoint, which must not be saved in the background. All
            ranks call it, and it raises the same on every rank.
    """
    writer = writer_of(registry_of(model).mesh)
    writer.join()
    (gradients := check_steps(model)).adopt_added()  # what came into the model later has an entry from here on
    job = prepare_save(
        request,
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        loss_scale=gradients.loss_scale.state_dict() if gradients.loss_scale is not None else None,
        extra=extra,
        companions=lambda: adapter_companions(registry_of(model).model() or model),
    )
    job.add_files = add_files
    return writer.write_later(job) if job.request.async_save else writer.write(job)


def save_request(
    path: str | os.PathLike[str],
    tag: str | None,
    extra: Any,
    keep_last: int | None = None,
    keep_every: int | None = None,
    *,
    step: int | None = None,
    async_save: bool = False,
) -> SaveRequest:
    """Returns the checked destination of a checkpoint; see `save_checkpoint`."""
    keep = {"keep_last": keep_last, "keep_every": keep_every}
    for name, value in keep.items():
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            raise ConfigError(f"{name} is {value!r}", why="it counts, from 1")
    if step is not None and not (extra is None or isinstance(extra, Mapping)):
        raise ConfigError(f"step={step!r} with an extra that is a {type(extra).__name__}", fix="pass a dictionary")
    named = step if step is not None or extra is None else extra.get("step") if isinstance(extra, Mapping) else None
    is_step = isinstance(named, int) and not isinstance(named, bool) and 0 <= named < 2**62
    if step is not None and not is_step:
        raise ConfigError(f"step is {step!r}", why="it counts steps, from 0")
    return SaveRequest(
        root=root_of(path),
        tag=None if tag is None else check_tag(tag),
        step=named if is_step else None,
        async_save=bool(async_save),
        **keep,
    )


def load_checkpoint(
    path: str | os.PathLike[str],
    tag: str | None = None,
    *,
    model: nn.Module | None = None,
    optimizer: Optimizers | None = None,
    scheduler: Any = None,
    strict: bool = True,
    verify: bool = True,
) -> Any:
    """Loads a checkpoint into a split model and its training state, in place; returns the saved `extra`.

    The layout may differ from the one that saved, one process included: each rank reads only its parts. Everything is
    found and checked on all ranks before anything is changed. Random states continue if the number of data ranks is the
    same; otherwise each data rank starts a new stream derived from them. The model's gradients are dropped.

    Args:
        path: a directory of checkpoints; or a checkpoint of transformers' Trainer, of which the optimizer's states, the
            scheduler with its rate, and the step are loaded. `shardwise.load` loads its weights.
        tag: name of the checkpoint. Default: the newest complete one.
        model: model split by Shardwise, may be on the meta device. None reads only `extra`.
        optimizer: optimizer of its parameters, of the class that was saved; or a list or dictionary of as many, by the
            names that were saved. Options become the saved ones. Without `model`, only optimizers' states are loaded.
        scheduler: scheduler of the class that was saved; or a list or dictionary, as it was saved.
        strict: raise an error for names that only the model or only the checkpoint has, and for adapters of another
            base; False: log a warning.
        verify: verify the checksums of the parts that this rank reads.

    Raises:
        LoadError: there is no such checkpoint; a file is missing, damaged, or contradicts the manifest; names or shapes
            do not fit; optimizers have other names or another number; or an optimizer's state cannot be divided. Names
            file and tensor. The same error on every rank; model and optimizer are unchanged.
        ConfigError: the tag is invalid, the optimizer belongs to no split model, or only some ranks pass it.

    Communicates: a few gathers of small objects over all ranks.
    """
    if model is None and optimizer is not None:
        trained = next((each for each in map(model_under, by_name(optimizer).values()) if each is not None), None)
        if trained is None:
            raise ConfigError(
                "an optimizer without its model",
                why="its state is stored by the model's names, and its parameters belong to no split model",
                fix="pass model=, or an optimizer over the parameters of a split model",
            )
        target = LoadTarget(model=trained, optimizer=optimizer, scheduler=scheduler, strict=strict, fills_model=False)
    else:
        target = LoadTarget(model=model, optimizer=optimizer, scheduler=scheduler, strict=strict)
    mesh = registry_of(target.model).mesh if target.model is not None else None
    finish_all_saves() if mesh is None else join_saves(mesh)
    if mesh is not None:
        check_same_target(target, mesh, verifies=verify)
    frozen = set[str]()
    if target.model is not None and target.optimizer is not None and mesh is not None:  # of all stages
        own = [name for name, value, _ in find_parameters(find_model(target.model)) if not value.requires_grad]
        frozen = {name for names in all_gather_objects(own, mesh.group("pp")) for name in names}
    opener = functools.partial(_open_trainer, target=target, frozen=frozen)
    return restore(open_on_all_ranks(path, tag, mesh, verifies=verify, open_trainer=opener), target)


def _open_trainer(directory: Path, *, target: LoadTarget, frozen: Collection[str]) -> StoredParts:
    """Opens a checkpoint of transformers' Trainer; see `open_trainer`."""
    if target.model is None:
        return open_trainer(directory, None, None, target.scheduler)
    optimizers = by_name(target.optimizer)
    if target.fills_model or optimizers.keys() != {""}:
        raise ConfigError(
            "a checkpoint of transformers' Trainer is loaded into one optimizer",
            at=str(directory),
            fix="load its weights with shardwise.load, then shardwise.load_checkpoint(directory, optimizer=optimizer)",
        )
    split = find_model(target.model)
    unsplit = inject_alike(split, _unsplit_like(split))
    for name, value in unsplit.named_parameters():
        value.requires_grad_(value.requires_grad and name not in frozen)
    return open_trainer(directory, unsplit, optimizers[""], target.scheduler)


def _unsplit_like(split: Any) -> Any:
    """Returns the unsplit meta model of a split model's class and config."""
    kinds = (each for each in type(split).__mro__ if not issubclass(each, FSDPModule))
    return build_meta_model(copy.deepcopy(split.config), next(kinds), dtype=None, options={})


@torch.no_grad()
def read_pretrained(model: nn.Module, directory: str | os.PathLike[str]) -> None:
    """Reads the weights of a Hugging Face directory into a split model that has values; each rank reads its parts.

    Raises:
        LoadError: files or tensors are missing, or do not fit the model. The same on every rank.

    Communicates: a gather of small objects over all ranks.
    """
    registry = registry_of(model)
    reshard(model)
    with raise_on_all_ranks(registry.mesh.group(), f"reading {os.fspath(directory)}"):
        index = open_weights(directory)
        found = find_weights(_unsplit_like(find_model(model)), index, allowed=Allowed())
        for _, parameter, entry in find_parameters(model):
            if entry is not None and entry.is_held and (lazy := found.tensors.get(entry.fqn)) is not None:
                own = local_part(parameter)
                own.copy_(read_part(entry.fqn, lazy, registry, own.dtype))
        for name, value in state_names(find_model(model)).items():
            if (
                value is not None
                and not isinstance(value, nn.Parameter)
                and (lazy := found.tensors.get(name)) is not None
            ):
                value.copy_(read_part(name, lazy, registry, value.dtype))


def fill_model(model: nn.Module, checkpoint: StoredParts | None, fill: Callable[[], object]) -> None:
    """Fills a split meta model with the values of a checkpoint and of its source.

    Args:
        checkpoint: checkpoint whose values take precedence; None: there is none.
        fill: reads or draws the values that are still on the meta device. Runs first if the checkpoint lacks frozen
            weights.

    Communicates: what `load_checkpoint` and `fill` do.
    """
    is_first = checkpoint is None or not holds_all(checkpoint)
    if is_first:
        fill()
    if checkpoint is not None:
        restore(checkpoint, LoadTarget(model=model))
    if not is_first:
        fill()


def holds_all(checkpoint: StoredParts) -> bool:
    """Returns whether a checkpoint holds all parameters of its model, not only the trained ones."""
    return checkpoint.manifest.content == "all"


@torch.inference_mode(mode=False)
def restore(stored: StoredParts, target: LoadTarget) -> Any:
    """Loads an open checkpoint into `target`; returns the saved `extra`. See `load_checkpoint`."""
    model, put = target.model, lambda name, value: None
    if model is not None:
        registry = registry_of(model)
        gradients_of(model).adopt_added()
        put = functools.partial(put_tensor, registry.model() or model, registry)
    with stored:
        extra = load_into(stored, target, put=put)
    loss_scale = gradients_of(model).loss_scale if model is not None else None
    if loss_scale is not None and (saved := stored.index.values.get("loss_scale")) is not None:
        loss_scale.load_state_dict(saved)
    return extra


ADAPTER_MODES = ("only", "with_base", "merged")


def full_state_dict(model: nn.Module, *, rank0_only: bool = False) -> dict[str, Tensor]:
    """Returns the state dict of the unsplit model: Hugging Face names, full CPU tensors, tied names included.

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
    """Returns the gradients of the unsplit model by Hugging Face name: full CPU tensors, for parameters that have one.

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
        tokenizer: saved with the weights, or with the adapters if they are alone. Default: that of the directory from
            which the model was loaded.
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
                place = getattr(find_model(model), "name_or_path", None)
                own = tokenizer_at(place) if tokenizer is None else tokenizer
                _write_adapters(model, Path(directory), states, tokenizer=own)
        return
    with raise_on_all_ranks(mesh.group(), "preparing the export"):
        names = base_tensors(model, merged=mode == "merged")
        base = ExportSelection(names=names, add=lambda staging: _write_adapters(model, staging / "adapter", states))
        if mode == "merged":
            merger = Merger(model)
            base = ExportSelection(names=names, change=merger.delta_of, changed=merger.changed)
    inner = find_model(model)
    write_pretrained(inner, directory, max_shard_bytes=max_shard_bytes, tokenizer=tokenizer, base=base)


def _named_as_split(model: nn.Module) -> nn.Module:
    """Returns the split model, or PEFT's wrapper around it, if no wrapper around it holds tensors; else `model`."""
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
    """Returns the validated export mode of the adapters; None if the model has none."""
    if adapter is not None:
        check_choice("the adapter mode", adapter, ADAPTER_MODES)
    if has_adapters(model):
        return adapter or "only"
    if adapter is not None:
        raise ConfigError(f"an export of {type(model).__name__} with adapter={adapter!r}", why="it has no adapters")
    return None


def _write_adapters(
    model: nn.Module, directory: Path, states: Mapping[str, Mapping[str, Tensor]], *, tokenizer: Any = None
) -> None:
    with disk_errors(f"cannot write to {str(directory)[:100]!r}", fix="pass a directory that can be made"):
        for name, state in states.items():
            place = directory if name == "default" else directory / name
            write_adapter_files(place, state, adapter_config_text(model, name), tokenizer=tokenizer)
