"""In bfloat16 a split model is as near to the float32 truth as the whole one in bfloat16 is."""

from __future__ import annotations

import copy

import pytest
import torch

import shardwise
from shardwise.testing.spawn import spawn
from tests.families import tiny_batch, tiny_model

pytestmark = pytest.mark.spawn

FAMILIES = ("llama", "gemma3_text", "phi3", "olmo2")
TIMES, FLOOR = 2.0, 2e-3
"""The split's error may be twice the whole's, plus a floor of what is compared: its largest entry (loss: itself)."""


def compute(model, batch, embeds):
    """Loss, gradient of the embedded input and of every parameter, in float32 and of whole tensors."""
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


def bf16_cases(layout):
    with shardwise.Mesh.open(layout) as mesh:
        found = {}
        for family in FAMILIES:
            # What both bfloat16 models start from, so that the truth has the same weights.
            rounded = tiny_model(family).bfloat16()
            batch = tiny_batch(rounded, rows=4)
            shape = (*batch["labels"].shape, rounded.config.hidden_size)
            embeds = torch.randn(shape, generator=torch.Generator().manual_seed(2)).bfloat16()
            exact, whole = copy.deepcopy(rounded).float(), copy.deepcopy(rounded)
            truth = compute(exact, batch, embeds) | gradients(exact)
            whole_errors = errors(compute(whole, batch, embeds) | gradients(whole), truth)
            for sequence_parallel in (False, True):
                split = shardwise.parallelize(copy.deepcopy(rounded), mesh, sequence_parallel=sequence_parallel)
                values = compute(split, batch, embeds) | full_gradients(split)
                found[family, sequence_parallel] = errors(values, truth), whole_errors
        return found


def gradients(model):
    return {name: value.grad.float() for name, value in model.named_parameters() if value.grad is not None}


def full_gradients(model):
    found = shardwise.full_gradients(model)
    assert all(value.dtype == torch.bfloat16 for value in found.values())
    return {name: value.float() for name, value in found.items()}


def test_bfloat16_errors_stay_those_of_bfloat16():
    for rank in spawn(bf16_cases, 2, "tp2", timeout=100):
        for case, (split, whole) in rank.items():
            assert split.keys() == whole.keys() and len(whole) > 8
            for name, error in split.items():
                assert error <= TIMES * whole[name] + FLOOR, f"{case} {name}: {error:.4f}, the whole {whole[name]:.4f}"
