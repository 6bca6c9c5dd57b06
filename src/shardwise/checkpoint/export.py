"""Exports a split model as a plain Hugging Face directory; one rank assembles and writes each shard.

# [Note: who writes which shard]
Shards are assigned in turn to the ranks that see the directory. The writing rank receives the other ranks' elements of
a tensor in pieces, shared among replicas, and copies each into place. So it holds one full tensor (or one group that
the format fuses) and one piece. It writes in a thread, while it sends its elements of the next tensors to their
writers; its own next tensor waits for the thread.
"""

import copy
import itertools
import os
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoTokenizer, PreTrainedModel

from shardwise.checkpoint.collect import slices_of
from shardwise.comm.agree import raise_on_all_ranks
from shardwise.comm.collectives import Group, all_gather_objects, host_device, receive_, send
from shardwise.errors import LoadError, as_error
from shardwise.parameters.canonical import computed_buffer, dtypes_of, state_names
from shardwise.parameters.registry import find_parameters, local_part, named_entries, registry_of, reshard
from shardwise.parameters.replicas import check_replicas
from shardwise.sharding.boxes import slices
from shardwise.sharding.division import WriteItem, assign_writers
from shardwise.weights.conversion import ExportGroup, has_tied_weights, plan_export, untie
from shardwise.weights.write import PlannedShards, PretrainedWriter, as_bytes

WeightDelta = Callable[[Tensor], Tensor]


@dataclass(frozen=True, kw_only=True)
class ExportSelection:
    """What an export of a model with adapters contains.

    Attributes:
        names: name of each exported tensor, to its name in the model.
        change: given the model's name of a tensor, returns a function from the full tensor to the exported one. All
            ranks call it alike, and the writing rank calls the function. None: tensors are exported unchanged.
        changed: the model's names of the tensors that `change` changes.
        add: writes further files into a directory; called on rank 0.
    """

    names: Mapping[str, str]
    change: Callable[[str], WeightDelta] | None = None
    changed: Collection[str] = ()
    add: Callable[[Path], None] = lambda directory: None


class Export:
    """Assembles the tensors of a split model and writes them; a context manager that closes its files."""

    def __init__(
        self, model: nn.Module, metas: Mapping[str, Tensor], base: ExportSelection, shards: PlannedShards
    ) -> None:
        self._registry = registry_of(model)
        self._mesh = self._registry.mesh
        self._metas, self._base, self._shards = metas, base, shards
        self._values, self._entries = state_names(model), named_entries(model)
        self._held = {entry.fqn: value for _, value, entry in find_parameters(model) if entry is not None}
        written = set(base.names.values())
        self._layouts = {entry.fqn: entry.layout for name, entry in self._entries.items() if name in written}
        self._write_items = assign_writers(self._layouts, self._mesh.shape)
        self._rank = self._mesh.position
        self._thread = ThreadPoolExecutor(1, "shardwise-export")
        self._writing: Future[None] | None = None

    def write(self, groups: Sequence[ExportGroup], writers: Sequence[int]) -> Exception | None:
        """Writes everything; all ranks call it alike. Returns this rank's error: others expect its messages.

        Args:
            groups: tensors that are converted together.

        Communicates: over all ranks, one message per piece of a tensor that the writing rank does not hold; over pp,
        one broadcast of each persistent buffer.
        """
        fault: Exception | None = None
        for group, target in self._dealt(groups, writers):
            if target == self._rank:
                fault = fault or self._await_write()
            state = {name: self._full(name, target) for name in group.fqns}
            if target == self._rank and fault is None:
                self._writing = self._thread.submit(self._write, group, state)
            del state
        return fault or self._await_write()

    def _await_write(self) -> Exception | None:
        """Waits for the thread; returns its error, which is raised on every rank later."""
        writing, self._writing = self._writing, None
        error: Any = writing.exception() if writing is not None else None
        return error

    def _dealt(self, groups: Sequence[ExportGroup], writers: Sequence[int]) -> Iterator[tuple[ExportGroup, int]]:
        """Yields every group with its writing rank, in turns. Shards with a common group have one writer."""
        queues: dict[int, list[ExportGroup]] = {rank: [] for rank in writers}
        turns, last, rank = itertools.cycle(writers), -1, writers[0]
        for group in groups:
            numbers = [self._shards.shard_of[name] for name in group.names]
            if min(numbers) > last:
                rank = next(turns)
            last = max(last, *numbers)
            queues[rank].append(group)
        for each in itertools.zip_longest(*queues.values()):
            yield from ((group, rank) for rank, group in zip(queues, each, strict=True) if group is not None)

    def _write(self, group: ExportGroup, state: dict[str, tuple[Tensor, WeightDelta | None]]) -> None:
        made: dict[str, Tensor] = {}
        place = str(self._shards.path(0).parent)
        with as_error(LoadError, "the export cannot be written", at=place, limit=300):
            for name in list(state):
                full, change = state.pop(name)
                made[name] = full if change is None else change(full)
                del full  # before the next one is made
            for name, tensor in group.build(made):
                self._shards.write(name, tensor)
                del tensor  # before the next one is made

    def _full(self, name: str, target: int) -> tuple[Tensor, WeightDelta | None]:
        """On the rank `target`, the full tensor in host memory, and its change; an empty tensor elsewhere."""
        own = self._base.names[name]
        entry = self._entries.get(own)
        if entry is not None:
            full = self._put_together(entry.fqn, self._metas[name], target)
        else:
            value = self._values[own]
            assert value is not None, "buffers are on every rank"
            full = computed_buffer(own, value, self._registry).cpu()
        return full, None if self._base.change is None else self._base.change(own)

    def _put_together(self, fqn: str, meta: Tensor, target: int) -> Tensor:
        is_target, group = target == self._rank, self._mesh.group()
        full = torch.empty(meta.shape if is_target else 0, dtype=meta.dtype)
        for portion in self._write_items[fqn]:
            place = slices(portion.box)
            if portion.rank == self._rank:
                part = self._part(fqn, portion)
                if is_target:
                    full[place] = part.cpu()
                elif group is not None:
                    send(as_bytes(part.to(host_device(group, self._mesh.device))), group, to=target)
            elif is_target and group is not None:
                self._receive(full[place], portion.rank, group)
        return full

    def _part(self, fqn: str, portion: WriteItem) -> Tensor:
        ((_, place),) = slices_of(self._layouts[fqn], self._mesh.coords, [portion.box])
        return local_part(self._held[fqn].detach())[place]

    def _receive(self, out: Tensor, source: int, group: Group) -> None:
        device = host_device(group, self._mesh.device)
        received = out
        if not out.is_contiguous() or device.type != "cpu":
            received = torch.empty(out.shape, dtype=out.dtype, device=device)
        receive_(as_bytes(received), group, source=source)
        if received is not out:
            out.copy_(received)

    def __enter__(self) -> "Export":
        return self

    def __exit__(self, *error: object) -> None:
        self._thread.shutdown()
        self._shards.close()


_PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
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
        shared = {name: own for name, own in base.names.items() if own in entries and own not in base.changed}
        tensor_of = {name: entries[own].fqn for name, own in shared.items()}
        if not (is_tied := has_tied_weights(model, tensor_of)):  # the config will say that nothing is tied
            ties: Any = model.all_tied_weights_keys
            aliases = {target: base.names[source] for target, source in ties.items() if source in base.names}
            base = replace(base, names=aliases | {**base.names})
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


def export_bytes(model: nn.Module) -> int:
    """Returns the size in bytes of the weights that an export of the split `model` writes. Communicates nothing."""
    return _total(model, _full_metas(model, {}), lambda value: value.nbytes)


def _full_metas(model: nn.Module, dtypes: Mapping[str, torch.dtype]) -> dict[str, Tensor]:
    """Returns the unsplit model's state by name, as meta tensors; modules with several names occur once.

    Args:
        dtypes: dtypes by canonical name of what other stages hold; default: that of this rank's first tensor.
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
    """Returns the dtype of every parameter by its canonical name. Communicates: over pp, one gather of them."""
    held = {entry.fqn: parameter for _, parameter, entry in find_parameters(model) if entry is not None}
    return dtypes_of(held, registry_of(model).mesh)


def _total(model: nn.Module, metas: Mapping[str, Tensor], size: Callable[[Tensor], int]) -> int:
    """Returns the total size of what an export writes, each tied tensor once."""
    tied = registry_of(model).tied
    return sum(size(value) for name, value in metas.items() if name not in tied)


def _write_companions(model: nn.Module, directory: Path, tokenizer: Any, *, is_tied: bool) -> None:
    """Writes config, generation config, tokenizer and processors beside the weights; of other models a tokenizer."""
    if isinstance(model, PreTrainedModel):
        config = copy.deepcopy(model.config)
        config.architectures = [type(model).__name__]
        config.dtype = next(model.parameters()).dtype
        if not is_tied:
            untie(config)
        config.save_pretrained(directory)
        if model.can_generate():
            model.generation_config.save_pretrained(directory)
        tokenizer = tokenizer_at(model.name_or_path) if tokenizer is None else tokenizer
        for name in _PROCESSOR_FILES:
            if (file := Path(model.name_or_path) / name).is_file():
                shutil.copyfile(file, directory / name)
    if tokenizer is not None:
        tokenizer.save_pretrained(directory)


def tokenizer_at(source: str | None) -> Any:
    """Returns the tokenizer in the directory from which a model was loaded; None if there is none."""
    if source and any((Path(source) / name).is_file() for name in _TOKENIZER_FILES):
        return AutoTokenizer.from_pretrained(source)
    return None
