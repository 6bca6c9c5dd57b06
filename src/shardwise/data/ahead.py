"""Batches of rows in an order that depends only on the seed; the next one is copied while the device computes."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

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
        return self

    def __next__(self) -> dict[str, torch.Tensor]:
        """The next batch: `input_ids`, `labels` and other inputs of the rows, `batch_size / data_size` rows each."""
        first = self.num_batches_read * self.batch_size
        batch = [self._row(place) for place in range(first, first + self.batch_size)]
        self.num_batches_read += 1
        return self.rows.read(batch[self._share], width=self.rows.width(batch), turn=self.num_batches_read)

    def state_dict(self) -> dict[str, int]:
        """Returns the position of the stream, the same on every rank."""
        return {"num_batches_read": self.num_batches_read, **self._identity()}

    def load_state_dict(self, state: dict[str, int], *, may_differ: bool = False) -> None:
        """Continues where `state` was taken; `data_size` may differ.

        Args:
            may_differ: whether the data may be other than that of `state`: then reading begins at the first batch, or,
                with another batch size alone, behind the rows that were read.
        """
        changed = {key: value for key, value in sorted(self._identity().items()) if state.get(key) != value}
        if changed and not may_differ:
            raise ConfigError(
                "this run was reading other data",
                why="; ".join(f"{key} was {state.get(key)}, is {value}" for key, value in changed.items()),
                fix="resume with the same data, seq_length, batch_size and seed, or start a new run",
            )
        num_rows = state["num_batches_read"] * state.get("batch_size", self.batch_size)
        self.num_batches_read = num_rows // self.batch_size if changed.keys() <= {"batch_size"} else 0

    def _identity(self) -> dict[str, int]:
        return {**self.rows.identity(), "batch_size": self.batch_size, "seed": self.seed}

    def _row(self, place: int) -> int:
        """Returns the row at position `place` of the endless order."""
        epoch, offset = divmod(place, self.num_rows)
        if self._order[0] != epoch:
            self._order = (epoch, np.random.default_rng([self.seed, epoch]).permutation(self.num_rows))
        return int(self._order[1][offset])


class DeviceBatch(dict[str, Any]):
    """A batch on the host, where targets are counted, and its copy on the device.

    Args:
        sent: the copy on the device.
        arrived: event for which the device waits before it uses the copy; None if it was sent on the same stream.
    """

    def __init__(self, batch: Mapping[str, Any], sent: dict[str, Any], arrived: torch.cuda.Event | None) -> None:
        super().__init__(batch)
        self._sent, self._arrived = sent, arrived

    def take(self) -> dict[str, Any]:
        """Returns the device copy, ready for the device's current stream."""
        if self._arrived is not None:
            stream = torch.cuda.current_stream()
            stream.wait_event(self._arrived)
            for value in self._sent.values():
                if isinstance(value, Tensor):
                    value.record_stream(stream)
        return self._sent


class PrefetchLoader:
    """Iterator that prefetches batches to an asynchronous device; on CPUs it passes them through.

    Between steps `fetch` reads the next batch and starts its copy from pinned memory. An error in a batch is raised
    when the batch is due. `state_dict` counts the batches that were returned.
    """

    def __init__(self, batches: PackedBatches, device: torch.device) -> None:
        self._batches, self._device = batches, device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._next: DeviceBatch | Exception | None = None
        self._state: dict[str, int] = {}

    def __iter__(self) -> "PrefetchLoader":
        return self

    def __next__(self) -> dict[str, Any]:
        if self._next is None:
            return next(self._batches)
        found, self._next = self._next, None
        if isinstance(found, Exception):
            raise found
        return found

    def fetch(self) -> None:
        """Reads the next batch and starts to send it, without waiting."""
        if self._stream is None or self._next is not None:
            return
        state = self._batches.state_dict()
        try:
            batch = next(self._batches)
            with torch.cuda.stream(self._stream):
                sent = {name: send(value, self._device) for name, value in batch.items()}
                arrived = torch.cuda.Event()
                arrived.record(self._stream)
        except Exception as error:  # noqa: BLE001 - of the step that would have taken it
            self._next, self._state = error, state
        except BaseException:  # Ctrl-C: what was not handed out is read again
            self._batches.load_state_dict(state)
            raise
        else:
            self._next, self._state = DeviceBatch(batch, sent, arrived), state

    def state_dict(self) -> dict[str, int]:
        """Returns the position of the stream, without prefetched batches."""
        return self._state if self._next is not None else self._batches.state_dict()


def send(value: Any, device: torch.device) -> Any:
    """Returns `value` on `device` if it is a tensor, without blocking the host; else `value`."""
    if not isinstance(value, Tensor):
        return value
    if device.type == "cuda" and value.device.type == "cpu":
        value = value.pin_memory()  # out of other memory a copy waits for the device
    return value.to(device, non_blocking=True)
