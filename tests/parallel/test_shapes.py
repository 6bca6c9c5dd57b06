"""Shapes that break others: heads, vocabularies, sequence lengths, padding, masked labels, embedded inputs."""

from __future__ import annotations

import copy
import functools
import itertools

import pytest
import torch
import transformers

import shardwise
from shardwise.errors import PlanError
from tests.families import FULL_PRODUCT, checkpoint_layers, tiny_batch, tiny_model
from tests.oracle import Oracle

pytestmark = pytest.mark.spawn

either_way = pytest.mark.parametrize("sequence_parallel", [False, True], ids=["", "sp"])


def one_way(cases):
    """Each of the cases once, one along the sequence and the next not; both ways in `make coverage`."""
    ways = [(named, way) for named in cases for way in (False, True)]
    return ways if FULL_PRODUCT else [(named, bool(number % 2)) for number, named in enumerate(cases)]


@functools.lru_cache(maxsize=1)
def oracle_of(named):
    """The unsplit model of one of the cases below and its batch, for both ways of splitting it."""
    family, overrides, change, batch_options = CASES[named]
    whole = tiny_model(family, **overrides)
    batch = tiny_batch(whole, **batch_options)
    return Oracle(whole, change(batch, whole) if change else batch)


def differences(mesh, named, sequence_parallel):
    return oracle_of(named).differences(mesh, sequence_parallel=sequence_parallel)


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
    "grouped experts": case("mixtral", intermediate_size=36),
}


@pytest.mark.parametrize(("named", "sequence_parallel"), one_way([*HEADS, *UNEVEN]))
def test_heads_and_features_divide_among_four_ranks(on_ranks, named, sequence_parallel):
    for problems in on_ranks(differences, layout="tp4"):
        assert not problems


WIDTHS = {
    f"{family} {width}": case(family, num_hidden_layers=2, **{name: width})
    for family, name, one in (
        ("mixtral", "intermediate_size", 20),
        ("qwen3_moe", "moe_intermediate_size", 36),
        ("deepseek_v3", "moe_intermediate_size", 20),
    )
    for width in ((20, 36, 100) if FULL_PRODUCT else (one,))
}


@pytest.mark.parametrize(("named", "sequence_parallel"), one_way(WIDTHS))
def test_experts_of_any_width_run(on_ranks, named, sequence_parallel):
    """Products of stacked experts read rows of whole 16 bytes alone, which a rank's part need not be."""
    for problems in on_ranks(differences, layout="tp2"):
        assert not problems


def refused_heads(mesh, num_heads, num_key_value_heads):
    model = tiny_model(
        "llama", num_attention_heads=num_heads, num_key_value_heads=num_key_value_heads, hidden_size=96, head_dim=8
    )
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(PlanError) as raised:
        shardwise.parallelize(model, mesh)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items()), "the model changed"
    return str(raised.value)


@pytest.mark.parametrize(("layout", "num_heads", "num_key_value_heads"), [("tp2", 12, 3), ("tp4", 6, 6)])
def test_heads_that_do_not_divide_are_refused_with_the_sizes_that_work(
    on_ranks, layout, num_heads, num_key_value_heads
):
    legal = {(12, 3): "1, 3, 6, 12", (6, 6): "1, 2, 3, 6"}[num_heads, num_key_value_heads]
    first, *others = on_ranks(refused_heads)
    assert f"use tp_size {legal}" in first
    assert f"{num_key_value_heads} key-value heads" in first or f"{num_heads} query heads" in first
    assert others == [first] * len(others)


VOCABULARIES = {
    f"{size} tokens{', tied' * tied}": case(
        vocab_size=size, tied=tied, pad_token_id=None, bos_token_id=None, eos_token_id=None
    )
    for size in (99, 257, 3)
    for tied in (False, True)
}


def true_sizes_of(mesh, named, directory):
    return true_sizes(oracle_of(named).whole, mesh, directory / named, int(named.split()[0]))


def true_sizes(whole, mesh, directory, size):
    """Problems of what leaves a split model: state dict, config, exported weights."""
    model = shardwise.parallelize(copy.deepcopy(whole), mesh)
    expected = whole.state_dict()
    problems = []
    state = shardwise.full_state_dict(model)
    if list(state) != list(expected) or not all(torch.equal(value, expected[name]) for name, value in state.items()):
        problems.append("full_state_dict is not the unsplit model's state dict")
    if model.config.to_dict() != whole.config.to_dict() or model.config.vocab_size != size:
        problems.append("the config changed")
    shardwise.export_pretrained(model, directory)
    exported = transformers.AutoModelForCausalLM.from_pretrained(directory)
    if exported.config.vocab_size != size:
        problems.append(f"exported vocab_size {exported.config.vocab_size}")
    if not all(torch.equal(value, expected[name]) for name, value in exported.state_dict().items()):
        problems.append("the exported weights differ")
    return problems


DIVIDED = [
    (layout, named, bool((i + j + j // 2) % 2))
    for (i, layout), (j, named) in itertools.product(enumerate(("tp2", "tp4")), enumerate(VOCABULARIES))
    if FULL_PRODUCT
    or named in {"tp4": ("99 tokens", "257 tokens, tied", "3 tokens"), "tp2": ("3 tokens, tied",)}[layout]
]
"""Every size over four ranks, of which one may have none of it, and the smallest over two; in `make coverage` all over
both, once along the sequence and once not.
"""


@pytest.mark.parametrize(("layout", "named", "sequence_parallel"), DIVIDED)
def test_vocabularies_of_any_size_divide(on_ranks, layout, named, sequence_parallel):
    for problems in on_ranks(differences):
        assert not problems


@pytest.mark.parametrize(("layout", "named"), [cell[:2] for cell in DIVIDED if FULL_PRODUCT or cell[0] == "tp4"])
def test_vocabularies_leave_with_their_true_sizes(on_ranks, layout, named, tmp_path):
    for problems in on_ranks(true_sizes_of, directory=tmp_path):
        assert not problems


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


def keep_labels(batch, model):
    return batch | {"labels": batch["input_ids"].clone()}


BATCHES = {
    f"{family}, {name}": case(family, **batch)
    for family in ("llama", "gemma3_text")
    for name, batch in {
        **{f"length {length}": {"length": length, "change": keep_labels} for length in (1, 3, 5, 13)},
        "left padding": {"change": pad_left},
        "right padding": {"change": pad_right, "rows": 3},
        "a row without labels": {"change": ignore_row},
        "inputs_embeds": {"change": embed, "rows": 3},
        "inputs_embeds, one row": {"change": embed, "rows": 1, "length": 5},
        "three rows": {"rows": 3},
    }.items()
}
NOTHING_TO_LEARN = {"nothing to learn": case(change=ignore_all, num_hidden_layers=2)}

CASES = {**HEADS, **UNEVEN, **WIDTHS, **VOCABULARIES, **BATCHES, **NOTHING_TO_LEARN}


@pytest.mark.parametrize(
    ("layout", "named", "sequence_parallel"),
    [  # each kind of batch, in turn with and without sequence parallelism; in make coverage both, in another
        # family each; lengths over more ranks than there may be tokens
        ("tp4" if "length" in named else "tp2", named, bool((number + number // (len(BATCHES) // 2)) % 2))
        for number, named in enumerate(BATCHES)
        if FULL_PRODUCT or number % 10 // 2 % 2 == number // 10
    ],
)
def test_batches_of_any_length_and_padding(on_ranks, layout, named, sequence_parallel):
    for problems in on_ranks(differences):
        assert not problems


@pytest.mark.parametrize(("named", "sequence_parallel"), one_way(NOTHING_TO_LEARN))
def test_a_batch_without_any_label_gives_what_the_whole_model_gives(on_ranks, named, sequence_parallel):
    for problems in on_ranks(differences, layout="tp2"):
        assert not problems


def resized(mesh, tied):
    whole = tiny_model("llama", tied=tied)
    whole.resize_token_embeddings(101, mean_resizing=False)
    problems = Oracle(whole, tiny_batch(whole)).differences(mesh)
    model = shardwise.parallelize(whole, mesh)
    return problems, tuple(shardwise.full_state_dict(model)["lm_head.weight"].shape)


@pytest.mark.parametrize("tied", [False, True])
def test_a_vocabulary_resized_before_splitting(on_ranks, tied):
    assert on_ranks(resized, layout="tp2") == [([], (101, 64))] * 2


def embed_then_run(mesh, sequence_parallel):
    """Embeds outside the model's forward, changes the rows, and hands them in."""
    whole = tiny_model("llama")
    ids = tiny_batch(whole)["input_ids"]
    expected = whole.get_input_embeddings()(ids)
    logits = whole(inputs_embeds=expected + 1.0).logits
    model = shardwise.parallelize(whole, mesh, sequence_parallel=sequence_parallel)
    rows = model.get_input_embeddings()(ids)
    assert torch.equal(rows, expected), "the embedding gives other rows outside the model"
    torch.testing.assert_close(model(inputs_embeds=rows + 1.0).logits, logits, atol=1e-4, rtol=0)


@either_way
def test_the_embedding_may_be_called_by_itself(on_ranks, sequence_parallel):
    on_ranks(embed_then_run, layout="tp2")


def recompute(mesh, sequence_parallel):
    """Layers that run again in backward, as transformers' own checkpointing makes them."""
    whole = tiny_model("gemma2").train()
    oracle = Oracle(whole, tiny_batch(whole))
    checkpoint_layers(whole)
    return oracle.differences(mesh, sequence_parallel=sequence_parallel)


@either_way
def test_layers_may_run_again_in_backward(on_ranks, sequence_parallel):
    for problems in on_ranks(recompute, layout="tp2"):
        assert not problems
