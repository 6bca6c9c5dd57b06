"""Clipping and optimizers: no more Python calls than plain torch makes, and no memory beside what they are given."""

from __future__ import annotations

import sys
from collections import Counter

import pytest
import torch
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

import shardwise
from shardwise.api.rehearsal import fake_mesh
from shardwise.optim.gradients import gradients_of
from shardwise.topology.shape import MeshShape
from tests.families import tiny_batch, tiny_model

pytestmark = pytest.mark.single


def count_calls(function):
    """Calls of Python functions."""
    count = 0

    def see(frame, event, argument):
        nonlocal count
        count += event == "call"

    sys.setprofile(see)
    try:
        function()
    finally:
        sys.setprofile(None)
    return count


def peak_bytes(function):
    """The most that was allocated at once, beyond what was there."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as seen:
        function()
    events = [event for event in seen.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    return most


def train(mesh, *, num_steps=2, **options):
    """A model with gradients, and its optimizer after some steps."""
    model = shardwise.parallelize(tiny_model("llama", num_key_value_heads=4, **options), mesh)
    optimizer, step = shardwise.build_optimizer(model, torch.optim.AdamW, lr=1e-3), shardwise.TrainStep(model, mesh)
    for _ in range(num_steps):
        optimizer.zero_grad()
        step(tiny_batch(tiny_model("llama")))
        shardwise.clip_grad_norm_(model, 1.0)
        optimizer.step()
    return model, optimizer


@pytest.fixture(scope="module")
def plain_calls():
    """Those of plain torch's fused AdamW and clipping."""
    model = tiny_model("llama", num_key_value_heads=4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    model(**tiny_batch(model)).loss.backward()
    optimizer.step()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    return count_calls(lambda: (torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0), optimizer.step()))


@pytest.mark.parametrize("layout", ["tp1", "tp2", "fsdp2", "fsdp2.tp2"])
def test_a_step_takes_no_more_calls_than_plain_torchs_and_no_memory(layout, plain_calls):
    with fake_mesh(MeshShape.parse(layout)) as mesh:
        model, optimizer = train(mesh)
        assert all(group["fused"] for group in optimizer.param_groups)
        calls = count_calls(lambda: (shardwise.clip_grad_norm_(model, 1.0), optimizer.step()))
        scalars = 16 * len(list(model.parameters()))
        assert peak_bytes(lambda: shardwise.clip_grad_norm_(model, 1.0)) <= scalars
        assert peak_bytes(optimizer.step) <= scalars
        states = [value for state in optimizer.state.values() for value in state.values() if value.ndim]
        assert len(states) == 2 * len(list(model.parameters()))
        assert {type(value) for value in states} == {DTensor if "fsdp" in layout else torch.Tensor}
    assert calls <= 1.2 * plain_calls


class Launches(TorchDispatchMode):
    """Counts operations that compute: views and allocations are left out."""

    names = ("view", "_unsafe_view", "detach", "split_with_sizes", "slice", "select", "empty", "empty_like", "alias")

    def __init__(self):
        super().__init__()
        self.operations = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket.__name__ not in self.names:
            self.operations.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("layout", ["tp2", "ddp2.tp2"])
def test_the_sums_of_a_step_launch_as_much_for_many_layers_as_for_one(layout):
    def launched(num_layers):
        with fake_mesh(MeshShape.parse(layout)) as mesh:
            whole = tiny_model("qwen3", num_hidden_layers=num_layers)
            model = shardwise.parallelize(whole, mesh, sequence_parallel=True)
            batch = tiny_batch(tiny_model("qwen3"))
            gradients = gradients_of(model)
            with Launches() as seen, gradients.no_sync():
                model(**batch).loss.backward()
                del seen.operations[:]
            return Counter(seen.operations)

    one, many = launched(1), launched(8)
    assert one == many
    assert one.total() <= 10, one


def test_narrow_gradients_are_not_copied():
    torch.manual_seed(0)
    x = torch.nn.Parameter(torch.zeros(64, 2**16, dtype=torch.bfloat16))
    x.grad = torch.randn(x.shape, dtype=torch.bfloat16)
    found, exact = shardwise.clip_grad_norm_(x, float("inf")), x.grad.double().norm()
    assert found.dtype is torch.float32
    assert abs(found / exact - 1) < 1e-5
    assert peak_bytes(lambda: shardwise.clip_grad_norm_(x, 1.0)) < x.numel() / 2  # a copy would be 4 bytes an element
    assert abs(shardwise.clip_grad_norm_(x, float("inf")) - 1.0) < 0.01


def test_parts_of_states_follow_what_is_loaded():
    with fake_mesh(MeshShape.parse("fsdp2")) as mesh:
        model, optimizer = train(mesh, num_steps=1)
        parameter = next(model.parameters())
        fresh = {name: value.clone() for name, value in optimizer.state[parameter].items()}
        optimizer.state[parameter] = fresh  # as a checkpoint does
        shardwise.TrainStep(model, mesh)(tiny_batch(tiny_model("llama")))
        optimizer.step()
        assert optimizer.state[parameter] is fresh and float(fresh["step"]) == 2.0


def test_heads_that_ranks_share_are_not_updated_by_what_rounds_by_place():
    with fake_mesh(MeshShape.parse("tp4")) as mesh:
        model = shardwise.parallelize(tiny_model("llama", num_key_value_heads=2), mesh)
        optimizer = shardwise.build_optimizer(model, torch.optim.AdamW, lr=1e-3)
        assert not any(group["fused"] for group in optimizer.param_groups)


@pytest.mark.parametrize("layout", ["tp2", "fsdp2"])
def test_attributes_of_split_parameters_are_read_without_python(layout):
    with fake_mesh(MeshShape.parse(layout)) as mesh:
        parameters = list(train(mesh)[0].parameters())

        def read():
            for parameter in parameters:
                parameter.grad, parameter.requires_grad, parameter.is_leaf, parameter.dtype  # noqa: B018

        assert count_calls(read) == 1
