"""Splits and trains tiny models in the process that ranks of tests are forked from, on meshes that are not there.

What a process does for its first model only takes as long as a small case: modules that are imported when first needed,
sources that torch reads for the stacks it records, shapes that DTensor's operations have. Ranks inherit all of it.
"""

from __future__ import annotations

import gc
import os
import random
import sys
import traceback

import torch
from transformers import conversion_mapping

import shardwise
from shardwise.parameters.canonical import canonical_tensors
from shardwise.parameters.registry import find_parameters
from shardwise.proof.parity import OPTIMIZER
from shardwise.ranks.fake_mesh import fake_mesh
from shardwise.topology.shape import MeshShape
from tests.families import tiny_batch, tiny_model

__all__: list[str] = []

LAYOUTS = {
    "tp7": {"num_attention_heads": 14, "num_key_value_heads": 7, "hidden_size": 112},
    "fsdp7": {},
}
"""Of sizes that no test has: what torch keeps by mesh is found by none of theirs. With what the model then needs."""


def train(layout: str, options: dict[str, int]) -> None:
    with fake_mesh(MeshShape.parse(layout)) as mesh:
        model = shardwise.parallelize(tiny_model("llama", **options), mesh)
        conversion_mapping.get_checkpoint_conversion_mapping("llama")  # compiles those of every family
        optimizers = (
            torch.optim.AdamW(model.parameters(), **OPTIMIZER),
            shardwise.build_optimizer(model, torch.optim.AdamW, **OPTIMIZER),
            shardwise.build_optimizer(model, torch.optim.AdamW, lr=1e-4),
        )
        batch = tiny_batch(model)
        for optimizer in optimizers:
            shardwise.TrainStep(model, mesh)(batch)
            optimizer.step()
            gradients = {name: each.grad for name, each, _ in find_parameters(model)}
            dict(canonical_tensors(model, gradients))  # `full_gradients`, without asking ranks that are not there
            optimizer.zero_grad()


# A torch that is built for a device refuses to fork once autograd has run, also where there is none.
if "COVERAGE_PROCESS_START" not in os.environ and torch.accelerator.current_accelerator() is None:
    for _layout, _options in LAYOUTS.items():
        try:
            train(_layout, _options)
        except Exception:  # noqa: BLE001 - ranks are slower without, and what is broken fails in tests
            print(f"could not warm ranks up with {_layout}", file=sys.stderr)
            traceback.print_exc()
    random.seed(0)
    torch.manual_seed(0)
    gc.collect()
gc.freeze()  # as in shardwise.ranks.preloaded
