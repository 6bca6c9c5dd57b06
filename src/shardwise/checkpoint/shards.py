"""The shards of an export, each written by one rank, which puts together one tensor at a time.

# [Note: who writes which shard]
Shards go round among the ranks that see the directory. A rank that writes one is sent what the others hold of a tensor
in portions, which replicas share, and puts each into place as it comes: it holds one full tensor (those of one group,
where the format makes something else of several) and one portion. It writes them in a thread, while it sends what it
holds of the next tensors to ranks that write theirs; its own next tensor waits until the thread is done.
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

__all__ = ["Export", "ExportSelection"]


WeightDelta = Callable[[Tensor], Tensor]


@dataclass(frozen=True, kw_only=True)
class ExportSelection:
    """What is written of a model with adapters.

    Attributes:
        names: name of each tensor without adapters, to the model's own.
        change: gives, by the model's name of a tensor, what makes the tensor to be written of the full one; all ranks
            ask alike, and the one that writes it calls what it is given. None: tensors are written as they are.
        add: writes what belongs beside the weights into a directory; called on rank 0.
    """

    names: Mapping[str, str]
    change: Callable[[str], WeightDelta] | None = None
    add: Callable[[Path], None] = lambda directory: None


class Export:
    """Puts tensors of a split model together and writes them; a context manager that closes its files.

    Args:
        metas: dtype and shape of every tensor by its name without adapters.
        base: what is written of the model.
        shards: where to.
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
        """Writes everything; all ranks call it alike. Returns what went wrong on this rank: others still expect its
        parts.

        Args:
            groups: of tensors that are made together.
            writers: the ranks that may write.

        Communicates: over all ranks, one message for each portion of a tensor that another rank holds than the one that
            writes it; over pp, one broadcast of each persistent buffer.
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
        """Waits for the thread; returns what went wrong in it, to be raised on every rank afterwards."""
        error = self._writing.exception() if self._writing is not None else None
        self._writing = None
        if error is None or isinstance(error, ShardwiseError):
            return error
        at = self._shards.path(0).parent
        return LoadError("the export cannot be written", at=str(at), why=f"{type(error).__name__}: {error}"[:300])

    def _dealt(self, groups: Sequence[ExportGroup], writers: Sequence[int]) -> Iterator[tuple[ExportGroup, int]]:
        """Every group with the rank that writes it, in turns of these ranks; shards with a common group have one."""
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
        """The full tensor on the rank `target`, in host memory, and how it changes; an empty one elsewhere."""
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
