"""Linears and embeddings that stand alone compute and learn what torch's own do, on simulated ranks."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from shardwise.comm.simulated import run_ranks
from shardwise.compat.layers.grouped import GroupedProjections
from shardwise.compat.layers.linears import ColumnLinear, RowLinear, StandaloneEmbedding
from shardwise.errors import ConfigError
from shardwise.parameters.canonical import canonical_tensor
from shardwise.parameters.registry import entry_of
from shardwise.probe.trial import SimulatedMesh

pytestmark = pytest.mark.single

SHAPES = {"2-D": (5, 6), "3-D": (3, 5, 6), "4-D": (2, 3, 4, 6)}
DTYPES = {torch.float32: 2e-6, torch.bfloat16: 2e-2}


def draw(shape, *, contiguous=True, dtype=torch.float32):
    values = torch.randn(shape if contiguous else shape[::-1], generator=torch.Generator().manual_seed(1))
    return (values if contiguous else values.permute(*range(len(shape))[::-1])).to(dtype).requires_grad_()


def full(value, parameter, mesh):
    return canonical_tensor(value, entry_of(parameter).layout, mesh)


def on(tp, fn):
    torch.manual_seed(3)
    return run_ranks(lambda group: fn(SimulatedMesh(group)), tp)


def features(pieces):
    return [index for start, stop in pieces for index in range(start, stop)]


def close(found, expected, dtype):
    scale = expected.abs().max().clamp(min=1e-3) if expected.numel() else 1.0
    assert found.dtype == expected.dtype and found.shape == expected.shape
    assert not found.numel() or float((found - expected).abs().max() / scale) <= DTYPES[dtype]


COLUMN = [
    # tp, out features, bias, gathers, sections, shape, contiguous, dtype
    (1, 8, True, True, 1, "3-D", True, torch.float32),
    (2, 8, True, True, 1, "4-D", False, torch.bfloat16),
    (2, 7, False, True, 1, "2-D", False, torch.float32),
    (4, 7, True, True, 1, "3-D", True, torch.float32),
    (4, 3, True, True, 1, "4-D", True, torch.float32),
    (2, 12, True, True, 3, "3-D", False, torch.float32),
    (4, 10, False, True, 2, "2-D", True, torch.bfloat16),
    (4, 8, True, False, 1, "3-D", False, torch.bfloat16),
    (2, 9, True, False, 1, "4-D", True, torch.float32),
    (4, 8, False, False, 2, "3-D", True, torch.float32),
]


@pytest.mark.parametrize(("tp", "size", "bias", "gathers", "sections", "shape", "contiguous", "dtype"), COLUMN)
def test_a_column_split_linear(tp, size, bias, gathers, sections, shape, contiguous, dtype):
    def compute(mesh):
        x = draw(SHAPES[shape], contiguous=contiguous, dtype=dtype)
        module = ColumnLinear(6, size, mesh, bias=bias, gathers=gathers, num_sections=sections, dtype=dtype)
        out = module(x)
        factors = torch.linspace(-1, 1, size)
        if not gathers:
            pieces = module.placements["weight"].pieces[mesh.coord("tp")]
            factors = torch.cat([factors[start:stop] for start, stop in pieces])
        (out.float() * factors).sum().backward()
        own = [full(each, each, mesh) for each in module.parameters()]
        return out.detach(), x.grad, own, [full(each.grad, each, mesh) for each in module.parameters()]

    torch.manual_seed(3)
    reference, x = nn.Linear(6, size, bias=bias, dtype=dtype), draw(SHAPES[shape], contiguous=contiguous, dtype=dtype)
    expected = reference(x)
    (expected.float() * torch.linspace(-1, 1, size)).sum().backward()
    ranks = on(tp, compute)
    for out, gradient, weights, gradients in ranks:
        if gathers:
            close(out, expected.detach(), dtype)
        close(gradient, x.grad, dtype)
        for found, parameter in zip(weights, reference.parameters(), strict=True):
            assert torch.equal(found, parameter), "it starts as torch's own does"
        for found, parameter in zip(gradients, reference.parameters(), strict=True):
            close(found, parameter.grad, dtype)


ROW = [
    # tp, in features, bias, input is split, sections, sequence dim, shape, dtype
    (1, 6, True, False, 1, None, "3-D", torch.float32),
    (2, 6, True, True, 1, None, "4-D", torch.bfloat16),
    (2, 6, False, False, 1, None, "2-D", torch.bfloat16),
    (4, 6, True, False, 1, None, "3-D", torch.float32),
    (4, 6, True, True, 1, 0, "4-D", torch.float32),
    (2, 6, True, False, 3, None, "3-D", torch.float32),
    (2, 6, True, True, 1, 1, "4-D", torch.bfloat16),
]


@pytest.mark.parametrize(("tp", "size", "bias", "is_split", "sections", "dim", "shape", "dtype"), ROW)
def test_a_row_split_linear(tp, size, bias, is_split, sections, dim, shape, dtype):
    shape = (4, 4, 4, 6) if dim is not None else SHAPES[shape]

    def compute(mesh):
        whole = draw(shape, dtype=dtype)
        module = RowLinear(
            size, 8, mesh, bias=bias, input_is_split=is_split, num_sections=sections,
            sequence_dim=dim, dtype=dtype,
        )  # fmt: skip
        pieces = module.placements["weight"].pieces[mesh.coord("tp")]
        x = whole[..., features(pieces)] if is_split else whole
        x = x.detach().requires_grad_()
        out = module(x)
        rows = out if dim is None else out * 1
        (rows.float() * torch.linspace(-1, 1, 8)).sum().backward()
        return out.detach(), x.grad, [full(each.grad, each, mesh) for each in module.parameters()], pieces

    torch.manual_seed(3)
    reference, x = nn.Linear(size, 8, bias=bias, dtype=dtype), draw(shape, dtype=dtype)
    expected = reference(x)
    (expected.float() * torch.linspace(-1, 1, 8)).sum().backward()
    ranks = on(tp, compute)
    outs = [out for out, *_ in ranks]
    if dim is not None:
        close(torch.cat(outs, dim), expected.detach(), dtype)
    for out, gradient, gradients, pieces in ranks:
        if dim is None:
            close(out, expected.detach(), dtype)
        own = x.grad[..., features(pieces)] if is_split else x.grad
        close(gradient, own, dtype)
        close(gradients[0] if len(gradients) == 1 else gradients[-1 if gradients[0].ndim == 1 else 0],
              reference.weight.grad, dtype)  # fmt: skip
    if bias and dim is not None:
        biases = [next(each for each in gradients if each.ndim == 1) for _, _, gradients, _ in ranks]
        close(sum(each.float() for each in biases).to(dtype), reference.bias.grad, dtype)


def test_parts_of_the_sequence_enter_columns_and_leave_rows():
    def compute(mesh):
        whole = draw((8, 3, 6))
        x = whole.chunk(mesh.size("tp"))[mesh.coord("tp")].detach().requires_grad_()
        up = ColumnLinear(6, 10, mesh, sequence_dim=0)
        down = RowLinear(10, 6, mesh, input_is_split=True, sequence_dim=0)
        out = down(F.relu(up(x)))
        (out * torch.linspace(-1, 1, 6)).sum().backward()
        return out.detach(), x.grad, full(up.weight.grad, up.weight, mesh)

    torch.manual_seed(3)
    up, down, x = nn.Linear(6, 10), nn.Linear(10, 6), draw((8, 3, 6))
    expected = down(F.relu(up(x)))
    (expected * torch.linspace(-1, 1, 6)).sum().backward()
    ranks = on(4, compute)
    close(torch.cat([out for out, *_ in ranks]), expected.detach(), torch.float32)
    close(torch.cat([gradient for _, gradient, _ in ranks]), x.grad, torch.float32)
    close(ranks[0][2], up.weight.grad, torch.float32)


@pytest.mark.parametrize(
    ("tp", "size", "by_features", "padding", "dim", "dtype"),
    [
        (1, 11, False, 0, None, torch.float32),
        (2, 11, False, 0, None, torch.float32),  # theirs forgets a padding index of 0
        (4, 11, False, -1, None, torch.bfloat16),
        (4, 3, False, 2, None, torch.float32),
        (2, 11, True, 7, None, torch.float32),
        (4, 11, True, None, None, torch.bfloat16),
        (2, 11, False, None, 0, torch.float32),
        (2, 11, False, 3, 1, torch.float32),
    ],
)
def test_an_embedding(tp, size, by_features, padding, dim, dtype):
    ids = torch.randint(size, (4, 6), generator=torch.Generator().manual_seed(0))

    def compute(mesh):
        module = StandaloneEmbedding(
            size, 6, mesh, by_features=by_features, padding_idx=padding, sequence_dim=dim, dtype=dtype
        )
        out = module(ids)
        (out.float() * torch.linspace(-1, 1, 6)).sum().backward()
        weight = module.weight
        return out.detach(), full(weight, weight, mesh), full(weight.grad, weight, mesh)

    torch.manual_seed(3)
    reference = nn.Embedding(size, 6, padding_idx=padding, dtype=dtype)
    expected = reference(ids.T if dim == 0 else ids)
    (expected.float() * torch.linspace(-1, 1, 6)).sum().backward()
    ranks = on(tp, compute)
    if dim is None:
        assert all(torch.equal(out, expected) for out, *_ in ranks)
    else:
        assert torch.equal(torch.cat([out for out, *_ in ranks], dim), expected)
    for _, weight, gradient in ranks:
        assert torch.equal(weight, reference.weight)
        close(gradient, reference.weight.grad, dtype)


@pytest.mark.parametrize(("fused", "bias", "copies"), [*itertools.product((True, False), (True, False), (1, 2))])
def test_query_key_and_value_with_gathered_outputs(fused, bias, copies):
    def compute(mesh):
        x = draw((3, 6))
        module = GroupedProjections(
            6, (8, 4), mesh, copies=copies, num_heads=4 // copies, fused=fused, bias=bias, gathers=True
        )
        outs = module(x)
        sum((out * torch.linspace(-1, 1, out.shape[-1])).sum() for out in outs).backward()
        return [out.detach() for out in outs], x.grad

    torch.manual_seed(3)
    three, x = [nn.Linear(6, size, bias=bias) for size in (8, 4, 4)], draw((3, 6))
    expected = [each(x) for each in three]
    sum((out * torch.linspace(-1, 1, out.shape[-1])).sum() for out in expected).backward()
    for outs, gradient in on(4, compute):
        for out, other in zip(outs, expected, strict=True):
            close(out, other.detach(), torch.float32)
        close(gradient, x.grad, torch.float32)


def test_full_tensors_are_taken_and_parts_given():
    def compute(mesh):
        module = nn.Sequential(ColumnLinear(6, 7, mesh, gathers=True), RowLinear(7, 6, mesh))
        module.load_state_dict(state)
        parts = module.state_dict()
        module.load_state_dict(parts)
        return [full(each, each, mesh) for each in module.parameters()], [value.shape for value in parts.values()]

    reference = nn.Sequential(nn.Linear(6, 7), nn.Linear(7, 6))
    state = reference.state_dict()
    for values, shapes in on(2, compute):
        expected = {tuple(value.shape): value for value in state.values()}
        assert all(torch.equal(value, expected[tuple(value.shape)]) for value in values)
        assert (4, 6) in map(tuple, shapes) or (3, 6) in map(tuple, shapes)


def test_what_cannot_be_is_an_error():
    def compute(mesh):
        with pytest.raises(ConfigError, match="parts of the sequence"):
            RowLinear(4, 4, mesh, sequence_dim=0)
        with pytest.raises(ConfigError, match="3 copies"):
            GroupedProjections(4, (8, 4), mesh, copies=3)

    on(2, compute)
