"""Batches of rows for every data rank, in an order that depends only on the seed."""

from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray

from shardwise.data.rows import Rows
from shardwise.errors import ConfigError, counted


class PackedBatches:
    """Endless stream of batches of rows; each data rank gets its share of every global batch.

    Each epoch shuffles the rows by the seed and the number of the epoch. Global batch `i` holds rows `i * batch_size`
    to `(i + 1) * batch_size` of that order, whatever `data_size` is, and the rank at `data_rank` takes a contiguous
    share. So ranks that differ only in tp or pp read the same rows, and a resumed run, or one on another layout, sees
    the same batches.

    Args:
        batch_size: rows in a global batch.
        data_rank: index of this rank's share (`mesh.data_rank`).

    Raises:
        ConfigError: `batch_size` is not divisible by `data_size`, or `data_rank` is out of range.
    """

    def __init__(self, rows: Rows, *, batch_size: int, data_rank: int = 0, data_size: int = 1, seed: int = 0) -> None:
        if batch_size % data_size or not 0 <= data_rank < data_size:
            raise ConfigError(
                f"a batch of {counted(batch_size, 'row')} has no share for data rank {data_rank} of {data_size}",
                why="every data-parallel rank takes the same number of rows",
                fix=f"use a batch_size that is a multiple of {data_size}",
            )
        self.rows = rows
        self.num_rows = rows.num_rows
        self.batch_size = batch_size
        self.seed = seed
        self.num_batches_read = 0
        self._share = slice(data_rank * (batch_size // data_size), (data_rank + 1) * (batch_size // data_size))
        self._order: tuple[int, NDArray[np.int64]] = (-1, np.empty(0, np.int64))

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        while True:
            yield next(self)

    def __next__(self) -> dict[str, torch.Tensor]:
        """The next batch: `input_ids`, `labels` and other inputs of the rows, `batch_size / data_size` rows each."""
        first = self.num_batches_read * self.batch_size
        batch = [self._row(place) for place in range(first, first + self.batch_size)]
        self.num_batches_read += 1
        return self.rows.read(batch[self._share], batch=batch)

    def state_dict(self) -> dict[str, int]:
        """Position of the stream, the same on every rank."""
        return {"num_batches_read": self.num_batches_read, **self._identity()}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continues where `state` was taken; `data_size` may differ.

        Raises:
            ConfigError: the state belongs to other rows or another seed.
        """
        here = self._identity()
        changed = [
            f"{key} was {state.get(key)}, is {value}" for key, value in sorted(here.items()) if state.get(key) != value
        ]
        if changed:
            raise ConfigError(
                "this run was reading other data",
                why="; ".join(changed),
                fix="resume with the same data, seq_length, batch_size and seed, or start a new run",
            )
        self.num_batches_read = state["num_batches_read"]

    def _identity(self) -> dict[str, int]:
        return {**self.rows.identity(), "batch_size": self.batch_size, "seed": self.seed}

    def _row(self, place: int) -> int:
        """The row at position `place` of the endless order."""
        epoch, offset = divmod(place, self.num_rows)
        if self._order[0] != epoch:
            self._order = (epoch, np.random.default_rng([self.seed, epoch]).permutation(self.num_rows))
        return int(self._order[1][offset])
