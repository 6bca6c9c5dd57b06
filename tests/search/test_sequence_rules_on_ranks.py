"""Sequence parallelism found by running a tiny model, on real ranks: recomputed layers, generation, communication."""

from __future__ import annotations

import copy

import pytest
import torch

import shardwise
from bench.sweep.known import default_config, model_class
from shardwise.comm.count import CommunicationCount
from shardwise.ranks.spawn import spawn
from shardwise.tiny.models import build_tiny_model, shrink_config
from tests.families import checkpoint_layers

pytestmark = pytest.mark.spawn

ROWS = 2


def tiny_of(model_type, task, name):
    config = shrink_config(default_config(model_type, task=task), without_dropout=True)
    return build_tiny_model(config, model_class(name), seed=0).eval()


def tokens(length):
    return torch.randint(3, 30, (ROWS, length), generator=torch.Generator().manual_seed(0))


def recompute(case):
    """The largest relative difference between whole and split gradients when layers are run again in backward."""
    with shardwise.Mesh.open("tp2") as mesh:
        whole, ids = tiny_of(*case).train(), tokens(7)
        split = shardwise.parallelize(copy.deepcopy(whole), mesh, sequence_parallel=True).train()
        whole(input_ids=ids, labels=ids).loss.backward()
        checkpoint_layers(split)
        split(input_ids=ids, labels=ids).loss.backward()
        found = shardwise.full_gradients(split)
        truth = {name: value.grad for name, value in whole.named_parameters() if value.grad is not None}
        scale = max(float(gradient.abs().max()) for gradient in truth.values())
        return max(float((found[name] - gradient).abs().max()) / scale for name, gradient in truth.items())


@pytest.mark.parametrize(
    "case",
    [("bart", "seq2seq_lm", "BartForConditionalGeneration"), ("codegen", "causal_lm", "CodeGenForCausalLM")],
    ids=["two stacks", "whole modules"],
)
def test_layers_that_are_run_again_in_backward_know_their_stack(case):
    assert max(spawn(recompute, 2, case)) < 1e-4


def generate(case):
    with shardwise.Mesh.open("tp2") as mesh:
        whole = tiny_of(*case)
        split = shardwise.parallelize(copy.deepcopy(whole), mesh, sequence_parallel=True)
        found = {}
        for length in (1, 5):
            options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
            options |= {"attention_mask": torch.ones(ROWS, length, dtype=torch.long), "decoder_start_token_id": 2}
            found[length] = [model.generate(tokens(length), **options).tolist() for model in (whole, split)]
        return found


def test_an_encoder_decoder_generates_the_same():
    for found in spawn(generate, 2, ("bart", "seq2seq_lm", "BartForConditionalGeneration")):
        for length, (whole, split) in found.items():
            assert whole == split, length


def count(case):
    with shardwise.Mesh.open("tp2") as mesh:
        model = shardwise.parallelize(tiny_of(*case), mesh, sequence_parallel=True)
        step = shardwise.TrainStep(model, mesh)
        with CommunicationCount() as counted:
            step({"input_ids": tokens(16), "labels": tokens(16)})
        hidden = {"at_least_elements": ROWS * 16 * model.config.hidden_size}
        calls = {name: counted.num_calls(name, **hidden) for name in ("all_gather", "reduce_scatter")}
        return calls, model.config.num_hidden_layers


def test_a_head_with_a_transform_costs_no_more_than_one_without():
    for calls, layers in spawn(count, 2, ("camembert", "masked_lm", "CamembertForMaskedLM")):
        assert calls["all_gather"] == 4 * layers + 2, "and one where the sequence is joined, one after the embedding"
        assert calls["reduce_scatter"] == 4 * layers
