"""Prefetching: copies the next batch to the device while the device computes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from shardwise.data.packing import PackedBatches


class DeviceBatch(dict[str, Any]):
    """A batch on the host, where targets are counted, and its copy on the device.

    Args:
        batch: on the host.
        sent: the copy on the device.
        arrived: event for which the device waits before it uses the copy; None if it was sent on the same stream.
    """

    def __init__(self, batch: Mapping[str, Any], sent: dict[str, Any], arrived: torch.cuda.Event | None) -> None:
        super().__init__(batch)
        self._sent, self._arrived = sent, arrived

    def take(self) -> dict[str, Any]:
        """The device copy, ready for the device's current stream."""
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

    def __iter__(self) -> PrefetchLoader:
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
        """Position of the stream, without prefetched batches."""
        return self._state if self._next is not None else self._batches.state_dict()


def send(value: Any, device: torch.device) -> Any:
    """`value` on `device` if it is a tensor, without blocking the host; else `value`."""
    if not isinstance(value, Tensor):
        return value
    if device.type == "cuda" and value.device.type == "cpu":
        value = value.pin_memory()  # out of other memory a copy waits for the device
    return value.to(device, non_blocking=True)
