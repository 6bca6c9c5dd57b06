"""`generate()` of a split model gives the unsplit model's tokens."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from transformers import T5Config, T5ForConditionalGeneration

import shardwise
from shardwise.errors import UnsupportedError
from shardwise.stages.run import MeasureRun
from tests.families import tiny_model

pytestmark = pytest.mark.spawn

# transformers' own auxiliary loss of mixtral does not bear generating with a mask.
NUM_TOKENS = 6
FAMILIES = {"llama": {}, "gemma2": {}, "mixtral": {"output_router_logits": False}}
GREEDY = {"max_new_tokens": NUM_TOKENS, "do_sample": False}
SAMPLED = {"max_new_tokens": NUM_TOKENS, "do_sample": True, "temperature": 1.5, "top_k": 20}


def prompts(model):
    """Two rows of 7 tokens, the first padded on the left."""
    ids = torch.randint(3, model.config.vocab_size, (2, 7), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    ids[0, :3], mask[0, :3] = 0, 0
    return {"input_ids": ids, "attention_mask": mask}


def generate(mesh, family, sequence_parallel):
    whole = tiny_model(family, eos_token_id=None, **FAMILIES[family])
    inputs = prompts(whole)
    expected = whole.generate(**inputs, **GREEDY).tolist()
    torch.manual_seed(3)
    sampled = whole.generate(**inputs, **SAMPLED).tolist()
    model = shardwise.parallelize(whole, mesh, sequence_parallel=sequence_parallel)
    greedy = model.generate(**inputs, **GREEDY).tolist()
    torch.manual_seed(3)
    return expected, greedy, sampled, model.generate(**inputs, **SAMPLED).tolist()


def t5():
    config = T5Config(
        vocab_size=96, d_model=64, d_kv=16, d_ff=96, num_layers=2, num_heads=4,
        dropout_rate=0.0, decoder_start_token_id=0, eos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    return T5ForConditionalGeneration(config).eval()


def generate_from_encoder(mesh):
    whole = t5()
    inputs = prompts(whole)
    options = {"max_new_tokens": 3, "num_beams": 2}
    expected = whole.generate(**inputs, **options).tolist()
    return expected, shardwise.parallelize(whole, mesh).generate(**inputs, **options).tolist()


def learn_from_encoder(mesh):
    """Losses of a model that is given its encoder's output, in rows of which each microbatch takes its own."""
    whole = t5().train()
    inputs = prompts(whole)
    with torch.no_grad():
        states = whole.encoder(**inputs)
    labels = inputs["input_ids"][:, :5].contiguous()
    expected = whole(encoder_outputs=states, labels=labels).loss.item()
    split = shardwise.parallelize(whole, mesh)
    with pytest.raises(UnsupportedError, match="a gradient of what encoder_outputs holds"):
        split(encoder_outputs=split.encoder(**inputs), labels=labels)
    return expected, split(encoder_outputs=states, labels=labels).loss.item()


def test_a_pipeline_may_be_given_an_encoders_output(on_ranks):
    for expected, found in on_ranks(learn_from_encoder, layout="pp2"):
        assert found == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("layout", ["fsdp2", "fsdp2.tp2"])
def test_an_encoder_whose_parameters_are_sharded_runs_by_itself(on_ranks, layout):
    for expected, found in on_ranks(generate_from_encoder, layout=layout):
        assert found == expected


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["", "sp"])
@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_are_the_whole_models_greedy_or_sampled(on_ranks, family, sequence_parallel):
    for expected, greedy, expected_sample, sample in on_ranks(generate, layout="tp2"):
        assert len(expected[0]) == 7 + NUM_TOKENS
        assert greedy == expected
        assert sample == expected_sample != expected


def generate_in_stages(mesh, family):
    """Tokens of both models, and how often stages were measured for them."""
    whole = t5() if family == "t5" else tiny_model(family, eos_token_id=None)
    inputs = prompts(whole)
    expected = whole.generate(**inputs, max_new_tokens=9, do_sample=False).tolist()
    split, measured, begin = shardwise.parallelize(whole, mesh), [], MeasureRun.__init__

    def count(run, *args, **kwargs):
        begin(run, *args, **kwargs)
        measured.append(run)

    with mock.patch.object(MeasureRun, "__init__", count):
        tokens = split.generate(**inputs, max_new_tokens=9, do_sample=False).tolist()
    return expected, tokens, len(measured)


@pytest.mark.parametrize(("family", "most"), [("llama", 3), ("t5", 4)])
def test_stages_are_not_measured_for_every_token(on_ranks, family, most):
    for expected, tokens, measured in on_ranks(generate_in_stages, layout="pp2"):
        assert tokens == expected
        assert measured <= most  # the prompt (of T5 its encoder), and two tokens: their difference tells the rest
