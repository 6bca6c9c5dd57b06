"""Batches that are fetched before their step: in order, counted when they are handed out, no error before its turn."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch

from shardwise.data import ahead
from shardwise.data.ahead import DeviceBatch, PrefetchLoader

pytestmark = pytest.mark.single


class Batches:
    """Three batches, the fourth of which cannot be read."""

    def __init__(self):
        self.num_batches_read = 0

    def __next__(self):
        if self.num_batches_read == 3:
            raise OSError("the file is gone")
        self.num_batches_read += 1
        return {"input_ids": torch.tensor([self.num_batches_read]), "name": "text"}

    def state_dict(self):
        return {"num_batches_read": self.num_batches_read}

    def load_state_dict(self, state):
        self.num_batches_read = state["num_batches_read"]


class Queue:
    """A stream or an event of a card that is not there; notes who waited."""

    def __init__(self, *args):
        self.waited = []

    def record(self, stream):
        pass

    def wait_event(self, event):
        self.waited.append(event)


@pytest.fixture
def card(monkeypatch):
    """torch pretends to have one; tensors on it stay on the host."""
    current, used = Queue(), []
    for name in ("Stream", "Event"):
        monkeypatch.setattr(torch.cuda, name, Queue)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: current)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda self, stream: used.append(int(self)))
    monkeypatch.setattr(ahead, "send", lambda value, device: value + 10 if isinstance(value, torch.Tensor) else value)
    return current, used


def test_batches_come_in_order_and_are_counted_when_they_are_handed_out(card):
    current, used = card
    batches = PrefetchLoader(Batches(), torch.device("cuda", 0))
    assert next(batches)["input_ids"] == 1
    for number in (2, 3):
        batches.fetch()
        batches.fetch()
        assert batches.state_dict() == {"num_batches_read": number - 1}
        batch = next(batches)
        assert batches.state_dict() == {"num_batches_read": number}
        assert isinstance(batch, DeviceBatch) and batch["input_ids"] == number
        assert not current.waited and not used
        assert batch.take() == {"input_ids": torch.tensor([number + 10]), "name": "text"}
        assert len(current.waited) == 1 and used == [number + 10]
        current.waited.clear(), used.clear()
    batches.fetch()
    assert batches.state_dict() == {"num_batches_read": 3}
    with pytest.raises(OSError, match="gone"):
        next(batches)


def test_a_batch_on_whose_way_there_was_an_interrupt_is_read_again(card, monkeypatch):
    def interrupt(value, device):
        raise KeyboardInterrupt

    batches = PrefetchLoader(Batches(), torch.device("cuda", 0))
    with monkeypatch.context() as patched:
        patched.setattr(ahead, "send", interrupt)
        with pytest.raises(KeyboardInterrupt):
            batches.fetch()
    assert batches.state_dict() == {"num_batches_read": 0} and next(batches)["input_ids"] == 1


def test_on_a_cpu_nothing_is_fetched():
    batches = PrefetchLoader(Batches(), torch.device("cpu"))
    batches.fetch()
    assert batches.state_dict() == {"num_batches_read": 0}
    assert type(next(batches)) is dict
