"""Adapters drop the same when a layer is computed again in backward."""

from __future__ import annotations

import peft
import pytest
import torch

import shardwise
from tests.families import tiny_batch, tiny_model

pytestmark = [
    pytest.mark.spawn,
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning"),
]  # PEFT 0.21


MODES = {
    "full": shardwise.Recompute(mode="full"),
    "attention": shardwise.Recompute(mode="attention"),
    "modules": shardwise.Recompute(mode="full", modules=("**.mlp",)),
}


def differing(mesh, mode, sequence_parallel):
    """Names of gradients that recomputation changes."""
    gradients = []
    for recompute in (shardwise.Recompute(), MODES[mode]):
        torch.manual_seed(0)
        config = peft.LoraConfig(r=2, lora_dropout=0.5, target_modules="all-linear", init_lora_weights=False)
        model = peft.get_peft_model(tiny_model("llama"), config)
        split = shardwise.parallelize(model, mesh, sequence_parallel=sequence_parallel, recompute=recompute).train()
        torch.manual_seed(1)
        shardwise.TrainStep(split, mesh)(tiny_batch(model))
        gradients.append(shardwise.full_gradients(split))
    without, recomputed = gradients
    assert without
    return [name for name, value in without.items() if not torch.allclose(recomputed[name], value, atol=1e-6)]


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("layout", ["tp2"])
def test_gradients_are_those_without_recomputation(on_ranks, layout, mode, sequence_parallel):
    assert on_ranks(differing) == [[], []]
