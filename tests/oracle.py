"""Compares a split model with the unsplit one it was made from, and says in words what differs.

Independent of `shardwise.proof.parity` on purpose: it takes nothing from the package but the front door, so a fault in
how the package compares does not pass by hiding itself here too.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import shardwise

LOSS, LOGITS, GRADIENT, GRADIENT_FLOOR = 1e-5, 1e-4, 1e-4, 1e-6
"""How far float32 may be off: loss and logits absolute, a gradient relative to its largest entry plus the floor."""


class Oracle:
    """What the unsplit model computes on a batch: logits with and without labels, loss, every gradient.

    A floating-point input that requires gradients (`inputs_embeds`) is compared by its gradient too.
    """

    def __init__(self, whole: nn.Module, batch: Mapping[str, Any]) -> None:
        self.whole, self.batch = whole, batch
        reference = copy.deepcopy(whole)
        self._wanted = run(reference, batch)
        self._gradients = {name: value.grad for name, value in reference.named_parameters() if value.grad is not None}

    def differences(self, mesh: Any, **options: Any) -> list[str]:
        """What a copy of the model, split with `options`, computes otherwise."""
        model = shardwise.parallelize(copy.deepcopy(self.whole), mesh, **options)
        found = run(model, self.batch)
        problems = differing("loss", found["loss"], self._wanted["loss"], LOSS)
        problems += differing("logits", found["logits"], self._wanted["logits"], LOGITS)
        problems += differing("free logits", found["free logits"], self._wanted["free logits"], LOGITS)
        gradients = shardwise.full_gradients(model) | found["inputs"]
        return problems + differing_gradients(gradients, self._gradients | self._wanted["inputs"])


def run(model: nn.Module, batch: Mapping[str, Any]) -> dict[str, Any]:
    """Forward without labels, then forward and backward with them, of copies of `batch`."""
    inputs = {name: own_copy(value) for name, value in batch.items()}
    with torch.no_grad():
        free = model(**{name: value for name, value in inputs.items() if name != "labels"})
    output = model(**inputs)
    output.loss.backward()
    logits = output.logits.detach()
    return {
        "free logits": free.logits,
        "logits": logits.full_tensor() if isinstance(logits, DTensor) else logits,
        "loss": output.loss.detach(),
        "inputs": {name: value.grad for name, value in inputs.items() if value.grad is not None},
    }


def own_copy(value: Tensor) -> Tensor:
    return value.detach().clone().requires_grad_(value.requires_grad)


def differing_gradients(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> list[str]:
    problems = [f"only one side has a gradient of {name}" for name in sorted(set(found) ^ set(expected))]
    for name in sorted(set(found) & set(expected)):
        largest = float(expected[name].abs().max()) if expected[name].numel() else 0.0
        problems += differing(name, found[name], expected[name], GRADIENT * largest + GRADIENT_FLOOR)
    return problems


def differing(name: str, found: Tensor, expected: Tensor, allowed: float) -> list[str]:
    if found.shape != expected.shape:
        return [f"{name} has shape {list(found.shape)}, not {list(expected.shape)}"]
    if torch.equal(found.isnan(), expected.isnan()):
        found, expected = found.nan_to_num(0.0), expected.nan_to_num(0.0)
    error = float((found.float() - expected.float()).abs().max()) if found.numel() else 0.0
    return [] if error <= allowed else [f"{name} is off by {error:.2e}, more than {allowed:.2e}"]
