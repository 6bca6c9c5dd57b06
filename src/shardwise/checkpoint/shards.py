"""Shards of an export. One rank writes each, and assembles one tensor at a time.

# [Note: who writes which shard]
Shards are assigned in turn to the ranks that see the directory. The writing rank receives the other ranks' elements of
a tensor in pieces, shared among replicas, and copies each into place. So it holds one full tensor (or one group that
the format fuses) and one piece. It writes in a thread, while it sends its elements of the next tensors to their
writers; its own next tensor waits for the thread.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from shardwise.checkpoint.collect import slices_of
from shardwise.comm.operations import Group, host_device, receive_, send
from shardwise.errors import LoadError, ShardwiseError
from shardwise.parameters.canonical import computed_buffer, state_names
from shardwise.parameters.registry import find_parameters, local_part, named_entries, registry_of
from shardwise.sharding.boxes import slices
from shardwise.sharding.division import WriteItem, assign_writers
from shardwise.weights.conversion import ExportGroup
from shardwise.weights.tensor_file import as_bytes
from shardwise.weights.write import PlannedShards

WeightDelta = Callable[[Tensor], Tensor]


@dataclass(frozen=True, kw_only=True)
class ExportSelection:
    """What an export of a model with adapters contains.

    Attributes:
        names: name of each exported tensor, to its name in the model.
        change: given the model's name of a tensor, returns a function from the full tensor to the exported one. All
            ranks call it alike, and the writing rank calls the function. None: tensors are exported unchanged.
        add: writes further files into a directory; called on rank 0.
    """

    names: Mapping[str, str]
    change: Callable[[str], WeightDelta] | None = None
    add: Callable[[Path], None] = lambda directory: None


class Export:
    """Assembles the tensors of a split model and writes them; a context manager that closes its files.

    Args:
        metas: dtype and shape of every tensor by its exported name.
        base: selection of the exported tensors.
        shards: the files.
    """

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
        """Writes everything; all ranks call it alike. Returns this rank's error, because others still expect its
        messages.

        Args:
            groups: tensors that are converted together.
            writers: the ranks that may write.

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
        error = self._writing.exception() if self._writing is not None else None
        self._writing = None
        if error is None or isinstance(error, ShardwiseError):
            return error
        at = self._shards.path(0).parent
        return LoadError("the export cannot be written", at=str(at), why=f"{type(error).__name__}: {error}"[:300])

    def _dealt(self, groups: Sequence[ExportGroup], writers: Sequence[int]) -> Iterator[tuple[ExportGroup, int]]:
        """Yields every group with its writing rank, in turns. Shards with a common group have one writer."""
        queues: dict[int, list[ExportGroup]] = {rank: [] for rank in writers}
        turns, last, rank = itertools.cycle(writers), -1, writers[0]
        for group in groups:
            numbers = [self._shards.shard_of(name) for name in group.names]
            if min(numbers) > last:
                rank = next(turns)
            last = max(last, *numbers)
            queues[rank].append(group)
        for each in itertools.zip_longest(*queues.values()):
            yield from ((group, rank) for rank, group in zip(queues, each, strict=True) if group is not None)

    def _write(self, group: ExportGroup, state: dict[str, tuple[Tensor, WeightDelta | None]]) -> None:
        made: dict[str, Tensor] = {}
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

    def __enter__(self) -> Export:
        return self

    def __exit__(self, *error: object) -> None:
        self._thread.shutdown()
        self._shards.close()
