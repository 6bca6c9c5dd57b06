"""A step whose logits are made some rows at a time computes what it computes with all of them at once."""

from __future__ import annotations

import copy
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import shardwise
from shardwise.comm.count import CommunicationCount
from shardwise.loss import cross_entropy
from shardwise.loss.logits import DeferredLogits, DeferringHead, apply_deferral
from shardwise.parallel.activation_memory import PeakCount
from shardwise.runtime.context import Axis, SplitContext
from tests.families import rows_of, tiny_batch, tiny_model

pytestmark = pytest.mark.single

CLASSES = 101
CHUNK = 3 * CLASSES


@pytest.fixture
def small_chunks(monkeypatch):
    monkeypatch.setattr(cross_entropy, "CHUNK_ELEMENTS", CHUNK)


def heads(bias=False):
    """The same head as it is, and deferring."""
    torch.manual_seed(0)
    usual, deferring = nn.Linear(8, CLASSES, bias=bias), nn.Linear(8, CLASSES, bias=bias)
    deferring.load_state_dict(usual.state_dict())
    apply_deferral(deferring, SplitContext(drops_output=True))
    return usual, deferring


def shifted(logits, target):
    return F.cross_entropy(logits[..., :-1, :].float().reshape(-1, CLASSES), target[:, 1:].reshape(-1))


def capped(logits, target):
    logits = torch.tanh(logits / 5.0) * 5.0
    return F.cross_entropy(logits.float().view(-1, logits.size(-1)), target.flatten(), reduction="sum") / 7


def smoothed(logits, target):
    loss = nn.CrossEntropyLoss(weight=torch.linspace(0.1, 2, CLASSES), label_smoothing=0.1, reduction="none")
    return loss(logits.flatten(0, 1), target.flatten()).square().mean()


def picked(logits, target):
    return F.cross_entropy(logits[target != -100], target[target != -100])


def made(logits, target):
    """Something computes with them: an auxiliary loss, after they were written to."""
    later = logits.float() * 2.0
    logits[..., 3] = -1.0
    return F.cross_entropy(logits.flatten(0, 1), target.flatten()) + later.logsumexp(-1).mean() + logits.square().mean()


@pytest.mark.parametrize("loss_of", [shifted, capped, smoothed, picked, made])
@pytest.mark.parametrize(("bias", "frozen"), [(True, False), (False, True)])
def test_losses_and_gradients_are_those_with_logits(small_chunks, loss_of, bias, frozen):
    target = torch.randint(0, CLASSES, (3, 7), generator=torch.Generator().manual_seed(1))
    target[1, 2:5] = -100
    found = []
    for head in heads(bias):
        x = torch.randn(3, 7, 8, generator=torch.Generator().manual_seed(2)).requires_grad_()
        head.requires_grad_(not frozen)
        logits = head(x)
        assert isinstance(logits, DeferredLogits) == (len(found) == 1) and logits.shape == (3, 7, CLASSES)
        loss = loss_of(logits, target)
        loss.backward()
        found.append([loss.detach(), x.grad, *(each.grad for each in head.parameters() if not frozen)])
    for expected, actual in zip(*found, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)


def test_logits_are_made_where_somebody_is_given_them_or_they_are_few(small_chunks):
    _, head = heads()
    assert isinstance(head(torch.randn(4, 8)), DeferredLogits)
    assert not isinstance(head(torch.randn(3, 8)), DeferredLogits)
    with torch.no_grad():
        assert not isinstance(head(torch.randn(4, 8)), DeferredLogits)
    head._deferral.drops_output = False
    assert not isinstance(head(torch.randn(4, 8)), DeferredLogits)


class Alive(TorchDispatchMode):
    """The most elements of tensors with so many columns that were alive at a time."""

    def __init__(self, columns):
        super().__init__()
        self.columns, self.most, self._kept = columns, 0, {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for each in out if isinstance(out, tuple | list) else (out,):
            is_new = isinstance(each, torch.Tensor) and each.is_contiguous()  # no transposed weight
            if is_new and each.ndim > 1 and each.shape[-1] == self.columns:
                storage = each.untyped_storage()
                self._kept[storage._cdata] = weakref.ref(each), each.numel()
        self._kept = {key: kept for key, kept in self._kept.items() if kept[0]() is not None}
        self.most = max(self.most, sum(size for _, size in self._kept.values()))
        return out


def train(mesh, family, sp, chunk=None):
    """Three steps; the losses, all gradients of the last one, the most logits alive, and the collectives."""
    model = tiny_model(family, vocab_size=CLASSES, tie_word_embeddings=family == "gemma2")
    batch = tiny_batch(model)
    model = shardwise.parallelize(model, mesh, sequence_parallel=sp).train()
    optimizer = shardwise.build_optimizer(model, torch.optim.AdamW, lr=1e-3, eps=1e-6)
    step = shardwise.TrainStep(model, mesh, num_microbatches=mesh.size("pp"))
    kept, cross_entropy.CHUNK_ELEMENTS = cross_entropy.CHUNK_ELEMENTS, chunk or cross_entropy.CHUNK_ELEMENTS
    columns = Axis.of(mesh, "tp").even_sizes(CLASSES)[mesh.coord("tp")]
    losses = []
    try:
        for _ in range(3):
            optimizer.zero_grad()
            with CommunicationCount() as count, Alive(columns) as alive:
                losses.append(float(step(rows_of(batch, mesh)).loss))
            gradients = shardwise.full_gradients(model)
            optimizer.step()
    finally:
        cross_entropy.CHUNK_ELEMENTS = kept
    return losses, gradients, alive.most, count.calls


def compare(mesh, family, sp):
    usual, chunked = train(mesh, family, sp), train(mesh, family, sp, chunk=CHUNK)
    torch.testing.assert_close(chunked[0], usual[0], rtol=1e-5, atol=1e-5)
    for name, gradient in usual[1].items():
        torch.testing.assert_close(chunked[1][name], gradient, rtol=0, atol=1e-4 * float(gradient.abs().max()) + 1e-6)
    assert chunked[3] == usual[3]
    return usual[2], chunked[2]


@pytest.mark.spawn
@pytest.mark.parametrize(
    ("layout", "family", "sp"),
    [
        ("tp1", "llama", False),
        ("tp2", "gemma2", False),
        ("tp2", "llama", True),
        ("fsdp2", "gemma2", False),
        ("pp2", "llama", False),
        ("fsdp2.tp2", "llama", False),
    ],
)
def test_steps_hold_two_chunks_of_logits_at_most(on_ranks, layout, family, sp):
    found = on_ranks(compare)
    assert all(chunked <= 2 * CHUNK for _, chunked in found), found
    assert any(usual > 4 * CHUNK for usual, _ in found), found


def look_after_a_step(mesh):
    """A step at whose size one rank's part of the logits is larger than a chunk, and the other's not; then a look."""
    model = tiny_model("llama", vocab_size=CLASSES)
    batch = tiny_batch(model)
    model = shardwise.parallelize(model, mesh).train()
    kept, cross_entropy.CHUNK_ELEMENTS = cross_entropy.CHUNK_ELEMENTS, batch["labels"].numel() * (CLASSES // 2)
    try:
        shardwise.TrainStep(model, mesh)(batch)
    finally:
        cross_entropy.CHUNK_ELEMENTS = kept
    return float(model(**batch).logits.detach().sum())


@pytest.mark.spawn
@pytest.mark.parametrize("layout", ["tp2"])
def test_ranks_with_parts_of_other_sizes_decide_alike(on_ranks, layout):
    first, second = on_ranks(look_after_a_step)
    assert first == second


def defers(mesh):
    spec = {"fsdp": shardwise.FsdpPolicy(units=("model.layers.*",))}
    usual, asked = (shardwise.parallelize(tiny_model("llama"), mesh, **options) for options in ({}, spec))
    return [isinstance(model.get_output_embeddings(), DeferringHead) for model in (usual, asked)]


@pytest.mark.spawn
@pytest.mark.parametrize("layout", ["fsdp2"])
def test_a_head_that_may_be_freed_before_the_loss_makes_its_logits(on_ranks, layout):
    assert on_ranks(defers) == [[True, False]] * 2


def test_backward_of_a_trained_head_keeps_no_second_gradient_of_it(monkeypatch):
    """In bfloat16, where sums over chunks are in float32: those of the features, which are few."""
    rows, features, classes = 48, 16, 4096
    monkeypatch.setattr(cross_entropy, "CHUNK_ELEMENTS", classes * rows // 16)
    torch.manual_seed(0)
    usual, deferring = (each.bfloat16() for each in (nn.Linear(features, classes), nn.Linear(features, classes)))
    deferring.load_state_dict(usual.state_dict())
    apply_deferral(deferring, SplitContext(drops_output=True))
    target, found = torch.randint(classes, (rows,)), []
    for head in (usual, deferring):
        hidden = torch.randn(rows, features, generator=torch.Generator().manual_seed(1)).bfloat16().requires_grad_()
        with PeakCount(head) as peak:
            F.cross_entropy(head(hidden).float(), target).backward()
        found.append([hidden.grad, head.weight.grad, head.bias.grad])
    held = 2 * (classes + rows) * features + 2 * classes + 4 * classes  # gradients, and weights of classes
    assert peak.peak_bytes <= held + 2 * 4 * cross_entropy.CHUNK_ELEMENTS + 4 * rows * (features + 16)
    for expected, actual in zip(*found, strict=True):
        torch.testing.assert_close(actual, expected, rtol=2e-2, atol=1e-2 * float(expected.abs().max()))


@pytest.mark.single
def test_losses_and_gradients_are_those_of_float64(monkeypatch):
    monkeypatch.setattr(cross_entropy, "CHUNK_ELEMENTS", 96 * 8)
    model = tiny_model("llama")
    exact, batch = copy.deepcopy(model).double(), tiny_batch(model)
    logits = exact(input_ids=batch["input_ids"]).logits  # transformers computes its losses in float32
    expected = F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())
    expected.backward()
    with shardwise.Mesh.open("tp1", device="cpu") as mesh:
        loss = shardwise.TrainStep(shardwise.parallelize(model, mesh).train(), mesh)(batch).loss
    torch.testing.assert_close(loss.double(), expected, rtol=0, atol=1e-6)
    for (name, found), known in zip(model.named_parameters(), exact.parameters(), strict=True):
        torch.testing.assert_close(found.grad.double(), known.grad, rtol=0, atol=1e-6, msg=name)
