"""Training on a card equals training on the CPU. Ranks share one card over gloo, which sends no tensors of a
card from rank to rank: pipelines would need a card for each rank.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

import shardwise
from shardwise.testing.spawn import spawn

pytestmark = [pytest.mark.device, pytest.mark.timeout(300)]

CONFIG = {
    "vocab_size": 99,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
STEPS = 3
CASES: dict[str, dict[str, Any]] = {
    "tp1": {},
    "tp2": {},
    "tp2 sp": {"sequence_parallel": True},
    "fsdp2": {},
    "fsdp2 offload": {"fsdp": {"cpu_offload": True}},
}


def _batches() -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    ids = [torch.randint(99, (4, 16), generator=generator) for _ in range(STEPS)]
    return [{"input_ids": each, "labels": each} for each in ids]


def _unsplit(directory: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-6)
    losses = []
    for batch in _batches():
        loss = model(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses, model.state_dict()


def train(case: str, directory: str, checkpoints: str, device: str = "cuda:0") -> tuple[list[float], dict[str, Any]]:
    layout, options = case.split()[0], dict(CASES[case])
    if "fsdp" in options:
        options["fsdp"] = shardwise.FsdpPolicy(**options["fsdp"])
    backend = "gloo" if layout != "tp1" else None
    with shardwise.Mesh.open(layout, device=device, backend=backend) as mesh:
        model = shardwise.load(directory, mesh, dtype=torch.float32, **options).train()
        optimizer = shardwise.build_optimizer(model, torch.optim.AdamW, lr=1e-3, eps=1e-6)
        step = shardwise.TrainStep(model, mesh, num_microbatches=mesh.size("pp"))
        losses = []
        for batch in _batches():
            rows = {name: value.chunk(mesh.data_size)[mesh.data_rank] for name, value in batch.items()}
            losses.append(float(step(rows).loss))
            shardwise.clip_grad_norm_(model, 0.5)
            optimizer.step()
            optimizer.zero_grad()
        trained = shardwise.full_state_dict(model)
        shardwise.save_checkpoint(checkpoints, model=model, optimizer=optimizer, async_save=True)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        shardwise.load_checkpoint(checkpoints, model=model, optimizer=optimizer)
        loaded = shardwise.full_state_dict(model)
    assert all(torch.equal(loaded[name], value) for name, value in trained.items())
    return losses, trained


@pytest.mark.parametrize("case", CASES)
def test_training_on_a_card_equals_training_unsplit_on_the_cpu(case, tmp_path):
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(LlamaConfig(**CONFIG)).save_pretrained(tmp_path / "model")
    losses, parameters = _unsplit(str(tmp_path / "model"))
    num_ranks = 1 if case == "tp1" else 2
    for found, trained in spawn(
        train, num_ranks, case, str(tmp_path / "model"), str(tmp_path / "saved"), timeout=200.0
    ):
        assert found == pytest.approx(losses, abs=1e-5)
        for name, value in parameters.items():
            torch.testing.assert_close(trained[name].cpu(), value, atol=1e-5, rtol=0)
