"""In bfloat16 a split model is as near to the float32 truth as the unsplit one in bfloat16 is."""

from __future__ import annotations

import copy

import pytest
import torch

import shardwise
from tests.families import tiny_batch, tiny_model

pytestmark = pytest.mark.spawn

FAMILIES = ("llama", "gemma3_text", "phi3", "olmo2")
TIMES, FLOOR = 2.0, 2e-3
"""The split's error may be twice the whole's, plus a floor of what is compared: its largest entry (loss: itself)."""


def compute(model, batch, embeds):
    """Loss, gradient of the embedded input and of every parameter, in float32 and of full tensors."""
    dtype = next(model.parameters()).dtype
    rows = embeds.to(dtype).clone().requires_grad_()
    loss = model(inputs_embeds=rows, labels=batch["labels"]).loss
    loss.backward()
    found = {"loss": loss.detach(), "inputs_embeds": rows.grad}
    return {name: value.float() for name, value in found.items()}


def errors(found, truth):
    return {
        name: float((found[name] - want).norm() / want.norm()) for name, want in truth.items() if float(want.norm())
    }


def train(mesh, family, sequence_parallel):
    """Errors of the split model, and of the unsplit one, both in bfloat16."""
    rounded = tiny_model(family).bfloat16()  # what both start from, so that the truth has the same weights
    batch = tiny_batch(rounded, rows=4)
    shape = (*batch["labels"].shape, rounded.config.hidden_size)
    embeds = torch.randn(shape, generator=torch.Generator().manual_seed(2)).bfloat16()
    exact, whole = copy.deepcopy(rounded).float(), copy.deepcopy(rounded)
    truth = compute(exact, batch, embeds) | gradients(exact)
    split = shardwise.parallelize(copy.deepcopy(rounded), mesh, sequence_parallel=sequence_parallel)
    found = compute(split, batch, embeds) | full_gradients(split)
    return errors(found, truth), errors(compute(whole, batch, embeds) | gradients(whole), truth)


def gradients(model):
    return {name: value.grad.float() for name, value in model.named_parameters() if value.grad is not None}


def full_gradients(model):
    found = shardwise.full_gradients(model)
    assert all(value.dtype == torch.bfloat16 for value in found.values())
    return {name: value.float() for name, value in found.items()}


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["", "sp"])
@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_errors_stay_those_of_bfloat16(on_ranks, family, sequence_parallel):
    for split, whole in on_ranks(train, layout="tp2"):
        assert split.keys() == whole.keys() and len(whole) > 8
        for name, error in split.items():
            assert error <= TIMES * whole[name] + FLOOR, f"{name}: {error:.4f}, the whole {whole[name]:.4f}"
