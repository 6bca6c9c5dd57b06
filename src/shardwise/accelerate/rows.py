"""Rows of data loaders by data rank.

# [Note: uneven ends]
A batch of all data ranks is divided into runs of as many rows for each rank, in order. The last batch may have fewer
rows than that, down to one. Then the last ranks have fewer rows. Every rank runs as many batches: a rank without rows
gets a copy of the batch's first row, which has no weight. Where every rank must hold as many rows, copies fill up all
parts: in pipelines, whose microbatches divide rows, and in loops of one's own, which call `gather`. Copies have no
targets, and are cut off where rows are gathered. (accelerate fills up with rows of the first batch, which then count
twice.)
"""

import math
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from shardwise.comm.collectives import broadcast_object
from shardwise.data.batch import IGNORED, counts_rows, drop_targets, is_medium
from shardwise.errors import UnsupportedError, counted
from shardwise.mesh import Mesh
from shardwise.runtime.adapter_facts import find_model

_ROWS = "shardwise_rows"  # item of a batch
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


class Rows(NamedTuple):
    """The rows of a batch of all data ranks.

    Attributes:
        counts: the number of rows of each data rank, without copies.
        rank: this data rank.
        fills: whether copies fill every part up to the largest.
    """

    counts: tuple[int, ...]
    rank: int
    fills: bool

    @property
    def own(self) -> int:
        """Number of this rank's rows, without copies."""
        return self.counts[self.rank]

    @property
    def held(self) -> int:
        """Number of this rank's rows, with copies."""
        return max(self.counts) if self.fills else max(self.own, 1)

    @property
    def is_uneven(self) -> bool:
        """Whether a rank has fewer rows than another."""
        return len({*self.counts}) > 1

    @property
    def has_partial_copies(self) -> bool:
        """Whether a rank holds rows and copies."""
        return self.fills and any(0 < count < self.held for count in self.counts)


class Dealer(NamedTuple):
    """How batches of all data ranks are divided.

    Attributes:
        size: number of data ranks.
        rank: this data rank.
        batch_size: rows of one rank's full batch.
        fills: see `Rows`.
    """

    size: int
    rank: int
    batch_size: int
    fills: bool

    def deal(self, rows: list[Any]) -> tuple[list[Any], Rows | None]:
        """Returns this rank's run of the rows, with copies, and the numbers of all ranks' rows; None if full."""
        each = math.ceil(len(rows) / self.size)
        counts = tuple(max(0, min(each, len(rows) - rank * each)) for rank in range(self.size))
        dealt = Rows(counts, self.rank, self.fills)
        own = rows[self.rank * each : (self.rank + 1) * each]
        own += [rows[0]] * (dealt.held - len(own))
        return own, None if len(rows) == self.size * self.batch_size else dealt


class RankBatchSampler(BatchSampler):
    """This data rank's part of every batch of a batch sampler.

    Args:
        batch_sampler: yields lists of indices, equal on all ranks: of this rank's rows, or of all data ranks' rows.
        size: number of data ranks.
        rank: this data rank.
        splits: whether a batch of `batch_sampler` is one of all data ranks.
        fills: see `Rows`.

    Attributes:
        batch_size: rows of one rank's full batch.
        rows: of the last batch that was yielded; None if it was full.
    """

    def __init__(self, batch_sampler: Any, size: int, rank: int, *, splits: bool, fills: bool) -> None:
        self.batch_sampler, self.size, self.splits = batch_sampler, size, splits
        self.drop_last = getattr(batch_sampler, "drop_last", False)
        given = getattr(batch_sampler, "batch_size", None)
        self.batch_size = _rows_of_rank(given, size, splits=splits)
        self.dealer = Dealer(size, rank, self.batch_size, fills)
        self.rows: Rows | None = None

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
        self.rows = None
        for batch in self.batch_sampler:
            pending.append(list(batch))
            if len(pending) == together:
                yield self._own(pending)
                pending = []
        if pending and not self.drop_last:
            yield self._own(pending)

    def _own(self, batches: list[list[int]]) -> list[int]:
        """Returns this rank's rows of a batch of all data ranks."""
        if self.rows is not None and self.rows.is_uneven:
            raise UnsupportedError(
                f"a batch of {sum(self.rows.counts)} rows for {counted(self.size, 'data rank')} that is not the last",
                why="only in the last batch of an epoch may ranks have fewer rows",
                fix=f"use a batch sampler whose other batches divide by {self.size}",
            )
        own, self.rows = self.dealer.deal([row for batch in batches for row in batch])
        return own


def _rows_of_rank(batch_size: int | None, size: int, *, splits: bool) -> int:
    """Returns the rows of one rank's full batch; see `RankBatchSampler`."""
    if batch_size is None or (splits and batch_size % size):
        raise UnsupportedError(
            "batches of no batch_size" if batch_size is None else f"batches of {batch_size} rows",
            why=f"every batch is divided over {counted(size, 'data rank')}",
            fix="give the loader or its batch sampler one" if batch_size is None else f"use a multiple of {size}",
        )
    return batch_size // size if splits else batch_size


class RankIterable(IterableDataset[Any]):
    """This data rank's rows of an iterable dataset, which every rank reads whole.

    Args:
        dataset: yields the same rows on every rank.

    Yields:
        A row, and the `Rows` of its batch; None if it is full. A worker's batches end where the process that reads them
            cannot know.
    """

    def __init__(self, dataset: Any, dealer: Dealer, *, drop_last: bool) -> None:
        self.dataset, self.dealer, self.drop_last = dataset, dealer, drop_last

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch of the dataset, if it has one."""
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)

    def __len__(self) -> int:
        number = len(self.dataset) / (self.dealer.batch_size * self.dealer.size)
        return (math.floor(number) if self.drop_last else math.ceil(number)) * self.dealer.batch_size

    def __iter__(self) -> Iterator[tuple[Any, Rows | None]]:
        source = iter(self.dataset)
        full = self.dealer.batch_size * self.dealer.size
        while (rows := [*islice(source, full)]) and (len(rows) == full or not self.drop_last):
            own, dealt = self.dealer.deal(rows)
            yield from ((row, dealt) for row in own)


def _collate(collate: Callable[[list[Any]], Any], pairs: list[tuple[Any, Rows | None]]) -> Any:
    """Returns the batch of rows with their `Rows`, which `take_rows` takes out."""
    batch = collate([row for row, _ in pairs])
    if isinstance(batch, MutableMapping):
        batch[_ROWS] = pairs[0][1]
    return batch


def take_rows(batch: Any) -> Rows | None:
    """Takes the `Rows` of a batch of an iterable dataset out of it. Returns None for other batches."""
    return batch.pop(_ROWS, None) if isinstance(batch, MutableMapping) else None


def deal_rows(loader: Any, mesh: Mesh, *, splits: bool, fills: bool) -> Any:
    """Returns a loader of this data rank's rows, the same on ranks that differ only in tp or pp.

    Args:
        loader: a `DataLoader` that is the same on every rank. Samplers without a generator get one of rank 0's seed.
        splits: whether a batch of `loader` is one of all data ranks, or one of this rank.
        fills: see `Rows`.

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
        each = _rows_of_rank(loader.batch_size, size, splits=splits)
        dealt = RankIterable(loader.dataset, Dealer(size, rank, each, fills), drop_last=loader.drop_last)
        options["collate_fn"] = partial(_collate, loader.collate_fn)
        return DataLoader(dealt, batch_size=each, drop_last=loader.drop_last, **options)
    own = RankBatchSampler(batches, size, rank, splits=splits, fills=fills)
    how: dict[str, Any] = {"sampler": own, "batch_size": None} if is_batched else {"batch_sampler": own}
    return DataLoader(loader.dataset, **how, **options)


def rows_of_last_batch(loader: Any) -> Rows | None:
    """Returns the rows of the last batch of a dealt loader of a map-style dataset; None for others."""
    found = loader
    while found is not None and not isinstance(found, RankBatchSampler):
        inner = getattr(found, "batch_sampler", None)
        found = getattr(found, "sampler", None) if inner is None else inner
    return None if found is None else found.rows


def num_rows(batch: Mapping[str, Any]) -> int:
    """Returns the rows of a batch: the first dim of its first tensor that is no image or sound; 0 without tensors."""
    sizes = {name: value.shape[0] for name, value in batch.items() if isinstance(value, Tensor) and value.ndim}
    return next((size for name, size in sizes.items() if not is_medium(name)), next(iter(sizes.values()), 0))


def without_copies(batch: Any, rows: Rows | None, model: nn.Module | None) -> Any:
    """Returns a batch whose copies of rows have no targets.

    Args:
        rows: of the batch; None if it has no copies.
        model: whose loss is computed of the batch; None if none is.

    Raises:
        UnsupportedError: copies would count; on every rank.
    """
    if rows is None or not rows.is_uneven or not isinstance(batch, Mapping):
        return batch
    labels = batch.get("labels")
    is_float = isinstance(labels, Tensor) and labels.is_floating_point()
    is_number = is_float or (labels is not None and model is not None and counts_rows(find_model(model)))
    if rows.has_partial_copies and num_rows(batch) != rows.held:
        raise _refuse_copies(rows, "which the collator joins")
    if rows.has_partial_copies and model is not None and is_number:
        raise _refuse_copies(rows, "with numbers as labels")
    if rows.own > 0:
        return drop_targets(batch, rows.own) if rows.fills else batch
    dropped = drop_targets(batch, 0)
    if isinstance(labels, Tensor) and is_float:
        dropped["labels"] = torch.full_like(labels, IGNORED)  # which transformers does not count
    return dropped


def _refuse_copies(rows: Rows, what: str) -> UnsupportedError:
    """Returns the error for a batch in which copies would count."""
    return UnsupportedError(
        f"a last batch of {sum(rows.counts)} rows for {len(rows.counts)} data ranks, {what}",
        why="copies of rows fill it up, and would count in the loss",
        fix="drop the last batch (drop_last=True, dataloader_drop_last=True), or use a number of rows that divides",
    )
