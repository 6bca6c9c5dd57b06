"""Rows of each rank: ranks of one data rank read the same rows, and all data ranks read equally many batches."""

import functools
import os
import warnings
from collections.abc import Iterator
from typing import Any

from lightning.fabric.utilities.data import sized_len
from lightning.fabric.utilities.seed import pl_worker_init_function
from torch.utils.data import DataLoader, IterableDataset

from shardwise.comm.agree import all_reduce_int
from shardwise.comm.operations import all_gather_objects
from shardwise.errors import BatchError, counted
from shardwise.mesh import Mesh


def seed_workers(loader: DataLoader[Any], mesh: Mesh) -> None:
    """Seeds the loader's workers by data rank if `seed_everything(workers=True)` asks for seeds: ranks that differ only
    in tp or pp must read the same.
    """
    if os.environ.get("PL_SEED_WORKERS", "0") != "0" and loader.worker_init_fn is None:
        loader.worker_init_fn = functools.partial(pl_worker_init_function, rank=mesh.data_rank)


def end_together(loader: Any, mesh: Mesh, *, predicts: bool) -> Any:
    """Makes sure that no data rank waits for batches that another does not have.

    An `IterableDataset` may have another length than it says, so its loader is replaced by a copy that ends on all
    ranks as soon as it ends on one.

    Args:
        predicts: whether leaving batches out is an error.

    Raises:
        BatchError: ranks have different numbers of batches; on every rank alike.

    Communicates: over all ranks, one gather of lengths; for an `IterableDataset` also one all-reduce of a number per
    batch.
    """
    group = mesh.group()
    if mesh.data_size == 1 or group is None:
        return loader
    lengths = all_gather_objects((mesh.data_rank, sized_len(loader)), group)
    if len({length for _, length in lengths}) > 1:
        found = {rank: "an unknown number" if length is None else length for rank, length in lengths}
        raise BatchError(
            "data ranks have different numbers of batches",
            why=", ".join(f"data rank {rank}: {length}" for rank, length in sorted(found.items()))
            + "\nforwards communicate, and some ranks would wait forever",
            fix=f"give each of {mesh.data_size} data ranks as many batches, or use a layout without fsdp and ddp",
        )
    if not isinstance(loader, DataLoader) or not isinstance(loader.dataset, IterableDataset):
        return loader
    own_class = type(loader)
    ended: Any = object.__new__(type(own_class.__name__, (_EndsTogether, own_class), {}))
    ended.__dict__.update(vars(loader), _mesh=mesh, _predicts=predicts)
    return ended


class _EndsTogether:
    """Mixin of a loader whose number of batches is unknown."""

    _mesh: Mesh
    _predicts: bool

    def __iter__(self) -> Iterator[Any]:
        mesh, none, number = self._mesh, object(), 0
        batches = super().__iter__()  # type: ignore[misc]
        while True:
            batch = next(batches, none)
            num_ranks = all_reduce_int(int(batch is not none), mesh.group(), mesh.device)
            if num_ranks < mesh.shape.world_size:
                if num_ranks:
                    self._say_uneven(number)
                return
            yield batch
            number += 1

    def _say_uneven(self, number: int) -> None:
        what = f"a data rank has {counted(number, 'batch')} and another more"
        if self._predicts:
            raise BatchError(
                f"predictions of which {what}",
                why="forwards communicate, so the rank with more cannot predict the rest by itself",
                fix="give every data rank as many batches, or use a layout without fsdp and ddp",
            )
        if self._mesh.rank == 0:
            warnings.warn(f"{what}, which is left out: forwards communicate, so all end together", stacklevel=2)
