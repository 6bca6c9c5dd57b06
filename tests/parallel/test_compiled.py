"""Compiled blocks compute the same, keep their names, and hold their collectives in one graph."""

from __future__ import annotations

import copy

import pytest
import torch

import shardwise
from shardwise.parallel.compiled import count_compilation
from tests.families import rows_of, tiny_batch, tiny_model

pytestmark = pytest.mark.spawn


def train_compiled(mesh, mode):
    """Worst gradient against the unsplit model's, relative, and what was compiled in two steps of equal shape."""
    whole = tiny_model("llama", num_hidden_layers=3)
    batch = tiny_batch(whole)
    # aot_eager traces and differentiates as inductor does, and generates no code: that takes a minute here.
    model = shardwise.parallelize(
        copy.deepcopy(whole),
        mesh,
        compilation=shardwise.Compile(backend="aot_eager"),
        recompute=shardwise.Recompute(mode=mode),
    )
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in whole.named_parameters()]
    whole(**batch).loss.backward()
    step = shardwise.TrainStep(model, mesh)
    mine = rows_of(batch, mesh)
    for _ in range(2):
        model.zero_grad()
        step(mine)
    gradients = shardwise.full_gradients(model)
    worst = max(
        float((gradients[name] - parameter.grad).abs().max() / parameter.grad.abs().max())
        for name, parameter in whole.named_parameters()
    )
    found = count_compilation()
    torch.compiler.reset()
    return worst, found


# torch's tracing warns of what it does itself: of reading .grad, of making instances of autograd functions.
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize(("layout", "mode"), [("tp2", "none"), ("tp2", "selective"), ("fsdp2", "full")])
def test_blocks_are_compiled_whole_and_compute_the_same(on_ranks, layout, mode):
    for worst, found in on_ranks(train_compiled):
        assert worst < 1e-4
        assert not found.graph_breaks
        assert found.recompiles == 0, "every block runs what was compiled for the first"
        assert 1 <= found.graphs <= 2  # FSDP2's end of a block may be one of its own
