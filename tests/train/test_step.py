"""`TrainStep`: microbatches, accumulation, batches with nothing to learn, and loops written by hand."""

from __future__ import annotations

import copy

import pytest
import torch

import shardwise
from shardwise.errors import UnsupportedError
from tests.families import tiny_batch, tiny_model
from tests.oracle import differing, differing_gradients

pytestmark = pytest.mark.spawn

ROWS = 4


def whole_model():
    """Replicated key/value heads at tp2, so that every kind of gradient is there."""
    return tiny_model("qwen3", num_hidden_layers=1, num_key_value_heads=1)


def uneven_batch(model, seed=0):
    """Every row has another number of targets, one row none."""
    batch = tiny_batch(model, rows=ROWS, length=9, seed=seed)
    for row, ignored in enumerate((0, 3, 9, 6)):
        batch["labels"][row, :ignored] = -100
    return batch


def whole_gradients(model, *batches):
    reference = copy.deepcopy(model)
    for batch in batches:
        reference(**batch).loss.backward()
    return {name: value.grad for name, value in reference.named_parameters()}


def microbatches(whole, split, mesh):
    batch = uneven_batch(whole)
    expected = whole_gradients(whole, batch)
    with torch.no_grad():
        loss = whole(**batch).loss
    targets = int((batch["labels"][:, 1:] != -100).sum())
    found = {}
    for count in (1, 2, 4):
        result = shardwise.TrainStep(split, mesh, num_microbatches=count)(batch)
        problems = differing("loss", result.loss, loss, 1e-5)
        if (result.loss.dtype, result.loss.shape, result.loss.requires_grad) != (torch.float32, (), False):
            problems.append(f"the loss is {result.loss!r}")
        if result.num_tokens != targets:
            problems.append(f"{result.num_tokens} tokens, not {targets}")
        found[f"{count} microbatches"] = problems + differing_gradients(shardwise.full_gradients(split), expected)
        split.zero_grad()
    return found


def accumulation(whole, split, mesh):
    first, second = uneven_batch(whole, seed=1), uneven_batch(whole, seed=2)
    expected = whole_gradients(whole, first, second)
    step = shardwise.TrainStep(split, mesh, num_microbatches=2)
    step(first)
    step(second)
    found = {"two steps": differing_gradients(shardwise.full_gradients(split), expected)}
    split.zero_grad()
    for batch in (first, second):
        split(**batch).loss.backward()
    found["two backwards by hand"] = differing_gradients(shardwise.full_gradients(split), expected)
    split.zero_grad()
    split(**first).loss.backward()
    between = differing_gradients(shardwise.full_gradients(split), whole_gradients(whole, first))
    step(second)
    shardwise.clip_grad_norm_(split, float("inf"))
    split(**first).loss.backward()
    twice = {name: gradient + whole_gradients(whole, first)[name] for name, gradient in expected.items()}
    found["read in between"] = between + differing_gradients(shardwise.full_gradients(split), twice)
    split.zero_grad()
    return found


def nothing_to_learn(whole, split, mesh):
    empty = tiny_batch(whole)
    empty["labels"][:] = -100
    step = shardwise.TrainStep(split, mesh, num_microbatches=2)
    result = step(empty)
    found = {"no gradients yet": [] if not shardwise.full_gradients(split) else ["there are gradients"]}
    if (float(result.loss), result.num_tokens) != (0.0, 0):
        found["no gradients yet"].append(f"{result}")
    batch = uneven_batch(whole)
    step(batch)
    step(empty)
    found["gradients before"] = differing_gradients(shardwise.full_gradients(split), whole_gradients(whole, batch))
    split.zero_grad()
    return found


def a_fault_on_the_way(whole, split, mesh):
    """A batch that cannot be computed leaves the gradients accumulated before it as they were."""
    batch = uneven_batch(whole)
    step = shardwise.TrainStep(split, mesh)
    step(batch)
    with pytest.raises(IndexError):
        step(batch | {"input_ids": batch["input_ids"] + whole.config.vocab_size})
    found = {"kept": differing_gradients(shardwise.full_gradients(split), whole_gradients(whole, batch))}
    step(batch)
    found["goes on"] = differing_gradients(shardwise.full_gradients(split), whole_gradients(whole, batch, batch))
    split.zero_grad()
    return found


def copied(whole, split, mesh):
    """A copy of a split model is a split model of its own."""
    tiny = copy.deepcopy(split)
    batch = uneven_batch(whole)
    tiny(**batch).loss.backward()
    split(**batch).loss.backward()
    expected = whole_gradients(whole, batch)
    found = {"copy": differing_gradients(shardwise.full_gradients(tiny), expected)}
    found["original"] = differing_gradients(shardwise.full_gradients(split), expected)
    state, expected = shardwise.full_state_dict(tiny), whole.state_dict()
    found["state"] = [name for name in expected if not torch.equal(state[name], expected[name])]
    split.zero_grad()
    return found


def optimizers(whole, split, mesh):
    """A loop written by hand, with an optimizer from `build_optimizer`, moves the parameters as torch does."""
    batch = uneven_batch(whole)
    found = {}
    start = copy.deepcopy(whole.state_dict())
    for kind, options in (
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
        (torch.optim.AdamW, {"lr": 1e-3, "eps": 1e-6}),
    ):
        split.load_state_dict(start)
        reference = copy.deepcopy(whole)
        theirs, ours = kind(reference.parameters(), **options), shardwise.build_optimizer(split, kind, **options)
        for _ in range(3):
            for model, optimizer in ((reference, theirs), (split, ours)):
                model(**batch).loss.backward()
                optimizer.step()
                optimizer.zero_grad()
        state = shardwise.full_state_dict(split)
        split.load_state_dict(start)
        found[kind.__name__] = [
            problem
            for name, value in reference.state_dict().items()
            for problem in differing(name, state[name], value, 2e-5)
        ]
    return found


def own_loss(logits, labels, vocab_size, **options):
    flat = logits[:, :-1].reshape(-1, vocab_size)
    return torch.nn.functional.cross_entropy(flat, labels[:, 1:].reshape(-1), **options)


def own_losses(whole, split, mesh):
    """A loss of the caller's own is that of the whole batch, or refused where batches are divided."""
    batch, found = uneven_batch(whole), {}
    weight = torch.ones(whole.config.vocab_size)
    weight[3] = 5.0
    for name, options in (
        ("smoothed", {"label_smoothing": 0.1}), ("weighted", {"weight": weight}), ("summed", {"reduction": "sum"})
    ):  # fmt: skip
        for each in (whole, split):
            each.loss_function = lambda logits, labels, vocab_size, options=options, **_: own_loss(
                logits, labels, vocab_size, **options
            )
        one, two = (shardwise.TrainStep(split, mesh, num_microbatches=count) for count in (1, 2))
        expected = whole_gradients(whole, batch)
        one(batch)
        found[name] = differing_gradients(shardwise.full_gradients(split), expected)
        split.zero_grad()
        with pytest.raises(UnsupportedError, match="in 2 parts, with a loss_function of your own"):
            two(batch)
    del split._loss_function
    norm = split.get_submodule("model").norms = torch.nn.BatchNorm1d(4, affine=False)
    step = shardwise.TrainStep(split, mesh, num_microbatches=2)
    step(batch)  # it does not run

    def run_norm():
        norm(torch.ones(2, 4))

    for heard in ({"heard": torch.ones(len(batch["input_ids"]))}, {}):
        with pytest.raises(UnsupportedError, match="2 parts, of a Qwen3ForCausalLM with batch norms in training mode"):
            step(batch | heard)
        split.model.norm.register_forward_pre_hook(lambda *_: run_norm())
    split(**batch)  # the check ends with the step
    norm.eval()
    step(batch)
    return found


CHECKS = (microbatches, accumulation, nothing_to_learn, a_fault_on_the_way, copied, optimizers, own_losses)


def run(mesh, check, sequence_parallel):
    whole = whole_model()
    split = shardwise.parallelize(copy.deepcopy(whole), mesh, sequence_parallel=sequence_parallel)
    return check(whole, split, mesh)


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["", "sp"])
@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("layout", ["tp1", "tp2"])
def test_steps_compute_what_the_whole_model_computes(on_ranks, layout, check, sequence_parallel):
    for found in on_ranks(run):
        assert not {case: problems for case, problems in found.items() if problems}
