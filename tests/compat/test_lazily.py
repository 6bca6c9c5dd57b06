"""Models that are loaded lazily are those that `from_pretrained` would have loaded, once they are split."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedModel

import shardwise
from shardwise.api.sources import split_lazily
from shardwise.compat.optimum_neuron.distributed import from_pretrained_for_mp, lazy_load_for_parallelism
from shardwise.errors import LoadError, UnsupportedError
from shardwise.plan.options import ParallelSpec
from tests.families import tiny_model

pytestmark = [pytest.mark.single, pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    directory = tmp_path_factory.mktemp("llama")
    tiny_model("llama").save_pretrained(directory)
    return directory


def lazily(directory, auto=AutoModelForCausalLM, **options):
    with lazy_load_for_parallelism(2):
        return auto.from_pretrained(directory, **options)


def split(model):
    with shardwise.Mesh.open("tp1") as mesh:
        split_lazily(model, mesh, ParallelSpec())
    return model


def assert_equal(model, expected):
    found, wanted = shardwise.full_state_dict(model), expected.state_dict()
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert found[name].dtype == value.dtype and torch.equal(found[name], value), name


def test_it_is_the_same_model_once_it_is_split(saved):
    model = lazily(saved)
    assert all(value.is_meta for value in model.parameters()) and not model.training
    assert model._weight_map["model.norm.weight"] == saved / "model.safetensors"
    expected = AutoModelForCausalLM.from_pretrained(saved)
    assert_equal(split(model), expected)
    ids = torch.arange(3, 15).view(2, 6)
    assert torch.equal(model(input_ids=ids).logits, expected(input_ids=ids).logits)


def test_it_is_undone_whatever_happens_inside(saved):
    before = PreTrainedModel.__dict__["from_pretrained"]
    for error in (RuntimeError, KeyboardInterrupt, GeneratorExit):
        with pytest.raises(error), lazy_load_for_parallelism(2), lazy_load_for_parallelism(2):
            raise error
        assert PreTrainedModel.__dict__["from_pretrained"] is before
        assert not nn.Linear(2, 2).weight.is_meta

    def stopped():
        with lazy_load_for_parallelism(2):
            yield nn.Linear(2, 2).weight.is_meta

    generator = stopped()
    assert next(generator)
    generator.close()
    assert PreTrainedModel.__dict__["from_pretrained"] is before and not nn.Linear(2, 2).weight.is_meta


def test_modules_are_built_without_memory():
    with lazy_load_for_parallelism(2):
        modules = nn.Linear(2, 3), nn.Embedding(4, 2), nn.LayerNorm(2), nn.Linear(2, 2, device="cpu")
    assert [all(each.is_meta for each in module.parameters()) for module in modules] == [True, True, True, False]


def test_a_model_of_a_config_starts_as_it_would_at_any_layout():
    config = tiny_model("gpt2", tied=True).config
    with lazy_load_for_parallelism(2):
        model = AutoModelForCausalLM.from_config(config)
    assert model.lm_head.weight.is_meta and model.lm_head.weight is model.transformer.wte.weight
    torch.manual_seed(7)
    split(model)
    with shardwise.Mesh.open("tp1") as mesh:
        expected = shardwise.load(config, mesh, seed=7)
    assert_equal(model, expected)
    assert model.lm_head.weight is model.transformer.wte.weight


def test_keywords_are_honoured(saved, tmp_path):
    for name in ("torch_dtype", "dtype"):
        assert split(lazily(saved, **{name: torch.bfloat16})).dtype is torch.bfloat16
    model, info = lazily(saved, AutoModelForSequenceClassification, output_loading_info=True, num_labels=5)
    assert info["missing_keys"] == {"score.weight"} and info["unexpected_keys"] == {"lm_head.weight"}
    assert info["mismatched_keys"] == set() and info["error_msgs"] == []
    assert split(model).score.weight.shape == (5, 64) and bool(model.score.weight.std() > 0)
    assert lazily(saved, attn_implementation="eager").config._attn_implementation == "eager"
    (tmp_path / "sub").mkdir()
    tiny_model("llama").save_pretrained(tmp_path / "sub", variant="fp16")
    other = lazily(tmp_path, subfolder="sub", variant="fp16")
    assert_equal(split(other), tiny_model("llama"))
    config = AutoConfig.from_pretrained(saved)
    config.vocab_size = 90
    with pytest.raises(LoadError, match="of another shape"):
        lazily(saved, config=config)
    _, info = lazily(saved, config=config, ignore_mismatched_sizes=True, output_loading_info=True)
    assert ("lm_head.weight", (96, 64), (90, 64)) in info["mismatched_keys"]


@pytest.mark.parametrize(
    "options", [{"device_map": "auto"}, {"quantization_config": object()}, {"state_dict": {"a": 1}}]
)
def test_what_cannot_be_had_is_refused(saved, options):
    with pytest.raises(UnsupportedError, match=next(iter(options))):
        from_pretrained_for_mp(transformers.LlamaForCausalLM, saved, **options)
    with pytest.raises(LoadError):
        from_pretrained_for_mp(transformers.LlamaForCausalLM, saved / "nowhere")


def test_a_class_reads_its_own_part_of_a_config(tmp_path):
    text = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "vocab_size": 60,
    }
    config = transformers.CLIPConfig(text_config=text, vision_config={**text, "image_size": 8, "patch_size": 4})
    transformers.CLIPModel(config).save_pretrained(tmp_path)
    model = from_pretrained_for_mp(transformers.CLIPTextModel, tmp_path)
    assert model.config.vocab_size == 60
    assert_equal(split(model), transformers.CLIPTextModel.from_pretrained(tmp_path))


def test_a_copy_is_filled_and_a_wrapper_is_refused(saved):
    copied = copy.deepcopy(lazily(saved))
    assert_equal(split(copied), AutoModelForCausalLM.from_pretrained(saved))
    wrapper = nn.Sequential(lazily(saved))
    with pytest.raises(UnsupportedError, match="0 was loaded lazily"), shardwise.Mesh.open("tp1") as mesh:
        split_lazily(wrapper, mesh, ParallelSpec())


def test_adapters_that_came_later_start_as_peft_has_them(saved):
    import peft

    model = peft.get_peft_model(lazily(saved), peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    assert all(value.is_meta for value in model.parameters())
    split(model)
    parts = dict(model.named_parameters())
    assert all(bool((value == 0).all()) for name, value in parts.items() if "lora_B" in name)
    assert all(bool(value.std() > 0) and value.requires_grad for name, value in parts.items() if "lora_A" in name)
    stored = load_file(saved / "model.safetensors")
    base = parts["base_model.model.model.layers.0.self_attn.q_proj.base_layer.weight"]
    assert torch.equal(base, stored["model.layers.0.self_attn.q_proj.weight"]) and not base.requires_grad


def test_an_adapter_that_is_read_into_a_lazy_model_keeps_its_values(saved, tmp_path):
    import peft

    config = peft.LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["lm_head"], init_lora_weights=False)
    whole = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(saved), config)
    whole.save_pretrained(tmp_path)
    model = peft.PeftModel.from_pretrained(lazily(saved), tmp_path, is_trainable=True)
    held = {name for name, value in model.named_parameters() if not value.is_meta}
    assert held == {name for name, value in whole.named_parameters() if value.requires_grad}
    assert_equal(split(model), whole)


def test_a_tied_weight_stays_one_when_a_state_dict_has_it_under_one_name(tmp_path):
    tied = tiny_model("llama", tied=True)
    tied.save_pretrained(tmp_path)
    expected, model = AutoModelForCausalLM.from_pretrained(tmp_path), lazily(tmp_path)
    state = {"model.embed_tokens.weight": expected.lm_head.weight.detach() + 1}
    for each in (expected, model):
        each.load_state_dict(state, strict=False)
    assert_equal(split(model), expected)


def test_damage_is_told_before_anything_is_split(saved, tmp_path):
    AutoConfig.from_pretrained(saved).save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes((saved / "model.safetensors").read_bytes()[:-8])
    with pytest.raises(LoadError, match="model.safetensors"):
        split(lazily(tmp_path))
