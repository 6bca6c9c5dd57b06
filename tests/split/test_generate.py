"""`generate()` of a split model gives the whole model's tokens."""

from __future__ import annotations

import copy

import pytest
import torch

import shardwise
from shardwise.testing.spawn import spawn
from tests.families import tiny_model

pytestmark = pytest.mark.spawn

# transformers' own auxiliary loss of mixtral does not bear generating with a mask.
FAMILIES = {"llama": {}, "gemma2": {}, "mixtral": {"output_router_logits": False}}
GREEDY = {"max_new_tokens": 12, "do_sample": False}
SAMPLED = {"max_new_tokens": 12, "do_sample": True, "temperature": 1.5, "top_k": 20}


def prompts(model):
    """Two rows of 7 tokens, the first padded on the left."""
    ids = torch.randint(3, model.config.vocab_size, (2, 7), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    ids[0, :3], mask[0, :3] = 0, 0
    return {"input_ids": ids, "attention_mask": mask}


def generate_all(layout):
    with shardwise.Mesh.open(layout) as mesh:
        found = {}
        for family, options in FAMILIES.items():
            whole = tiny_model(family, eos_token_id=None, **options)
            inputs = prompts(whole)
            found[family, "whole"] = whole.generate(**inputs, **GREEDY).tolist()
            for sequence_parallel in (False, True):
                model = shardwise.parallelize(copy.deepcopy(whole), mesh, sequence_parallel=sequence_parallel)
                found[family, sequence_parallel] = model.generate(**inputs, **GREEDY).tolist()
                torch.manual_seed(3)
                found[family, sequence_parallel, "sampled"] = model.generate(**inputs, **SAMPLED).tolist()
        return found


def test_greedy_tokens_are_the_whole_models_and_samples_are_equal_on_all_ranks():
    first, second = spawn(generate_all, 2, "tp2", timeout=100)
    assert first == second
    for family in FAMILIES:
        assert len(first[family, "whole"][0]) == 7 + 12
        assert first[family, False] == first[family, "whole"] == first[family, True], family
        assert first[family, False, "sampled"] == first[family, True, "sampled"] != first[family, "whole"]
