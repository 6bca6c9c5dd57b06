"""Trainers on split models against the same script of plain transformers in one process."""

from __future__ import annotations

import pytest
import torch

import shardwise
from shardwise.parameters.replicas import find_unequal_replicas
from tests.families import FULL_PRODUCT
from tests.trainer.modules import STEPS, curve, split_trainer, unsplit_run

pytestmark = pytest.mark.spawn

# Every family, layout and option at least once: (family, layout, accumulation, options).
CASES = [
    ("llama", "tp2", 3, {}),
    ("llama", "pp2.tp2", 1, {}),
    ("qwen3", "fsdp2", 1, {}),
    ("gemma3", "tp2", 1, {}),
    ("gemma3", "pp2", 1, {}),
    ("phi3", "tp2", 3, {"sequence_parallel": True}),
    ("phi3", "ddp2", 1, {}),
    ("gpt2", "fsdp2.tp2", 1, {}),
    ("mixtral", "tp2", 3, {}),
    ("mixtral", "fsdp2", 1, {}),
    ("bert", "ddp2", 3, {}),
    ("bert", "pp2", 3, {}),
    ("decoder", "fsdp2", 3, {}),
    ("numbers", "pp2", 3, {}),
    ("several", "fsdp2", 1, {}),
    ("tokens", "fsdp2", 1, {}),
    ("vit", "tp2", 1, {}),
    ("t5", "tp2", 3, {}),
    ("t5", "ddp2", 1, {}),
    ("t5", "pp2", 1, {}),
]
FAMILIES = ("llama", "qwen3", "gemma3", "phi3", "gpt2", "mixtral", "bert", "vit", "t5")
LAYOUTS = ("tp2", "tp2+sp", "fsdp2", "ddp2", "fsdp2.tp2", "pp2", "pp2.tp2")
MORE = [
    *(("numbers", "ddp2", 1, {}), ("several", "pp2", 3, {}), ("decoder", "pp2", 1, {})),
    *(
        (family, layout.removesuffix("+sp"), accumulation, {"sequence_parallel": True} if "+" in layout else {})
        for family in FAMILIES
        for layout in LAYOUTS
        for accumulation in (1, 3)
    ),
]


def train(mesh, family, accumulation, options, num_rows, directory):
    chosen = {"num_rows": num_rows, "split": options, "gradient_accumulation_steps": accumulation}
    run = split_trainer(mesh, family, directory, **chosen)
    run.train()
    assert not find_unequal_replicas(run.model)
    return curve(run), shardwise.full_state_dict(run.model, rank0_only=True)


@pytest.mark.parametrize(("family", "layout", "accumulation", "options"), [*CASES, *MORE * FULL_PRODUCT])
def test_twenty_steps_are_those_of_one_process(on_ranks, tmp_path, family, layout, accumulation, options):
    """13 rows in batches of 4: the last one has a single row, and one row has no targets."""
    num_rows = 12 if layout == "pp2" and family in ("numbers", "several") else 13  # those are not divided further
    wanted, state = unsplit_run(family, accumulation, num_rows)
    (found, own), *others = on_ranks(train, directory=str(tmp_path), num_rows=num_rows)
    assert len(found) == len(wanted) == STEPS
    assert all(each == found for each, _ in others), "ranks log the same"
    for (loss, norm), (expected, expected_norm) in zip(found, wanted, strict=True):
        assert loss == pytest.approx(expected, abs=1e-5)
        assert norm == pytest.approx(expected_norm, rel=1e-5)
    assert own.keys() == state.keys()
    for name, value in state.items():
        torch.testing.assert_close(own[name], value, atol=1e-5, rtol=0, msg=name)
