"""Hidden states and attention weights that a split model hands out are the unsplit model's, and so are gradients that
come in through them.
"""

from __future__ import annotations

import copy
import functools

import pytest
import torch
import transformers
from torch.distributed.tensor import DTensor

import shardwise
from shardwise.errors import UnsupportedError
from shardwise.ranks.spawn import spawn
from tests.families import FULL_PRODUCT, checkpoint_layers, tiny_batch, tiny_model
from tests.oracle import differing, differing_gradients

pytestmark = pytest.mark.spawn


def bart():
    config = transformers.BartConfig(
        vocab_size=96, d_model=64, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=96, decoder_ffn_dim=96, max_position_embeddings=64, dropout=0.0,
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.BartForConditionalGeneration._from_config(config, attn_implementation="eager").eval()


MODELS = {
    "llama": functools.partial(tiny_model, "llama"),
    "gpt2": functools.partial(tiny_model, "gpt2"),
    "bert": functools.partial(tiny_model, "bert"),
    "bart": bart,
}
SPLITS = {name: (False, True) if FULL_PRODUCT or name == "llama" else (name != "gpt2",) for name in MODELS}
"""Whether the sequence is split, too: parts of it are handed out in more ways, and of one stack they are as of two."""
ASKED = {"output_hidden_states": True, "output_attentions": True}


def tensors_of(output):
    """All that is handed out beside the loss, by name."""
    found = {}
    for name, value in output.items():
        for number, each in enumerate(value if isinstance(value, tuple) else [value]):
            if isinstance(each, torch.Tensor) and each.ndim and "past" not in name:
                found[f"{name} {number}"] = each
    return found


def objective(output):
    """A loss that every tensor has part in."""
    return sum((each * 1.0).square().mean() for each in tensors_of(output).values())


def asked(model, batch):
    return model(**batch, **ASKED)


def without_labels(model, batch):
    return model(input_ids=batch["input_ids"], **ASKED)


def base_model(model, batch):
    return model.base_model(batch["input_ids"], output_hidden_states=True)


def base_model_alone(model, batch):
    return model.base_model(batch["input_ids"])


def by_config(model, batch):
    model.config.output_hidden_states = True
    output = model(**batch)
    model.config.output_hidden_states = False
    return output


def as_tuple(model, batch):
    _, logits, hidden_states, attentions = model(**batch, **ASKED, use_cache=False, return_dict=False)[:4]
    return {"logits": logits, "hidden_states": hidden_states, "attentions": attentions}


WAYS = (asked, without_labels, base_model, base_model_alone, by_config, as_tuple)


def compare(name, layout):
    with shardwise.Mesh.open(layout) as mesh:
        whole = MODELS[name]()
        found = {}
        for sequence_parallel in SPLITS[name]:
            split = shardwise.parallelize(copy.deepcopy(whole), mesh, sequence_parallel=sequence_parallel)
            for way in WAYS:
                found[way.__name__, sequence_parallel] = problems_of(way, whole, split)
        return found


def problems_of(way, whole, split):
    batch = tiny_batch(whole)
    whole.zero_grad()
    split.zero_grad()
    outputs = way(whole, batch), way(split, batch)
    wanted, given = map(tensors_of, outputs)
    problems = [f"only one side has {each}" for each in set(wanted) ^ set(given)]
    for each, value in wanted.items():
        ours = given[each].detach()
        ours = ours.full_tensor() if isinstance(ours, DTensor) else ours
        problems += differing(each, ours, value.detach(), 1e-4)
    if problems:
        return problems
    for output in outputs:
        objective(output).backward()
    expected = {key: each.grad for key, each in whole.named_parameters() if each.grad is not None}
    return differing_gradients(shardwise.full_gradients(split), expected)


@pytest.fixture(scope="module")
def found(request):
    return spawn(compare, 2, request.param, "tp2", timeout=120)


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
@pytest.mark.parametrize(
    ("found", "sequence_parallel"),
    [(name, split) for name in MODELS for split in SPLITS[name]],
    indirect=["found"],
    scope="module",
)
def test_what_is_handed_out_is_the_unsplit_models(found, way, sequence_parallel):
    assert [rank[way.__name__, sequence_parallel] for rank in found] == [[], []]


BLOCKS = {
    "recomputed": {"recompute": shardwise.Recompute(mode="full")},
    "compiled": {"compilation": shardwise.Compile(backend="aot_eager")},
    "traced": {"compilation": shardwise.Compile(backend="eager")},
    "checkpointed by transformers": {},
}


def with_blocks(mesh, kind, name):
    """The same where blocks hide what they do from autograd."""
    whole = MODELS[name]().train()
    split = shardwise.parallelize(copy.deepcopy(whole), mesh, sequence_parallel=True, **BLOCKS[kind])
    if kind == "checkpointed by transformers":
        checkpoint_layers(split)
    return problems_of(base_model_alone, whole, split)


# torch's tracing warns of what it does itself.
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("kind", [kind for kind in BLOCKS if kind != ("traced" if FULL_PRODUCT else "compiled")])
def test_blocks_that_run_again_or_are_compiled_hand_out_the_same(on_ranks, kind):
    assert on_ranks(with_blocks, layout="tp2", name="llama") == [[], []]


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
def test_of_several_stacks_too(on_ranks):
    kind = "compiled" if FULL_PRODUCT else "recomputed"
    assert on_ranks(with_blocks, layout="tp2", kind=kind, name="bart") == [[], []]


class Penalized(transformers.LlamaForCausalLM):
    """With a loss of hidden states beside that of its split head, and one that adds up both."""

    def forward(self, input_ids):
        hidden = self.model(input_ids).last_hidden_state
        logits = self.lm_head(hidden)
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), input_ids.flatten())
        penalty = hidden.square().mean()
        return {"loss": loss + penalty, "penalty": penalty, "logits": logits}


def two_losses(mesh):
    whole = Penalized(tiny_model("llama").config)
    split = shardwise.parallelize(copy.deepcopy(whole), mesh, sequence_parallel=True)
    ids = tiny_batch(whole)["input_ids"]
    for model in (whole, split):
        output = model(ids)
        (output["loss"] + 0.5 * output["penalty"]).backward()
    expected = {name: each.grad for name, each in whole.named_parameters()}
    return differing_gradients(shardwise.full_gradients(split), expected)


def test_a_loss_of_hidden_states_beside_that_of_a_split_head(on_ranks):
    assert on_ranks(two_losses, layout="tp2") == [[], []]


def one_token():
    with shardwise.Mesh.open("tp2") as mesh:
        whole = tiny_model("llama")
        split = shardwise.parallelize(copy.deepcopy(whole), mesh, sequence_parallel=True)
        ids = tiny_batch(whole, length=1)["input_ids"]
        with torch.no_grad():
            pairs = zip(
                split(ids, output_hidden_states=True).hidden_states,
                whole(ids, output_hidden_states=True).hidden_states,
                strict=True,
            )
            problems = [problem for ours, theirs in pairs for problem in differing("state", ours, theirs, 1e-5)]
        try:
            split(ids, output_hidden_states=True)
        except UnsupportedError as error:
            return problems, str(error)
    return problems, ""


def test_a_single_token_is_full_where_no_gradient_asks_whose_it_is():
    for problems, said in spawn(one_token, 2):
        assert problems == [] and "leave out output_hidden_states" in said
