"""Shapes that break others: heads, vocabularies, sequence lengths, padding, masked labels, embedded inputs."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers

import shardwise
from shardwise.errors import PlanError
from shardwise.testing.spawn import spawn
from tests.families import checkpoint_layers, tiny_batch, tiny_model
from tests.oracle import Oracle, found_problems

pytestmark = pytest.mark.spawn

SEQUENCE_PARALLEL = (False, True)


def run_cases(layout, cases):
    """Runs `cases` (name -> model arguments, change to the batch) with and without sequence parallelism."""
    with shardwise.Mesh.open(layout) as mesh:
        found = {}
        for name, (family, overrides, change, batch_options) in cases.items():
            whole = tiny_model(family, **overrides)
            batch = change(tiny_batch(whole, **batch_options), whole) if change else tiny_batch(whole, **batch_options)
            found |= compare(name, whole, batch, mesh)
        return found


def compare(name, whole, batch, mesh):
    oracle = Oracle(whole, batch)
    return {f"{name} sp={on}": oracle.differences(mesh, sequence_parallel=on) for on in SEQUENCE_PARALLEL}


def case(family="llama", change=None, *, rows=2, length=13, **overrides):
    return family, {"num_hidden_layers": 1, **overrides}, change, {"rows": rows, "length": length}


HEADS = {
    "4 query, 2 key/value heads": case(num_attention_heads=4, num_key_value_heads=2),
    "8 query heads, 1 key/value head": case(num_attention_heads=8, num_key_value_heads=1, head_dim=8),
    "fused qkv, replicated heads": case("phi3", num_key_value_heads=2),
    "fused qkv, one head": case("phi3", num_key_value_heads=1),
    "split norm, replicated heads": case("olmo2", num_key_value_heads=2),
    "split norm, one head": case("olmo2", num_key_value_heads=1),
    "biases, replicated heads": case("qwen2", num_key_value_heads=1),
    "head_dim apart from hidden_size": case(head_dim=24, num_key_value_heads=2),
}
UNEVEN = {
    "intermediate size": case(intermediate_size=90),
    "fused gate and up": case("phi3", intermediate_size=42),
    "fewer features than a multiple": case(intermediate_size=5),
    "experts": case("mixtral", intermediate_size=30, experts_implementation="eager"),
}


@pytest.mark.parametrize("cases", [HEADS, UNEVEN], ids=["heads", "uneven"])
def test_heads_and_features_divide_among_four_ranks(cases):
    assert not found_problems(spawn(run_cases, 4, "tp4", cases, timeout=100))


def refused_heads(layout, num_heads, num_key_value_heads):
    with shardwise.Mesh.open(layout) as mesh:
        model = tiny_model(
            "llama", num_attention_heads=num_heads, num_key_value_heads=num_key_value_heads, hidden_size=96, head_dim=8
        )
        before = {name: value.clone() for name, value in model.state_dict().items()}
        with pytest.raises(PlanError) as raised:
            shardwise.parallelize(model, mesh)
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items()), "the model changed"
        return str(raised.value)


@pytest.mark.parametrize(("num_ranks", "num_heads", "num_key_value_heads"), [(2, 12, 3), (4, 12, 3), (4, 6, 6)])
def test_heads_that_do_not_divide_are_refused_with_the_sizes_that_work(num_ranks, num_heads, num_key_value_heads):
    legal = {(12, 3): "1, 3, 6, 12", (6, 6): "1, 2, 3, 6"}[num_heads, num_key_value_heads]
    first, *others = spawn(refused_heads, num_ranks, f"tp{num_ranks}", num_heads, num_key_value_heads)
    assert f"use tp_size {legal}" in first
    assert f"{num_key_value_heads} key-value heads" in first or f"{num_heads} query heads" in first
    assert others == [first] * len(others)


def vocabularies(layout, directory):
    with shardwise.Mesh.open(layout) as mesh:
        found = {}
        for size in (99, 257, 3):
            for tied in (False, True):
                whole = tiny_model(
                    "llama", vocab_size=size, tied=tied, pad_token_id=None, bos_token_id=None, eos_token_id=None
                )
                batch = (
                    tiny_batch(whole)
                    if size > 3
                    else {name: value % 3 for name, value in tiny_batch(tiny_model("llama")).items()}
                )
                found |= compare(f"vocabulary {size} tied={tied}", whole, batch, mesh)
                found[f"vocabulary {size} tied={tied} leaves"] = true_sizes(
                    whole, mesh, directory / f"{size}{tied}", size
                )
        return found


def true_sizes(whole, mesh, directory, size):
    """Problems of what leaves a split model: state dict, config, exported weights."""
    model = shardwise.parallelize(copy.deepcopy(whole), mesh)
    expected = whole.state_dict()
    problems = []
    state = shardwise.full_state_dict(model)
    if list(state) != list(expected) or not all(torch.equal(value, expected[name]) for name, value in state.items()):
        problems.append("full_state_dict is not the whole model's state dict")
    if model.config.to_dict() != whole.config.to_dict() or model.config.vocab_size != size:
        problems.append("the config changed")
    shardwise.export_pretrained(model, directory)
    exported = transformers.AutoModelForCausalLM.from_pretrained(directory)
    if exported.config.vocab_size != size:
        problems.append(f"exported vocab_size {exported.config.vocab_size}")
    if not all(torch.equal(value, expected[name]) for name, value in exported.state_dict().items()):
        problems.append("the exported weights differ")
    return problems


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_vocabularies_of_any_size_keep_it(num_ranks, tmp_path):
    assert not found_problems(spawn(vocabularies, num_ranks, f"tp{num_ranks}", tmp_path, timeout=100))


def pad(side):
    def padded(batch, model):
        mask = torch.ones_like(batch["input_ids"])
        hidden = slice(None, 4) if side == "left" else slice(-4, None)
        mask[0, hidden] = 0
        labels = batch["labels"].masked_fill(mask == 0, -100)
        ids = batch["input_ids"].masked_fill(mask == 0, 0)
        return {"input_ids": ids, "attention_mask": mask, "labels": labels}

    return padded


def ignore_row(batch, model):
    batch["labels"][0] = -100
    return batch


def ignore_all(batch, model):
    batch["labels"][:] = -100
    return batch


def embed(batch, model):
    """Other values than the model's own embedding gives, as multimodal models pass them."""
    generator = torch.Generator().manual_seed(3)
    rows = torch.randn(*batch["input_ids"].shape, model.config.hidden_size, generator=generator)
    return {"inputs_embeds": rows.requires_grad_(), "labels": batch["labels"]}


# Changes to batches travel to the ranks by name.
pad_left, pad_right = pad("left"), pad("right")


def run_batches(layout, family):
    cases = {
        **{f"length {length}": case(family, length=length, change=keep_labels) for length in (1, 3, 5, 13)},
        "left padding": case(family, pad_left),
        "right padding": case(family, pad_right, rows=3),
        "a row without labels": case(family, ignore_row),
        "inputs_embeds": case(family, embed, rows=3),
        "inputs_embeds, one row": case(family, embed, rows=1, length=5),
        "three rows": case(family, rows=3),
    }
    return run_cases(layout, cases)


def keep_labels(batch, model):
    return batch | {"labels": batch["input_ids"].clone()}


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_batches_of_any_length_and_padding(family):
    assert not found_problems(spawn(run_batches, 4, "tp4", family, timeout=100))


def nothing_to_learn(layout):
    with shardwise.Mesh.open(layout) as mesh:
        whole = tiny_model("llama")
        return compare("all ignored", whole, ignore_all(tiny_batch(whole), whole), mesh)


def test_a_batch_without_any_label_gives_what_the_whole_model_gives():
    assert not found_problems(spawn(nothing_to_learn, 2, "tp2"))


def resized(layout, tied):
    with shardwise.Mesh.open(layout) as mesh:
        whole = tiny_model("llama", tied=tied)
        whole.resize_token_embeddings(101, mean_resizing=False)
        found = Oracle(whole, tiny_batch(whole)).differences(mesh)
        model = shardwise.parallelize(whole, mesh)
        shape = tuple(shardwise.full_state_dict(model)["lm_head.weight"].shape)
        return {"resized": found + ([] if shape == (101, 64) else [f"the head has shape {shape}"])}


@pytest.mark.parametrize("tied", [False, True])
def test_a_vocabulary_resized_before_splitting(tied):
    assert not found_problems(spawn(resized, 2, "tp2", tied))


def embed_then_run(layout):
    """Embeds outside the model's forward, changes the rows, and hands them in."""
    with shardwise.Mesh.open(layout) as mesh:
        found = {}
        whole = tiny_model("llama")
        ids = tiny_batch(whole)["input_ids"]
        expected = whole.get_input_embeddings()(ids)
        logits = whole(inputs_embeds=expected + 1.0).logits
        for sequence_parallel in SEQUENCE_PARALLEL:
            model = shardwise.parallelize(copy.deepcopy(whole), mesh, sequence_parallel=sequence_parallel)
            rows = model.get_input_embeddings()(ids)
            problems = [] if torch.equal(rows, expected) else ["the embedding gives other rows outside the model"]
            if not torch.allclose(model(inputs_embeds=rows + 1.0).logits, logits, atol=1e-4):
                problems.append("the logits differ")
            found[f"sp={sequence_parallel}"] = problems
        return found


def test_the_embedding_may_be_called_by_itself():
    assert not found_problems(spawn(embed_then_run, 2, "tp2"))


def recompute(layout):
    """Layers that run again in backward, as transformers' own checkpointing makes them."""
    with shardwise.Mesh.open(layout) as mesh:
        whole = tiny_model("gemma2").train()
        oracle = Oracle(whole, tiny_batch(whole))
        checkpoint_layers(whole)
        return {f"sp={on}": oracle.differences(mesh, sequence_parallel=on) for on in SEQUENCE_PARALLEL}


def test_layers_may_run_again_in_backward():
    assert not found_problems(spawn(recompute, 2, "tp2"))
