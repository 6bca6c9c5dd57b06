"""Tiny models: small, of the same structure, and running."""

import copy

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, BertConfig, EsmConfig, LlamaConfig, LlamaForCausalLM

from bench.sweep.known import architectures, default_config, model_class
from shardwise.errors import ConfigError, UnsupportedError
from shardwise.tiny.inputs import has_loss
from shardwise.tiny.models import build_tiny_model, make_batch, shrink_config

pytestmark = pytest.mark.single

RUNNING = (
    ("llama", "causal_lm", "LlamaForCausalLM"),
    ("gpt2", "causal_lm", "GPT2LMHeadModel"),
    ("bloom", "causal_lm", "BloomForCausalLM"),
    ("falcon", "causal_lm", "FalconForCausalLM"),
    ("gemma3_text", "causal_lm", "Gemma3ForCausalLM"),
    ("gemma4_text", "causal_lm", "Gemma4ForCausalLM"),
    ("mixtral", "causal_lm", "MixtralForCausalLM"),
    ("deepseek_v3", "causal_lm", "DeepseekV3ForCausalLM"),
    ("qwen3_next", "causal_lm", "Qwen3NextForCausalLM"),
    ("mamba2", "causal_lm", "Mamba2ForCausalLM"),
    ("jamba", "causal_lm", "JambaForCausalLM"),
    ("musicgen", "causal_lm", "MusicgenForCausalLM"),
    ("bert", "masked_lm", "BertForMaskedLM"),
    ("t5", "seq2seq_lm", "T5ForConditionalGeneration"),
    ("bart", "seq2seq_lm", "BartForConditionalGeneration"),
)


def build(model_type, task=None, name=None, seed=0):
    name = name or {kind: cls for kind, _, cls in RUNNING}[model_type]
    config = shrink_config(default_config(model_type, task=task), without_dropout=True)
    return build_tiny_model(config, model_class(name), seed=seed)


@pytest.mark.parametrize(("model_type", "task", "name"), RUNNING, ids=str)
def test_a_tiny_model_trains(model_type, task, name):
    model = build(model_type, task, name)
    assert sum(parameter.numel() for parameter in model.parameters()) < 1_000_000
    loss = model(**make_batch(model, seed=0)).loss
    loss.backward()
    assert torch.isfinite(loss)
    missing = [each for each, parameter in model.named_parameters() if parameter.grad is None]
    # A decoder on its own has cross-attention that nothing feeds.
    assert all("encoder_attn" in each for each in missing)


@pytest.mark.parametrize(("model_type", "task", "name"), RUNNING, ids=str)
def test_no_parameter_is_constant(model_type, task, name):
    for each, parameter in build(model_type, task, name).named_parameters():
        if parameter.requires_grad and parameter.numel() > 1:
            assert parameter.std() > 0.005, each


def test_equal_seeds_give_equal_tiny_models():
    first, second, other = (build("llama", seed=seed).state_dict() for seed in (0, 0, 1))
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not any(torch.equal(first[name], other[name]) for name in first)


def test_building_leaves_the_generator_and_the_deterministic_mode_alone():
    before = torch.get_rng_state(), torch.are_deterministic_algorithms_enabled()
    build("llama")
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1] == torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize(
    ("heads", "key_value_heads", "expected"),
    [(32, 32, (8, 8)), (32, 8, (8, 4)), (32, 2, (8, 2)), (71, 1, (8, 1)), (4, 1, (4, 1)), (4, 2, (4, 2))],
)
def test_the_grouping_of_heads_is_kept(heads, key_value_heads, expected):
    config = LlamaConfig(hidden_size=heads * 64, num_attention_heads=heads, num_key_value_heads=key_value_heads)
    tiny = shrink_config(config)
    assert (tiny.num_attention_heads, tiny.num_key_value_heads) == expected


def test_heads_decoupled_from_the_hidden_size_stay_so():
    coupled = shrink_config(LlamaConfig())
    decoupled = shrink_config(LlamaConfig(head_dim=256))
    assert coupled.num_attention_heads * coupled.head_dim == coupled.hidden_size
    assert decoupled.num_attention_heads * decoupled.head_dim != decoupled.hidden_size


def test_every_kind_of_layer_stays():
    for model_type in ("gemma3_text", "qwen3_next", "deepseek_v3", "gemma3n_text"):
        config = default_config(model_type)
        tiny = shrink_config(config)
        assert tiny.num_hidden_layers <= 6
        for name in ("layer_types", "mlp_layer_types", "activation_sparsity_pattern"):
            if name in vars(config):
                assert set(getattr(tiny, name)) == set(getattr(config, name))
                assert len(getattr(tiny, name)) == tiny.num_hidden_layers


def test_periods_keep_their_phases():
    tiny = shrink_config(default_config("jamba"))
    assert set(tiny.layers_block_type) == set(default_config("jamba").layers_block_type)
    assert {tiny.layers_num_experts[index] for index in range(tiny.num_hidden_layers)} == {1, tiny.num_experts}


def test_layers_that_differ_in_single_fields_keep_their_differences():
    tiny = shrink_config(default_config("gemma4_text"))
    by_kind = {kind: tiny.per_layer_config[index].head_dim for index, kind in enumerate(tiny.layer_types)}
    assert by_kind["full_attention"] == 2 * by_kind["sliding_attention"]


def test_experts_shrink_with_their_routing():
    tiny = shrink_config(default_config("deepseek_v3"))
    assert (tiny.n_routed_experts, tiny.num_experts_per_tok, tiny.n_group, tiny.topk_group) == (4, 2, 2, 1)
    assert tiny.n_shared_experts == 1
    assert tiny.first_k_dense_replace == 1
    assert tiny.qk_head_dim == tiny.qk_nope_head_dim + tiny.qk_rope_head_dim


def test_rotary_lists_fit_the_new_heads():
    settings = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [16, 24, 24]}
    tiny = shrink_config(LlamaConfig(rope_parameters=settings))
    assert sum(tiny.rope_parameters["mrope_section"]) == tiny.head_dim // 2
    assert all(tiny.rope_parameters["mrope_section"])


def test_special_tokens_move_into_the_vocabulary():
    config = LlamaConfig(vocab_size=128256, bos_token_id=128000, eos_token_id=[128001, 128008], pad_token_id=3)
    tiny = shrink_config(config)
    ids = [tiny.bos_token_id, *tiny.eos_token_id, tiny.pad_token_id]
    assert len(set(ids)) == 4
    assert all(token < tiny.vocab_size == 131 for token in ids)


def test_dropout_is_kept_unless_told_otherwise():
    assert shrink_config(BertConfig()).hidden_dropout_prob == 0.1
    assert shrink_config(BertConfig(), without_dropout=True).hidden_dropout_prob == 0.0
    switch = shrink_config(EsmConfig(vocab_size=33, mask_token_id=32, token_dropout=True), without_dropout=True)
    assert switch.token_dropout is True, "it scales embeddings, and draws nothing"


@pytest.mark.parametrize("model_type", sorted(kind for kind, _, _ in RUNNING))
def test_shrinking_changes_no_original_and_nothing_twice(model_type):
    config = default_config(model_type)
    before = copy.deepcopy(config).to_dict()
    tiny = shrink_config(config)
    assert config.to_dict() == before
    assert shrink_config(tiny).to_dict() == tiny.to_dict()


@settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.too_slow])
@given(
    group=st.integers(1, 8),
    key_value_heads=st.integers(1, 8),
    head_dim=st.sampled_from([32, 64, 80, 128]),
    ratio=st.floats(1.0, 6.0),
    layers=st.integers(1, 60),
    tied=st.booleans(),
)
def test_any_llama_shrinks_to_one_that_divides_by_four(group, key_value_heads, head_dim, ratio, layers, tied):
    heads = group * key_value_heads
    hidden = heads * head_dim
    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=int(hidden * ratio),
        num_attention_heads=heads,
        num_key_value_heads=key_value_heads,
        num_hidden_layers=layers,
        tie_word_embeddings=tied,
    )
    tiny = shrink_config(config)
    assert tiny.tie_word_embeddings == tied
    assert tiny.intermediate_size % 8 == 0
    assert tiny.num_attention_heads % tiny.num_key_value_heads == 0
    assert (tiny.num_attention_heads == tiny.num_key_value_heads) == (heads == key_value_heads)
    assert (tiny.num_key_value_heads == 1) == (key_value_heads == 1)
    assert shrink_config(tiny).to_dict() == tiny.to_dict()


@pytest.mark.parametrize("padding", ["left", "right"])
def test_padding_is_masked_and_carries_no_label(padding):
    batch = make_batch(build("llama"), seed=0, padding=padding, batch_size=4)
    assert batch["attention_mask"].sum(1).tolist() == [16, 12, 16, 12]
    assert ((batch["labels"] == -100) == (batch["attention_mask"] == 0)).all()
    assert batch["attention_mask"][1, 0] == (padding == "right")


def test_a_batch_holds_no_special_token():
    model = build("gemma3_text")
    special = {model.config.pad_token_id, model.config.eos_token_id, model.config.bos_token_id}
    assert not special & set(make_batch(model, seed=0, batch_size=64)["input_ids"].unique().tolist())


@pytest.mark.parametrize(
    ("task", "name", "labels"),
    [
        ("sequence_classification", "BertForSequenceClassification", {"labels": (2,)}),
        ("token_classification", "BertForTokenClassification", {"labels": (2, 16)}),
        ("question_answering", "BertForQuestionAnswering", {"start_positions": (2,), "end_positions": (2,)}),
    ],
)
def test_heads_get_their_own_labels(task, name, labels):
    assert ("bert", task, name) in architectures(task)
    model = build("bert", name=name)
    batch = make_batch(model, seed=0)
    assert {key: tuple(batch[key].shape) for key in labels} == labels
    assert torch.isfinite(model(**batch).loss)


@pytest.mark.parametrize(
    ("problem", "shape"),
    [("single_label_classification", (2,)), ("multi_label_classification", (2, 3)), ("regression", (2, 3))],
)
def test_classes_are_labelled_as_the_config_says(problem, shape):
    config = shrink_config(default_config("bert"), without_dropout=True)
    config.num_labels, config.problem_type = 3, problem
    batch = make_batch(model := build_tiny_model(config, model_class("BertForSequenceClassification"), seed=0), seed=0)
    assert tuple(batch["labels"].shape) == shape
    assert has_loss(model, batch)


@pytest.mark.parametrize(
    ("model_type", "name", "shapes"),
    [
        ("bert", "BertForNextSentencePrediction", {"input_ids": (2, 16), "labels": (2,)}),
        ("bert", "BertForPreTraining", {"labels": (2, 16), "next_sentence_label": (2,)}),
        ("albert", "AlbertForPreTraining", {"labels": (2, 16), "sentence_order_label": (2,)}),
        (
            "roberta",
            "RobertaForMultipleChoice",
            {"input_ids": (2, 2, 16), "attention_mask": (2, 2, 16), "labels": (2,)},
        ),
    ],
)
def test_sentences_are_compared(model_type, name, shapes):
    model = build(model_type, name=name)
    batch = make_batch(model, seed=0, padding="left")
    assert {key: tuple(batch[key].shape) for key in shapes} == shapes
    assert has_loss(model, batch)


@pytest.mark.parametrize("model_type", ["bert", "whisper", "wav2vec2"])
def test_a_tiny_model_without_dropout_repeats_its_loss(model_type):
    names = {"bert": "BertForMaskedLM", "whisper": "WhisperForConditionalGeneration", "wav2vec2": "Wav2Vec2ForCTC"}

    def losses(**options):
        model = build_tiny_model(
            shrink_config(default_config(model_type), **options), model_class(names[model_type]), seed=0
        )
        batch = make_batch(model, seed=0)
        return {float(model(**batch).loss.detach()) for _ in range(3)}

    assert len(losses(without_dropout=True)) == 1
    if model_type == "bert":
        assert len(losses()) > 1


@pytest.mark.parametrize(
    ("model_type", "name", "signals"),
    [
        ("vit", "ViTForImageClassification", {"pixel_values": (2, 3, 32, 32)}),
        ("swin", "SwinForImageClassification", {"pixel_values": (2, 3, 64, 64)}),
        ("vivit", "VivitForVideoClassification", {"pixel_values": (2, 32, 3, 32, 32)}),
        ("vjepa2", "VJEPA2ForVideoClassification", {"pixel_values_videos": (2, 4, 3, 32, 32)}),
        ("qwen3_vl_vision", "Qwen3VLVisionModel", {"hidden_states": (32, 384), "grid_thw": (2, 3)}),
        ("cvt", "CvtForImageClassification", {"pixel_values": (2, 3, 64, 64)}),
        ("parakeet_ctc", "ParakeetForCTC", {"input_features": (2, 128, 80), "attention_mask": (2, 128)}),
        ("moonshine", "MoonshineForConditionalGeneration", {"input_values": (2, 6912)}),
        ("clip", "CLIPModel", {"input_ids": (2, 16), "pixel_values": (2, 3, 32, 32)}),
        ("whisper", "WhisperForConditionalGeneration", {"input_features": (2, 80, 128), "decoder_input_ids": (2, 16)}),
        ("wav2vec2", "Wav2Vec2ForCTC", {"input_values": (2, 5760), "labels": (2, 4)}),
    ],
)
def test_images_and_audio(model_type, name, signals):
    model = build(model_type, name=name)
    batch = make_batch(model, seed=0)
    assert {key: tuple(batch[key].shape) for key in signals} == signals
    assert all(torch.isfinite(value).all() for value in model(**batch).values() if isinstance(value, torch.Tensor))


def test_labels_that_a_model_takes_and_does_not_use_give_no_loss():
    bridge, bert = build("bridgetower", name="BridgeTowerModel"), build("bert")
    assert not has_loss(bridge, make_batch(bridge, seed=0))
    assert has_loss(bert, make_batch(bert, seed=0))


def test_boxes_of_every_image_are_no_labels_of_ours():
    assert "labels" not in make_batch(build("rt_detr", name="RTDetrModel"), seed=0)


def test_a_model_without_known_inputs_says_what_it_takes():
    with pytest.raises(UnsupportedError, match="past_values"):
        make_batch(build("patchtst", name="PatchTSTModel"), seed=0)


def test_an_auto_class_builds_too():
    assert (
        type(build_tiny_model(shrink_config(LlamaConfig()), AutoModelForCausalLM, seed=0)).__name__
        == "LlamaForCausalLM"
    )


def test_what_cannot_be_built_says_why():
    with pytest.raises(UnsupportedError, match="no model type 'lama'.*llama"):
        default_config("lama")
    with pytest.raises(UnsupportedError, match="'nougat'"):
        default_config("nougat")
    with pytest.raises(UnsupportedError, match="NoSuchModel"):
        model_class("NoSuchModel")
    with pytest.raises(ConfigError, match="causal_lm"):
        architectures("causal_lmm")
    with pytest.raises(UnsupportedError, match="BertForMaskedLM"):
        build_tiny_model(shrink_config(LlamaConfig()), model_class("BertForMaskedLM"), seed=0)


def test_architectures_are_listed_in_one_order():
    listed = architectures("causal_lm", "masked_lm", "seq2seq_lm")
    assert listed == architectures("causal_lm", "masked_lm", "seq2seq_lm")
    assert len(set(listed)) == len(listed) > 200
    assert ("llama", "causal_lm", "LlamaForCausalLM") in listed


class WithTable(LlamaForCausalLM):
    """A model with a table whose size stands in a field that no rule for tiny models knows."""

    def __init__(self, config):
        super().__init__(config)
        self.table = torch.nn.Parameter(torch.empty(config.rows_of_table, 64))


def test_a_field_that_stays_large_is_refused_before_anything_is_allocated():
    config = shrink_config(LlamaConfig(rows_of_table=2**23))
    with pytest.raises(UnsupportedError, match=r"536,\d+,\d+ elements[\s\S]*table \[8388608, 64\]"):
        build_tiny_model(config, WithTable, seed=0)
