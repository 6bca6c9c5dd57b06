"""All checks come before all edits: a model that cannot be split stays as it is."""

from __future__ import annotations

import pytest
import torch

import shardwise
from shardwise.api.rehearsal import fake_mesh
from shardwise.errors import ShardwiseError
from shardwise.parameters.registry import is_split
from shardwise.topology.shape import MeshShape
from tests.families import tiny_batch, tiny_model

pytestmark = pytest.mark.single

OPTIONS = {
    "dropout is not compiled under tp": {"compilation": shardwise.Compile(backend="eager")},
    "a pattern matches nothing": {"recompute": shardwise.Recompute(mode="full", modules=("nothing",))},
    "symmetric memory is of GPUs": {"fsdp": shardwise.FsdpPolicy(symmetric_memory=True)},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_a_model_that_cannot_be_split_by_some_options_is_split_by_others(options):
    with fake_mesh(MeshShape.parse("fsdp2.tp2")) as mesh:
        model = tiny_model("llama", attention_dropout=0.1)
        modules, shapes = dict(model.named_modules()), {name: p.shape for name, p in model.named_parameters()}
        kinds = {name: type(module) for name, module in modules.items()}
        with pytest.raises(ShardwiseError):
            shardwise.parallelize(model, mesh, **options)
        assert not is_split(model) and dict(model.named_modules()) == modules
        assert {name: type(module) for name, module in model.named_modules()} == kinds
        assert {name: p.shape for name, p in model.named_parameters()} == shapes
        shardwise.parallelize(model, mesh).train()
        model(**tiny_batch(tiny_model("llama"))).loss.backward()
        assert all(isinstance(p.grad, torch.Tensor) for p in model.parameters())


def test_an_embedding_that_rewrites_its_rows_is_refused_before_anything_changes():
    with fake_mesh(MeshShape.parse("tp2")) as mesh:
        model = tiny_model("llama")
        model.model.embed_tokens.max_norm = 1.0
        shapes = {name: p.shape for name, p in model.named_parameters()}
        with pytest.raises(ShardwiseError, match="max_norm"):
            shardwise.parallelize(model, mesh)
        assert not is_split(model)
        assert {name: p.shape for name, p in model.named_parameters()} == shapes
