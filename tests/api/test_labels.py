"""A model that sees what it is to predict is not trained; labels are counted as the model's own loss uses them."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

import shardwise
from shardwise.errors import UnsupportedError
from shardwise.loss.label_use import LabelUse
from shardwise.probe import disk_cache, label_use
from shardwise.probe.label_use import find_label_use, probe_label_use
from shardwise.ranks.spawn import spawn
from shardwise.tiny.models import shrink_config
from tests.families import COMMON, MOE, tiny_batch, tiny_model
from tests.oracle import differing, differing_gradients

SEES, FINE, UNSHIFTED = (
    LabelUse(shifts=True, sees_target=True),
    LabelUse(shifts=True, sees_target=False),
    LabelUse(shifts=False, sees_target=False),
)
CASES = {
    "bert": ("bert", {}, SEES),
    "bert, a decoder": ("bert", {"is_decoder": True}, FINE),
    "roberta": ("roberta", {}, SEES),
    "xlnet": ("xlnet", {"n_layer": 2, "d_model": 64, "n_head": 4, "d_inner": 96}, UNSHIFTED),
    "xlnet, rows of two kinds": (
        "xlnet",
        {"n_layer": 2, "d_model": 64, "n_head": 4, "d_inner": 96, "bi_data": True},
        LabelUse(shifts=False, sees_target=False, divides=False),
    ),
    "llama": ("llama", {}, FINE),
    "gpt2": ("gpt2", {"n_layer": 2, "n_embd": 64, "n_head": 4}, FINE),
    "mixtral": ("mixtral", {**MOE, "output_router_logits": True}, FINE),
    "gemma3_text": ("gemma3_text", {}, FINE),
    "gemma3_text, bidirectional": ("gemma3_text", {"use_bidirectional_attention": True}, SEES),
    "mamba": ("mamba", {}, FINE),
    "bart's decoder": ("bart", {"d_model": 64, "decoder_layers": 2, "decoder_attention_heads": 4}, UNSHIFTED),
}


def build(model_type, options, seed=0):
    missing = {"mamba": ("intermediate_size",), "xlnet": ("max_position_embeddings",)}.get(model_type, ())
    values = {name: value for name, value in COMMON.items() if name not in missing}
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(model_type, **values | options)).eval()


@pytest.mark.single
@pytest.mark.parametrize("case", CASES)
def test_a_tiny_model_shows_what_labels_are_for(case):
    model_type, options, expected = CASES[case]
    assert probe_label_use(build(model_type, options)) == expected


@pytest.mark.single
@pytest.mark.parametrize("case", ["two heads", "images and text", "encoder and decoder"])
def test_heads_whose_class_does_not_say_are_tried(case):
    small = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    if case == "two heads":
        model = transformers.GPT2DoubleHeadsModel(
            transformers.GPT2Config(vocab_size=96, n_embd=32, n_layer=1, n_head=2)
        )
    elif case == "images and text":
        seen, read = transformers.CLIPVisionConfig(**small), transformers.LlamaConfig(vocab_size=96, **small)
        config = transformers.LlavaConfig(vision_config=seen, text_config=read, image_token_index=95)
        model = transformers.LlavaForConditionalGeneration(config)
    else:
        sizes = {"d_model": 32, "d_kv": 16, "d_ff": 32, "num_layers": 1, "num_heads": 2}
        model = transformers.T5ForConditionalGeneration(transformers.T5Config(vocab_size=96, **sizes))
    assert probe_label_use(model) == (UNSHIFTED if case == "encoder and decoder" else FINE)


@pytest.mark.single
def test_what_is_no_causal_model_shows_nothing():
    assert probe_label_use(torch.nn.Linear(2, 2)) is find_label_use(torch.nn.Linear(2, 2)) is None


@pytest.mark.single
@pytest.mark.parametrize("expected", [FINE, SEES, None])
def test_what_was_found_is_kept_for_models_of_the_same_config(expected, monkeypatch, tmp_path):
    monkeypatch.setattr(disk_cache.constants, "HF_HOME", str(tmp_path))
    probed = []
    monkeypatch.setattr(label_use, "probe_label_use", lambda model: probed.append(model) or expected)
    first, same, other = (build("llama", options) for options in ({}, {}, {"num_attention_heads": 8}))
    assert [label_use.find_label_use(each) for each in (first, same, other, same)] == [expected] * 4
    assert probed == [first, other]
    for path in (tmp_path / "shardwise" / "plans").iterdir():
        path.write_text('{"shifts": 1}')  # not what we write
    assert label_use.find_label_use(same) == expected and probed == [first, other, same]


def train_encoder(layout):
    """What is said to an encoder that is trained as a causal model, by `TrainStep` and in a loop of one's own."""
    with shardwise.Mesh.open(layout) as mesh:
        model = shardwise.parallelize(build("bert", {}), mesh).train()
        batch = tiny_batch(model)
        said = []
        with pytest.raises(UnsupportedError) as raised:
            shardwise.TrainStep(model, mesh)
        said.append(str(raised.value))
        with pytest.raises(UnsupportedError) as raised:
            model(**batch)
        said.append(str(raised.value))
        model.eval()(**batch)  # a loss may be looked at
        decoder = shardwise.parallelize(build("bert", {"is_decoder": True}), mesh)
        return said, float(shardwise.TrainStep(decoder, mesh)(batch).loss)


@pytest.mark.spawn
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_an_encoder_is_not_trained_as_a_causal_model(num_ranks):
    for said, loss in spawn(train_encoder, num_ranks, f"tp{num_ranks}", timeout=120):
        assert all("is_decoder=True in its config" in text for text in said) and 3 < loss < 6


def count_labels():
    """What microbatches of a model whose loss shifts nothing come to, beside the batch in one piece."""
    with shardwise.Mesh.open("tp1") as mesh:
        halves = shardwise.parallelize(build("xlnet", CASES["xlnet, rows of two kinds"][1]), mesh)
        shardwise.TrainStep(halves, mesh)
        with pytest.raises(UnsupportedError, match="in 2 parts"):
            shardwise.TrainStep(halves, mesh, num_microbatches=2)
        unsplit = build("xlnet", CASES["xlnet"][1])
        model = shardwise.parallelize(copy.deepcopy(unsplit), mesh)
        batch = tiny_batch(unsplit, rows=4)
        batch["labels"][:2, 1:9] = -100
        loss = unsplit(**batch).loss
        loss.backward()
        result = shardwise.TrainStep(model, mesh, num_microbatches=2)(batch)
        expected = {name: each.grad for name, each in unsplit.named_parameters() if each.grad is not None}
        problems = differing("loss", result.loss, loss.detach(), 1e-5)
        return problems + differing_gradients(shardwise.full_gradients(model), expected), result.num_tokens


@pytest.mark.single
@pytest.mark.parametrize(
    ("name", "divides"),
    [
        ("ElectraForPreTraining", False),  # where the mask is 1 alone
        ("SplinterForPreTraining", False),  # positions but that of the padding token's number
        ("BertForPreTraining", True),
        ("BertForNextSentencePrediction", True),
        ("BertForMultipleChoice", True),
    ],
)
def test_a_loss_that_its_class_does_not_tell_is_tried_in_parts(name, divides):
    kind = getattr(transformers, name)
    model = kind(shrink_config(kind.config_class()))
    assert probe_label_use(model) == LabelUse(shifts=False, sees_target=False, divides=divides)


@pytest.mark.spawn
def test_labels_that_are_not_shifted_all_count():
    ((problems, num_tokens),) = spawn(count_labels, 1)
    assert problems == [] and num_tokens == int((tiny_batch(tiny_model("llama"), rows=4)["labels"] != -100).sum()) - 14
