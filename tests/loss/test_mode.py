"""Cross-entropy over split logits equals `F.cross_entropy` over whole ones, whatever is asked of it."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor, Shard

import shardwise
from shardwise.loss.head import SplitLossMode
from shardwise.ranks.spawn import spawn
from shardwise.runtime.context import Axis, SplitContext

pytestmark = pytest.mark.spawn


def compare(layout):
    """Every combination of options, on this rank; returns the largest differences of loss and gradient."""
    with shardwise.Mesh.open(layout) as mesh:
        context = SplitContext(tp=Axis.of(mesh, "tp"), mesh=mesh.device_mesh["tp"])
        worst = {}
        for case in itertools.product(
            (5, 99), ("mean", "sum", "none"), (0.0, 0.1), (False, True), (-100, 2), (1.0, 1e4)
        ):
            worst[case] = compare_one(context, *case)
        return worst


def compare_one(context, classes, reduction, label_smoothing, weighted, ignore_index, scale):
    generator = torch.Generator().manual_seed(classes)
    whole = (torch.randn(7, classes, generator=generator) * scale).requires_grad_()
    target = torch.randint(0, classes, (7,), generator=generator)
    target[2] = ignore_index
    weight = torch.rand(classes, generator=generator) + 0.1 if weighted else None
    options = {
        "weight": weight, "ignore_index": ignore_index, "reduction": reduction, "label_smoothing": label_smoothing
    }  # fmt: skip
    expected = F.cross_entropy(whole, target, **options)
    expected.sum().backward()

    sizes = context.tp.even_sizes(classes)
    start = sum(sizes[: context.tp.coord])
    local = whole.detach()[:, start : start + sizes[context.tp.coord]].clone().requires_grad_()
    before = local.detach().clone()
    logits = DTensor.from_local(
        local, context.mesh, [Shard(1)], run_check=False, shape=(7, classes), stride=(classes, 1)
    )
    with SplitLossMode(context):
        loss = F.cross_entropy(logits, target, **options)
    loss.sum().backward()
    assert torch.equal(local.detach(), before), "the caller's logits were changed"
    error = ((loss - expected).detach().abs() / expected.detach().abs().clamp(min=1.0)).max()
    gradient = whole.grad[:, start : start + sizes[context.tp.coord]]
    return float(error), float((local.grad - gradient).abs().max()) if local.numel() else 0.0


@pytest.mark.parametrize("world_size", [2, 4])
def test_every_option_agrees_with_torch(world_size):
    for worst in spawn(compare, world_size, f"tp{world_size}", timeout=100):
        for case, (error, gradient) in worst.items():
            assert error < 1e-6, case
            assert gradient < 1e-6, case


def special_cases(layout):
    with shardwise.Mesh.open(layout) as mesh:
        context = SplitContext(tp=Axis.of(mesh, "tp"), mesh=mesh.device_mesh["tp"])
        results = {}

        def split(values):
            size = -(-values.shape[-1] // 2)
            local = values[..., context.tp.coord * size : (context.tp.coord + 1) * size].clone()
            return DTensor.from_local(
                local,
                context.mesh,
                [Shard(values.ndim - 1)],
                run_check=False,
                shape=values.shape,
                stride=values.stride(),
            )

        values = torch.randn(2, 3, 9)
        target = torch.randint(0, 9, (2, 3))
        with SplitLossMode(context):
            ignored = F.cross_entropy(split(values).view(-1, 9), torch.full((6,), -100))
            results["ignored"] = bool(ignored.isnan())
            module = nn.CrossEntropyLoss()(split(values).view(-1, 9), target.view(-1))
            results["module"] = float(module - F.cross_entropy(values.view(-1, 9), target.view(-1)))
            hidden = values.clone()
            hidden[..., :5] = -torch.inf  # all that one rank has
            masked = F.cross_entropy(split(hidden).view(-1, 9), target.view(-1).clamp(min=5))
            results["masked"] = float(masked - F.cross_entropy(hidden.view(-1, 9), target.view(-1).clamp(min=5)))
            channels = F.cross_entropy(split(values).transpose(1, 2), target, reduction="none")
            expected = F.cross_entropy(values.transpose(1, 2), target, reduction="none")
            results["channels"] = float((channels - expected).abs().max())
            chances = torch.rand(6, 9).softmax(-1)
            soft = F.cross_entropy(split(values).view(-1, 9), chances)
            results["chances"] = float(soft - F.cross_entropy(values.view(-1, 9), chances))
            capped = F.cross_entropy(torch.tanh(split(values) / 3.0).mul(3.0).view(-1, 9), target.view(-1))
            results["capped"] = float(
                capped - F.cross_entropy(torch.tanh(values / 3.0).mul(3.0).view(-1, 9), target.view(-1))
            )
            try:
                F.cross_entropy(split(values).view(-1, 9), torch.full((6,), 9))
            except IndexError as error:
                results["outside"] = str(error)
        return results


def test_shapes_and_inputs_that_heads_really_use():
    for results in spawn(special_cases, 2, "tp2"):
        assert results.pop("ignored"), "the mean over no target is NaN, as torch's is"
        assert "Target 9 is out of bounds" in results.pop("outside")
        assert all(abs(error) < 1e-5 for error in results.values()), results
