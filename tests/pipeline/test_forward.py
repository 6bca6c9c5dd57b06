"""`model(**batch)` and `generate()` of models in stages, on every rank, beside the unsplit model."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers

import shardwise
from shardwise.plan.options import Pipeline
from tests.families import CACHE, FULL_PRODUCT, tiny_batch, tiny_model
from tests.oracle import Oracle, differing, differing_gradients
from tests.pipeline.test_step import SEQ2SEQ
from tests.pipeline.test_step import model_of as seq2seq_of

pytestmark = pytest.mark.spawn

ROWS = 8


def model_of(family, name="1f1b"):
    """With a layer for every stage of two ranks."""
    num_layers = 2 if name in ("1f1b", "gpipe") else 4
    return tiny_model(family, **{"n_layer" if family == "gpt2" else "num_hidden_layers": num_layers})


def split(whole, mesh, name, **options):
    return shardwise.parallelize(copy.deepcopy(whole), mesh, pipeline=Pipeline(schedule=name), **options)


def plain(value):
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def evaluate(mesh, family, name, sp=False):
    """Differences of logits with and without labels, of the loss and of gradients, in eval mode."""
    whole = model_of(family, name)
    batch = tiny_batch(whole, rows=3)  # which no schedule takes as microbatches
    return Oracle(whole, batch).differences(mesh, pipeline=Pipeline(schedule=name), sequence_parallel=sp)


@pytest.mark.parametrize(
    ("layout", "family", "name", "sp"),
    [
        ("pp2", "gpt2", "zbv", False),
        ("pp2", "mixtral", "interleaved_1f1b", False),
        ("pp2.tp2", "qwen3", "1f1b", True),
        *([("pp2", "llama", "1f1b", False), ("pp2.tp2", "gemma3_text", "dualpipev", False)] if FULL_PRODUCT else []),
    ],
)
def test_a_call_is_the_unsplit_model_s_call(on_ranks, layout, family, name, sp):
    for problems in on_ranks(evaluate):
        assert not problems, problems


def loop(mesh, name):
    """A loop by hand in training mode: losses divided, gradients added up, logits looked at."""
    whole = model_of("llama", name).train()
    model = split(whole, mesh, name).train()
    problems = []
    for seed, factor in ((0, 0.25), (1, 0.75)):
        batch = tiny_batch(whole, rows=ROWS, seed=seed)
        batch["labels"][2] = -100
        wanted = whole(**batch)
        (wanted.loss * factor).backward()
        found = model(**batch)
        (found.loss * factor).backward()
        problems += differing("loss", found.loss.detach(), wanted.loss.detach(), 1e-5)
        right = (plain(found.logits).argmax(-1) == wanted.logits.argmax(-1)).float().mean()
        problems += [] if found.logits.shape == wanted.logits.shape and right == 1 else ["the logits"]
    expected = {fqn: value.grad for fqn, value in whole.named_parameters()}
    problems += differing_gradients(shardwise.full_gradients(model), expected)
    try:
        found.loss.backward()
    except RuntimeError as error:
        return problems, str(error)
    return problems, ""


@pytest.mark.parametrize(
    ("layout", "name"),
    [("pp2.tp2", "zbv"), ("pp2.fsdp2", "1f1b"), *([("pp2", "1f1b"), ("pp2", "zbv")] if FULL_PRODUCT else [])],
)
def test_loops_by_hand_train_in_microbatches(on_ranks, layout, name):
    for problems, again in on_ranks(loop):
        assert not problems, problems
        assert again


def learn_inputs(mesh):
    """Gradients of embeddings that the caller has made."""
    whole = model_of("llama")
    batch = tiny_batch(whole, rows=4)
    embeds = whole.get_input_embeddings()(batch.pop("input_ids")).detach().requires_grad_()
    return Oracle(whole, {**batch, "inputs_embeds": embeds}).differences(mesh)


@pytest.mark.parametrize("layout", ["pp2"])
def test_inputs_get_their_gradients(on_ranks, layout):
    for problems in on_ranks(learn_inputs):
        assert not problems, problems


def write(mesh, family, name):
    """Tokens that the unsplit and the split model write, greedy and sampled."""
    whole = model_of(family, name) if family not in SEQ2SEQ else seq2seq_of(family, tied=True)
    whole.config.output_router_logits = False  # transformers cannot weigh them with a mask while it generates
    model = split(whole, mesh, name)
    ids = tiny_batch(whole, rows=2, length=7)["input_ids"]
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    found = []
    several = [{"do_sample": False}, {"do_sample": True, "top_k": 8}, {"num_beams": 2}]
    several += [{"cache_implementation": "static"}] if family == "gpt2" else []
    for options in several:
        both = []
        for each in (whole, model):
            torch.manual_seed(3)
            both.append(each.generate(ids, attention_mask=mask, max_new_tokens=4, pad_token_id=0, **options))
        found.append(torch.equal(*both))
    return found


@pytest.mark.parametrize(
    ("layout", "family", "name"),
    [
        ("pp2", "gemma3_text", "zbv"),
        ("pp2", "t5", "interleaved_1f1b"),
        ("pp2.tp2", "mixtral", "gpipe"),
        *[("pp2", "llama", "1f1b"), ("pp2", "gpt2", "1f1b"), ("pp2", "bart", "zbv")] * FULL_PRODUCT,
        *[("pp2.tp2", "t5", "interleaved_1f1b")] * FULL_PRODUCT,
    ],
)
def test_every_rank_writes_the_unsplit_model_s_tokens(on_ranks, layout, family, name):
    for found in on_ranks(write):
        assert all(found), found


def refuse(mesh):
    """What each call that stages cannot serve says on this rank."""
    whole = model_of("llama")
    model = split(whole, mesh, "1f1b")
    batch = tiny_batch(whole, rows=2)
    different = tiny_batch(whole, rows=2, seed=mesh.coord("pp"))
    calls = [
        lambda: model(**batch, output_hidden_states=True),
        lambda: model(**batch, use_cache=True),
        lambda: model(**different),
        lambda: model(input_ids=batch["input_ids"]).logits.sum().backward(),
        lambda: model(**batch).logits.sum().backward(),
        lambda: model(**batch, **{CACHE: transformers.EncoderDecoderCache({}, {})}),
    ]
    said = []
    for call in calls:
        try:
            call()
            said.append("")
        except (shardwise.ShardwiseError, TypeError) as error:
            said.append(str(error).splitlines()[0])
    return said


@pytest.mark.parametrize("layout", ["pp2"])
def test_what_stages_cannot_give_is_the_same_error_on_every_rank(on_ranks, layout):
    first, second = on_ranks(refuse)
    assert first == second
    assert first[:5] == [
        "output_hidden_states=True of a LlamaForCausalLM in stages",
        "use_cache=True of a LlamaForCausalLM in stages, without a cache",
        "tp and pp ranks were given different batches",
        "a gradient of the output of a model in stages other than its loss",
        "a gradient of the output of a model in stages other than its loss",
    ]
