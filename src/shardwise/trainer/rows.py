"""Rows of data loaders by data rank.

# [Note: uneven ends]
A batch of all data ranks is divided into runs of as many rows for each rank, in order. The last batch may have fewer
rows than that, down to one. Every rank must run as many batches of as many rows, so that the last run is filled up
with copies of the batch's first row. Copies are at the end of the order, where `gather_for_metrics` cuts them off, and
they have no weight in losses. (accelerate fills up with rows of the first batch, which then count twice.)
"""

import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from shardwise.comm.collectives import broadcast_object
from shardwise.errors import UnsupportedError, counted
from shardwise.mesh import Mesh

_KEPT = (
    "collate_fn",
    "generator",
    "in_order",
    "multiprocessing_context",
    "num_workers",
    "persistent_workers",
    "pin_memory",
    "prefetch_factor",
    "timeout",
    "worker_init_fn",
)


class RankBatchSampler(BatchSampler):
    """This data rank's part of every batch of a batch sampler.

    Args:
        batch_sampler: yields lists of indices, equal on all ranks: of this rank's rows, or of all data ranks' rows.
        size: number of data ranks.
        rank: this data rank.
        splits: whether a batch of `batch_sampler` is one of all data ranks.

    Attributes:
        batch_size: rows of one rank's full batch.
        num_rows: rows of all data ranks in the last batch that was yielded, without those that fill it up.
    """

    def __init__(self, batch_sampler: Any, size: int, rank: int, *, splits: bool) -> None:
        self.batch_sampler = batch_sampler
        self.size, self.rank, self.splits = size, rank, splits
        self.drop_last = getattr(batch_sampler, "drop_last", False)
        given = getattr(batch_sampler, "batch_size", None)
        if given is None or (splits and given % size):
            raise UnsupportedError(
                f"batches of {given} rows" if given else f"{type(batch_sampler).__name__}, which has no batch_size",
                why=f"every batch is divided over {counted(size, 'data rank')}",
                fix=f"use a batch size that divides by {size}" if given else "give it one",
            )
        self.batch_size = given // size if splits else given
        self.num_rows: int | None = None

    @property
    def sampler(self) -> Any:
        """The sampler of the batch sampler, which accelerate replaces and sets the epoch of."""
        return getattr(self.batch_sampler, "sampler", None)

    @sampler.setter
    def sampler(self, sampler: Any) -> None:
        self.batch_sampler.sampler = sampler

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch of the batch sampler, if it has one."""
        if hasattr(self.batch_sampler, "set_epoch"):
            self.batch_sampler.set_epoch(epoch)

    def __len__(self) -> int:
        length = len(self.batch_sampler)
        if self.splits:
            return length
        return length // self.size if self.drop_last else math.ceil(length / self.size)

    def __iter__(self) -> Iterator[list[int]]:
        together = 1 if self.splits else self.size
        pending: list[list[int]] = []
        self.num_rows = None
        for batch in self.batch_sampler:
            pending.append(list(batch))
            if len(pending) == together:
                yield self._own(pending)
                pending = []
        if pending and not self.drop_last:
            yield self._own(pending)

    def _own(self, batches: list[list[int]]) -> list[int]:
        """Returns this rank's rows of a batch of all data ranks, filled up."""
        if self.num_rows is not None and self.num_rows % self.size:
            raise UnsupportedError(
                f"a batch of {self.num_rows} rows for {counted(self.size, 'data rank')} that is not the last",
                why="only the last batch of an epoch may be filled up",
                fix=f"use a batch sampler whose other batches divide by {self.size}",
            )
        rows = [row for batch in batches for row in batch]
        self.num_rows = len(rows)
        return own_part(rows, self.size, self.rank)


class RankIterable(IterableDataset[Any]):
    """This data rank's rows of an iterable dataset, which every rank reads whole.

    Args:
        dataset: yields the same rows on every rank.
        batch_size: rows of one rank's batch.
    """

    def __init__(self, dataset: Any, batch_size: int, size: int, rank: int, *, drop_last: bool) -> None:
        self.dataset, self.batch_size = dataset, batch_size
        self.size, self.rank, self.drop_last = size, rank, drop_last
        self.num_rows: int | None = None

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch of the dataset, if it has one."""
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)

    def __len__(self) -> int:
        full = self.batch_size * self.size
        number = len(self.dataset) / full
        return (math.floor(number) if self.drop_last else math.ceil(number)) * self.batch_size

    def __iter__(self) -> Iterator[Any]:
        pending: list[Any] = []
        for row in self.dataset:
            pending.append(row)
            if len(pending) == self.batch_size * self.size:
                self.num_rows = len(pending)
                yield from own_part(pending, self.size, self.rank)
                pending = []
        if pending and not self.drop_last:
            self.num_rows = len(pending)
            yield from own_part(pending, self.size, self.rank)


def deal_rows(loader: Any, mesh: Mesh, *, splits: bool) -> Any:
    """Returns a loader of this data rank's rows, the same on ranks that differ only in tp or pp.

    Args:
        loader: a `DataLoader` that is the same on every rank. Samplers without a generator get one of rank 0's seed.
        splits: whether a batch of `loader` is one of all data ranks, or one of this rank.

    Communicates: a broadcast of a seed over all ranks.
    """
    seed = broadcast_object(int(torch.empty((), dtype=torch.int64).random_()), mesh.group())
    is_batched = isinstance(loader.sampler, BatchSampler)  # the dataset is asked for whole batches
    batches = loader.sampler if is_batched else loader.batch_sampler
    sampler: Any = getattr(batches, "sampler", None)
    if getattr(sampler, "generator", loader) is None:
        sampler.generator = torch.Generator().manual_seed(seed)
    if mesh.data_size == 1:
        return loader
    options = {name: getattr(loader, name) for name in _KEPT}
    if isinstance(seeds := loader.worker_init_fn, partial) and "rank" in seeds.keywords:  # transformers' seed_worker
        options["worker_init_fn"] = partial(seeds.func, *seeds.args, **{**seeds.keywords, "rank": mesh.data_rank})
    size, rank = mesh.data_size, mesh.data_rank
    if isinstance(loader.dataset, IterableDataset):
        each = loader.batch_size // size if splits else loader.batch_size
        dealt = RankIterable(loader.dataset, each, size, rank, drop_last=loader.drop_last)
        return DataLoader(dealt, batch_size=each, drop_last=loader.drop_last, **options)
    own = RankBatchSampler(batches, size, rank, splits=splits)
    how: dict[str, Any] = {"sampler": own, "batch_size": None} if is_batched else {"batch_sampler": own}
    return DataLoader(loader.dataset, **how, **options)


def rows_of_last_batch(loader: Any) -> int | None:
    """Returns the rows of all data ranks in the last batch of a dealt loader, without copies; None if not known."""
    found = loader
    while found is not None and not isinstance(found, RankBatchSampler):
        if isinstance(getattr(found, "dataset", None), RankIterable):
            return found.dataset.num_rows
        inner = getattr(found, "batch_sampler", None)
        sampler = getattr(found, "sampler", None)
        found = sampler if isinstance(sampler, RankBatchSampler) else inner
    return None if found is None else found.num_rows


def own_part(rows: list[Any], size: int, rank: int) -> list[Any]:
    """Returns the `rank`-th of `size` equal runs of rows, the last ones filled up with the first row."""
    each = math.ceil(len(rows) / size)
    own = rows[rank * each : (rank + 1) * each]
    return own + [rows[0]] * (each - len(own))


def num_own_rows(num_rows: int, size: int, rank: int) -> int:
    """Returns how many of the rows that `own_part` returns are not copies."""
    each = math.ceil(num_rows / size)
    return max(0, min(each, num_rows - rank * each))
