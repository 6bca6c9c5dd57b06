"""What is computed of a split model's parameters outside of their modules is right, or refused in words."""

from __future__ import annotations

import copy
import io
import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import parameters_to_vector

import shardwise
from shardwise.errors import UnsupportedError
from shardwise.parameters.registry import local_part
from tests.families import rows_of, tiny_batch, tiny_model
from tests.oracle import differing

pytestmark = pytest.mark.spawn

VALUES = {
    "sum": lambda w: w.sum(),
    "squares": lambda w: w.pow(2).sum(),
    "squares by operator": lambda w: (w**2).sum(),
    "absolute": lambda w: w.abs().sum(),
    "functions": lambda w: torch.sum(torch.abs(w)),
    "norm": lambda w: w.norm(),
    "vector norm": torch.linalg.vector_norm,
    "matrix norm": torch.linalg.matrix_norm,
    "nuclear": lambda w: torch.linalg.norm(w, "nuc"),
    "spectral": torch.linalg.svdvals,
    "norms of rows": lambda w: w.norm(dim=1),
    "norms of columns": lambda w: torch.norm(w, dim=0),
    "mean": lambda w: w.mean(),
    "std": lambda w: w.std(),
    "var": torch.var,
    "max": lambda w: w.max(),
    "min": torch.min,
    "amax": lambda w: w.amax(0),
    "argmax": lambda w: w.argmax(),
    "median": lambda w: w.median(),
    "quantile": lambda w: torch.quantile(w.flatten(), 0.5),
    "sum of columns": lambda w: w.sum(0),
    "sum of rows": lambda w: w.sum(dim=1),
    "mean of columns": lambda w: w.mean(dim=0),
    "prod": lambda w: w.prod(),
    "logsumexp": lambda w: w.logsumexp(0),
    "softmax": lambda w: w.softmax(0),
    "log_softmax": lambda w: F.log_softmax(w, dim=1),
    "normalize": lambda w: F.normalize(w, dim=0),
    "cumsum": lambda w: w.cumsum(0),
    "sort": lambda w: w.flatten().sort().values,
    "topk": lambda w: w.flatten().topk(3).values,
    "orthogonality": lambda w: (w @ w.T - torch.eye(len(w))).pow(2).sum(),
    "gram": lambda w: w.T @ w,
    "mm": lambda w: torch.mm(w.t(), w),
    "einsum": lambda w: torch.einsum("ij,ij->", w, w),
    "dot": lambda w: torch.dot(w.view(-1), w.view(-1)),
    "linear": lambda w: F.linear(torch.ones(2, 64), w),
    "product": lambda w: torch.ones(2, 64) @ w.T,
    "embedding": lambda w: F.embedding(torch.tensor([1, 70]), w),
    "rows by index": lambda w: w[torch.tensor([1, 70])],
    "index_select": lambda w: w.index_select(0, torch.tensor([70])),
    "cosine": lambda w: F.cosine_similarity(w.flatten(), w.flatten(), dim=0),
    "mse": lambda w: F.mse_loss(w, torch.zeros_like(w)),
    "positive": lambda w: (w > 0).float().mean(),
    "nonzero": lambda w: w.count_nonzero(),
    "difference": lambda w: (w - w.clone().mul(2)).abs().max(),
    "data": lambda w: w.data.sum(),
    "detached": lambda w: w.detach().pow(2).sum(),
    "cloned": lambda w: w.clone().sum(),
    "wider": lambda w: w.double().sum(),
    "flat": lambda w: w.view(-1).sum(),
    "vector": lambda w: parameters_to_vector([w]).pow(2).sum(),
    "cat": lambda w: torch.cat([w.flatten(), w.flatten()]).mean(),
    "stack": lambda w: torch.stack([w.sum(), w.abs().sum()]).sum(),
    "stacked norms": lambda w: torch.stack([w.norm(), w.norm()]).norm(),
    "foreach": lambda w: torch.stack(torch._foreach_norm([w])).norm(),
    "total norm": lambda w: torch.nn.utils.get_total_norm([w]),
    "moved": lambda w: torch.lerp(w, torch.zeros_like(w), 0.5).norm(),
    "hist": lambda w: torch.histc(w.detach(), 4),
    "item": lambda w: torch.tensor(w.sum().item()),
    "row": lambda w: w[5],
    "rows": lambda w: w[:3] * 2,
    "rows by list": lambda w: w[[1, 70]],
    "column": lambda w: w[:, 0],
    "element": lambda w: w[5, 5],
    "select": lambda w: w.select(0, 5),
    "narrow": lambda w: w.narrow(0, 2, 3),
    "unbind": lambda w: torch.stack(list(w)),
    "chunk": lambda w: w.chunk(2)[0],
    "split": lambda w: w.split(3)[0],
    "gather": lambda w: w.gather(0, torch.tensor([[5]])),
    "noise": lambda w: w + torch.randn_like(w),
    "gathered": lambda w: _full(w).norm(),
    "gathered data": lambda w: _full(w.data).norm(),
    "gathered, elementwise": lambda w: _full(torch.stack([w, w]) * 2).norm(),
    "dropout": lambda w: F.dropout(w, 0.5),
}
"""Of the head's weight, with gradients and without."""

DRAWS = {
    "normal": nn.init.normal_,
    "uniform": nn.init.uniform_,
    "xavier": nn.init.xavier_uniform_,
    "kaiming": nn.init.kaiming_normal_,
    "trunc": nn.init.trunc_normal_,
    "orthogonal": nn.init.orthogonal_,
    "eye": nn.init.eye_,
    "sparse": lambda w: nn.init.sparse_(w, 0.5),
    "data": lambda w: w.data.normal_(),
    "detached": lambda w: w.detach().uniform_(),
    "row": lambda w: w.data[5].zero_(),
    "assigned row": lambda w: w.data.__setitem__(5, 0.0),
    "assigned rows": lambda w: w.__setitem__(slice(2), 0.0),
    "index_fill_": lambda w: w.index_fill_(0, torch.tensor([5]), 0.0),
    "noise": lambda w: w.add_(torch.randn_like(w)),
}
"""Writes into it."""

KEPT = {
    "zeros": nn.init.zeros_,
    "constant": lambda w: nn.init.constant_(w, 0.5),
    "scale": lambda w: w.mul_(2),
    "decay": lambda w: w.data.mul_(0.9).add_(w.data, alpha=0.1),
    "ema": lambda w: w.lerp_(torch.zeros_like(w), 0.1),
    "elementwise": lambda w: w.copy_(w.sign() * w.abs().clamp(max=0.05) + 1 / (1 + w**2)),
    "where": lambda w: w.copy_(torch.where(w > 0, w, 0.1 * w)),
    "addcmul": lambda w: w.addcmul_(w.clone(), w.detach(), value=0.5),
    "foreach": lambda w: torch._foreach_mul_([w], 0.5),
    "copied": lambda w: w.copy_(copy.deepcopy(w) * 3),
    "mask": lambda w: w.masked_fill_(w > 0.01, 0.0),
    "all of it": lambda w: w.data.__setitem__(slice(None), w[...] * 2),
    "in another form": lambda w: w.data.copy_((w.view(-1) * 2).view_as(w)),
}
"""Element by element: what every part takes as the full one does."""


class Pair:
    def __init__(self, mesh):
        self.mesh = mesh
        self.full = tiny_model("qwen3", num_hidden_layers=1, num_key_value_heads=1)
        self.split = shardwise.parallelize(copy.deepcopy(self.full), mesh)

    def outcome(self, call, *, writes=True, returns=False):
        """`right`, `refused`, or what is wrong: of what `call` makes of each model, and leaves in it."""
        before = shardwise.full_state_dict(self.split) if writes else {}
        torch.manual_seed(0)
        expected = call(self.full)
        torch.manual_seed(0)
        refused = ""
        try:
            found = call(self.split)
            problems = differing("result", _full(found), _full(expected), 1e-4) if not writes or returns else []
        except UnsupportedError:
            refused = "refused"
        except Exception as error:  # noqa: BLE001 - no word of ours
            refused = f"{type(error).__name__}: {error}"[:200]
        after = shardwise.full_state_dict(self.split) if writes else {}
        if refused:
            if writes:
                self.full.load_state_dict(before)
            return refused if all(torch.equal(before[name], after[name]) for name in before) else f"{refused} too late"
        theirs = self.full.state_dict()
        problems += [each for name, x in after.items() for each in differing(name, x, theirs[name], 1e-5)]
        return "; ".join(problems) or "right"


def _full(value):
    return (value.full_tensor() if isinstance(value, DTensor) else value).detach().float()


def _head(call):
    return lambda model: call(model.lm_head.weight)


def values(mesh):
    """Of every call, what became of it with gradients and without."""
    pair = Pair(mesh)
    found = {}
    for gradients in (False, True):
        with torch.set_grad_enabled(gradients):
            for name, call in VALUES.items():
                found[name, gradients] = pair.outcome(_head(call), writes=False)
    return found


def writes(mesh):
    """The same of what writes into a parameter: draws, and what is right part by part."""
    pair = Pair(mesh)
    with torch.no_grad():
        drawn = {name: pair.outcome(_head(call)) for name, call in DRAWS.items()}
        kept = {name: pair.outcome(_head(call)) for name, call in KEPT.items()}
    return drawn, kept


def penalties(mesh):
    """A penalty that is made before the forward, and after it."""
    pair = Pair(mesh)
    batch = rows_of(tiny_batch(pair.full, rows=4, length=9), mesh)
    batch["labels"] = batch["input_ids"].clone()
    for _ in range(2):
        with pytest.raises(UnsupportedError, match="of a part of a parameter, outside of the model"):
            sum(parameter.pow(2).sum() for parameter in pair.split.parameters())
        pair.split(**batch).loss.backward()


def others(mesh):
    """What surrounds parameters and is right as ever: parts of the model that run alone, copies, files, optimizers."""
    pair = Pair(mesh)
    batch = tiny_batch(pair.full, rows=4, length=9)
    assert pair.split.to(torch.float32) is pair.split
    hidden = torch.ones(1, 2, 64)
    unlabelled = {name: value for name, value in batch.items() if name != "labels"}
    cases = {
        "called": lambda model: torch.func.functional_call(model, {}, (), unlabelled).logits,
        "base": lambda model: model.lm_head(model.model(**unlabelled).last_hidden_state),
        "head": lambda model: model.lm_head(hidden),
        "norm": lambda model: model.model.norm(hidden),
    }
    with torch.no_grad():
        found = {name: pair.outcome(case, returns=True) for name, case in cases.items()}
    weight = pair.split.lm_head.weight
    handle = pair.split.model.register_forward_pre_hook(_fail)
    with pytest.raises(RuntimeError, match="in the forward"):
        pair.split(**unlabelled)
    handle.remove()
    with pytest.raises(UnsupportedError, match="of a part of a parameter, outside of the model"):
        weight.pow(2).sum()
    with pytest.raises(UnsupportedError, match="of a part of a parameter, outside of the model"):
        weight.data[5] = -torch.inf  # the vocabulary's, which is another entry's on every rank
    for given in (weight, weight.data, weight.detach().clone()):
        assert isinstance(nn.Parameter(given), nn.Parameter)
    buffer = io.BytesIO()
    torch.save({"detached": weight.detach(), "clone": weight.clone().detach(), "copy": copy.deepcopy(weight)}, buffer)
    buffer.seek(0)
    for value in torch.load(buffer, weights_only=False).values():
        assert type(value) in (torch.Tensor, nn.Parameter, DTensor)
        assert torch.equal(local_part(value), local_part(weight))
    optimizer = torch.optim.AdamW([weight], lr=0.1)
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    assert isinstance(weight, nn.Parameter) and weight.is_leaf and weight.requires_grad
    assert {type(each) for each in optimizer.state[weight].values()} <= {torch.Tensor, DTensor}
    return found


def _restore(weight):
    """As optimizers do that look at gradients elsewhere (SAM)."""
    old = weight.data.clone()
    weight.add_(1.0)
    weight.data = old.mul_(0.5)


ASSIGNED = {
    "scaled": lambda w: setattr(w, "data", w.data * 0.5),
    "zeros": lambda w: setattr(w, "data", torch.zeros_like(w)),
    "restored": _restore,
    "full": lambda w: setattr(w, "data", torch.zeros(96, 64)),
}


def assigned(mesh):
    """What is assigned to `data`, and what the forward makes of it then."""
    pair = Pair(mesh)
    batch = tiny_batch(pair.full, rows=4, length=9)
    with torch.no_grad():
        found = {name: pair.outcome(_head(call)) for name, call in ASSIGNED.items()}
        for model in (pair.split, pair.full):
            model.model.norm.weight.data = model.model.norm.weight.data * 3
        found["norm"] = pair.outcome(lambda model: model(**batch).loss, returns=True)
    return found


def replaced(mesh):
    """Parameters that are put in place of others after the split, before the first step and after it."""
    full = tiny_model("llama")
    batch = rows_of(tiny_batch(full, rows=4), mesh)
    for name, trains in itertools.product(("lm_head", "model.norm"), (False, True)):
        model = shardwise.parallelize(copy.deepcopy(full), mesh)
        step = shardwise.TrainStep(model, mesh)
        if trains:
            step(batch)
        module = model.get_submodule(name)
        module.weight = nn.Parameter(torch.zeros(full.get_submodule(name).weight.shape))
        with pytest.raises(UnsupportedError, match=f"another parameter in place of {name}.weight"):
            step(batch)


def gradients(mesh):
    """Of every call above, what became of it on a gradient."""
    pair = Pair(mesh)
    batch = tiny_batch(pair.full, rows=4, length=9)
    batch["labels"] = batch["input_ids"].clone()
    found = {}
    for table, writes in ((VALUES, False), (DRAWS, True), (KEPT, True)):
        for name, call in table.items():
            for model, rows in ((pair.full, batch), (pair.split, rows_of(batch, mesh))):
                model.zero_grad()
                model(**rows).loss.backward()
            with torch.no_grad():
                found[name, writes] = _of_gradient(pair, call, writes=writes)
    return found


def _of_gradient(pair, call, *, writes):
    torch.manual_seed(0)
    expected = call(pair.full.lm_head.weight.grad)
    torch.manual_seed(0)
    try:
        result = call(pair.split.lm_head.weight.grad)
        if not writes:
            return "; ".join(differing("result", _full(result), _full(expected), 1e-4)) or "right"
    except UnsupportedError:
        return "refused"
    full = shardwise.full_gradients(pair.split)["lm_head.weight"]
    return "; ".join(differing("gradient", full, pair.full.lm_head.weight.grad, 1e-4)) or "right"


def _fail(*_):
    raise RuntimeError("in the forward")


LAYOUTS = ["tp2", "fsdp2", "fsdp2.tp2"]


def _agreed(ranks):
    """What all ranks say; they say the same."""
    first = ranks[0]
    apart = [name for each in ranks for name in (each if isinstance(each, dict) else ()) if each[name] != first[name]]
    assert all(each == first for each in ranks), [(each[name], name) for name in apart for each in ranks]
    return first


def _wrong(found):
    return {name: outcome for name, outcome in found.items() if outcome not in ("right", "refused")}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_values_are_right_or_refused(on_ranks, layout):
    assert not _wrong(_agreed(on_ranks(values, layout=layout)))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_writes_are_right_or_refused(on_ranks, layout):
    drawn, kept = _agreed(on_ranks(writes, layout=layout))
    assert not _wrong(drawn)
    assert set(kept.values()) == {"right"}, kept


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_are_right_or_refused(on_ranks, layout):
    found = _agreed(on_ranks(gradients, layout=layout))
    assert not _wrong(found)
    assert {found[name, True] for name in KEPT} == {"right"}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_penalties_are_refused(on_ranks, layout):
    on_ranks(penalties, layout=layout)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_surrounds_parameters_is_right(on_ranks, layout):
    found = _agreed(on_ranks(others, layout=layout))
    assert set(found.values()) == {"right"}, found


@pytest.mark.parametrize("layout", ["tp2", "fsdp2", "fsdp2.tp2"])
def test_what_is_assigned_is_taken_or_refused(on_ranks, layout):
    found = _agreed(on_ranks(assigned, layout=layout))
    assert {name for name, outcome in found.items() if outcome == "refused"} == {"full"}
    assert not _wrong(found)


@pytest.mark.parametrize("layout", ["fsdp2", "ddp2"])
def test_replaced_parameters_are_refused(on_ranks, layout):
    on_ranks(replaced, layout=layout)
