"""Every collective of the table in `comm/collectives.py` against plain math, on simulated ranks and over gloo."""

from __future__ import annotations

import contextlib
import functools

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard
from torch.utils._python_dispatch import TorchDispatchMode

import shardwise
from shardwise.comm import collectives
from shardwise.comm.collectives import functional_collectives
from shardwise.comm.count import CommunicationCount
from shardwise.comm.simulated import SimulatedGroup, run_ranks
from shardwise.testing.spawn import spawn

SHAPE = (6, 4, 8)  # divides by two and by four along dim 1 and 2, by two along dim 0


def drawn(seed, shape):
    """What rank `seed` holds; integers, so that sums are exact in any order."""
    return torch.randint(-8, 9, shape, generator=torch.Generator().manual_seed(seed)).float()


def uneven(length, num_ranks):
    """Sizes as a split that does not divide leaves them: the last ranks have less, or nothing."""
    return tuple(len(part) for part in torch.arange(length).tensor_split(num_ranks))


class Expected:
    """What plain math makes of all ranks' inputs and gradients, for one rank."""

    def __init__(self, rank, num_ranks, dim, sizes):
        self.rank, self.num_ranks, self.dim, self.sizes = rank, num_ranks, dim, sizes

    def part(self, x):
        return x.split(self.sizes, self.dim)[self.rank]

    def joined(self, parts):
        return torch.cat(parts, self.dim)

    def copy_to_region(self, inputs, gradients):
        return inputs[self.rank], sum(gradients)

    def reduce_from_region(self, inputs, gradients):
        return sum(inputs), gradients[self.rank]

    def gather_to_region(self, inputs, gradients):
        return self.joined(inputs), self.part(sum(gradients))

    def scatter_from_region(self, inputs, gradients):
        return self.part(sum(inputs)), self.joined(gradients)

    def gather_full(self, inputs, gradients):
        return self.joined(inputs), self.part(gradients[self.rank])

    def split_full(self, inputs, gradients):
        return self.part(inputs[self.rank]), self.joined(gradients)


COUNTS = {  # of collectives, forward and backward
    "copy_to_region": (0, 1),
    "reduce_from_region": (1, 0),
    "gather_to_region": (1, 1),
    "scatter_from_region": (1, 1),
    "gather_full": (1, 0),
    "split_full": (0, 1),
}
TAKES_PARTS = ("gather_to_region", "gather_full")
GIVES_PARTS = ("scatter_from_region", "split_full")
CASES = [
    *(("copy_to_region", None, None), ("reduce_from_region", None, None)),
    *((name, dim, None) for name in ("gather_to_region", "scatter_from_region") for dim in (0, 1, 2, -1, -2)),
    *((name, dim, length) for name in ("gather_full", "split_full") for dim in (0, 1, -1) for length in (7, 3, 1)),
]


def compare(rank, num_ranks, group, count, name, dim, length):
    """Runs one collective forward and backward, and holds it against plain math."""
    shape = [8, *SHAPE[1:]] if dim == 0 else [*SHAPE]
    if length is not None:
        shape[dim] = length
    sizes = None if dim is None else uneven(shape[dim], num_ranks)

    def of_ranks(seed, *, parted):
        shapes = [[*shape] for _ in range(num_ranks)]
        for each, size in zip(shapes, sizes if parted else (), strict=parted):
            each[dim] = size
        return [drawn(seed + rank, each) for rank, each in enumerate(shapes)]

    inputs, gradients = of_ranks(0, parted=name in TAKES_PARTS), of_ranks(100, parted=name in GIVES_PARTS)
    output, gradient = getattr(Expected(rank, num_ranks, dim, sizes), name)(inputs, gradients)
    options = {} if dim is None else {"dim": dim} if length is None else {"dim": dim, "sizes": sizes}
    for transposed in (False, True):
        x = (inputs[rank].mT.contiguous().mT if transposed else inputs[rank].clone()).requires_grad_()
        start = count()
        found = getattr(collectives, name)(x * 1.0, group, **options)  # not of a leaf: a sum may be taken in place
        between = count()
        found.backward(gradients[rank].mT.contiguous().mT if transposed else gradients[rank])
        assert torch.equal(found, output)
        assert torch.equal(x.grad, gradient)
        assert (between - start, count() - between) == COUNTS[name]


def compare_simulated(group, **case):
    compare(group.rank(), group.size(), group, lambda: group.num_exchanges, **case)


def compare_over_gloo(mesh, name, dim, length, values):
    with CommunicationCount() as calls, functional_collectives() if values else contextlib.nullcontext():
        compare(mesh.rank, mesh.size("tp"), mesh.group("tp"), calls.num_calls, name, dim, length)


every_case = pytest.mark.parametrize(("name", "dim", "length"), CASES)


@pytest.mark.single
@every_case
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_on_simulated_ranks(num_ranks, name, dim, length):
    run_ranks(functools.partial(compare_simulated, name=name, dim=dim, length=length), num_ranks)


@pytest.mark.spawn
@pytest.mark.parametrize("values", [False, True], ids=["", "values"])
@every_case
@pytest.mark.parametrize("layout", ["tp2", "tp4"])
def test_over_gloo(on_ranks, layout, name, dim, length, values):
    on_ranks(compare_over_gloo)


@pytest.mark.single
@pytest.mark.parametrize(("name", "dim", "length"), CASES)
def test_one_process_communicates_nothing(name, dim, length):
    x = drawn(0, SHAPE).requires_grad_()
    options = {} if dim is None else {"dim": dim} if length is None else {"dim": dim, "sizes": (SHAPE[dim],)}
    assert getattr(collectives, name)(x, None, **options) is x


@pytest.mark.single
def test_the_gradient_alone_is_scaled():
    x = drawn(0, SHAPE).requires_grad_()
    found = collectives.scale_gradient(x, 0.5)
    found.backward(drawn(1, SHAPE))
    assert torch.equal(found, x)
    assert torch.equal(x.grad, drawn(1, SHAPE) / 2)
    assert collectives.scale_gradient(x, 1.0) is x
    with torch.no_grad():
        assert collectives.scale_gradient(x, 0.5) is x


@pytest.mark.single
def test_what_enters_a_region_without_a_graph_is_not_touched():
    x = drawn(0, SHAPE)
    group, _ = SimulatedGroup.build(2)
    assert collectives.copy_to_region(x, group) is x
    with torch.no_grad():
        assert collectives.copy_to_region(x.requires_grad_(), group) is x


def sum_shared(group):
    """Two consumers of one tensor: the gradient that is summed in place must be nobody else's."""
    x = drawn(group.rank(), SHAPE).requires_grad_()
    gradient = drawn(10 + group.rank(), SHAPE)
    kept = gradient.clone()
    hidden = x * 1.0
    torch.autograd.backward([collectives.copy_to_region(hidden, group), hidden], [gradient, gradient])
    assert torch.equal(gradient, kept)
    assert torch.equal(x.grad, drawn(10, SHAPE) + drawn(11, SHAPE) + gradient)


@pytest.mark.single
def test_a_gradient_that_others_hold_is_summed_in_a_copy():
    run_ranks(sum_shared, 2)


def sum_saved(group):
    hidden = drawn(group.rank(), SHAPE).requires_grad_() * 1.0
    square = hidden**2  # saves what the sum then writes over
    assert collectives.reduce_from_region(hidden, group) is hidden
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        square.sum().backward()


@pytest.mark.single
def test_a_sum_that_writes_over_what_a_backward_needs_is_torchs_error():
    run_ranks(sum_saved, 2)


def write_into(group, name):
    """What a collective puts out belongs to the model, of a batch of one row, too."""
    x, options = drawn(0, [1, 8, 4]).requires_grad_(), {"dim": 1}
    if name in ("gather_full", "split_full"):
        options["sizes"] = (8, 8) if name == "gather_full" else (4, 4)
    found = getattr(collectives, name)(x * 1.0, group, **options)
    found += 1.0
    found.sum().backward()


@pytest.mark.single
@pytest.mark.parametrize("name", ["gather_to_region", "scatter_from_region", "gather_full", "split_full"])
def test_outputs_may_be_written_into(name):
    run_ranks(functools.partial(write_into, name=name), 2)


class CountCopies(TorchDispatchMode):
    """Counts copies of tensors of at least `elements`: smaller ones are gloo's own."""

    def __init__(self, elements):
        super().__init__()
        self.elements, self.number = elements, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        output = func(*args, **(kwargs or {}))
        if func.overloadpacket in (torch.ops.aten.clone, torch.ops.aten.cat, torch.ops.aten.copy_):
            self.number += output.numel() >= self.elements
        return output


def count_copies(mesh, rows):
    """Copies of a full tensor `[rows, 8, 8]` in the forward and in the backward of each collective."""
    copied = {}
    for name, length in (("gather_to_region", 4), ("scatter_from_region", 8), ("gather_full", 4), ("split_full", 8)):
        x = torch.ones(rows, length, 8).requires_grad_()
        options = {"sizes": (4, 4)} if "full" in name else {}
        with CountCopies(rows * 8 * 8) as forward:
            output = getattr(collectives, name)(x, mesh.group("tp"), dim=1, **options)
        with CountCopies(rows * 8 * 8) as backward:
            torch.autograd.grad(output, x, torch.ones_like(output))
        copied[name] = forward.number, backward.number
    return copied


@pytest.mark.spawn
@pytest.mark.parametrize(("rows", "copies"), [(1, 0), (3, 1)])
def test_what_sequence_parallelism_exchanges_is_copied_at_most_once_and_a_single_row_never(on_ranks, rows, copies):
    for copied in on_ranks(count_copies, layout="tp2", rows=rows):
        assert copied == {
            "gather_to_region": (copies, copies),
            "scatter_from_region": (copies, copies),
            "gather_full": (copies, 0),
            "split_full": (0, copies),
        }


def _is_left_where_it_is():
    with shardwise.Mesh.open("ddp2"):
        cards = DeviceMesh("cuda", [0, 1], _init_backend=False)
        offloaded = torch.arange(2.0)
        stored = collectives.stored_dtensor(offloaded, cards, [Shard(0)], (4,))
        return stored.to_local().data_ptr() == offloaded.data_ptr() and stored.shape == (4,)


@pytest.mark.spawn
def test_a_parameter_in_host_memory_stays_there_on_a_mesh_of_cards():
    assert spawn(_is_left_where_it_is, 2) == [True, True]
