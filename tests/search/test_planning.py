"""Models that nobody registered: their plans are derived from structure, tried, kept, and train exactly."""

from __future__ import annotations

import re

import peft
import pytest
import torch
import transformers
from huggingface_hub import constants
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

import shardwise
from bench.sweep.known import default_config, model_class
from shardwise.errors import PlanError
from shardwise.parallel.facts import read_facts
from shardwise.plan.options import ParallelSpec
from shardwise.plan.resolve import rules_without_names
from shardwise.plan.spec import Plan
from shardwise.probe.disk_cache import cache_path
from shardwise.proof.parity import measure
from shardwise.ranks.spawn import spawn
from shardwise.search import planning
from shardwise.search.planning import declared_plan, plan_for
from shardwise.tiny.models import build_tiny_model, shrink_config
from tests.families import tiny_model


class ZebraConfig(PreTrainedConfig):
    model_type = "zebra"

    def __init__(self, stripes=4, width=32, herd=53, depth=2, **kwargs):
        super().__init__(**kwargs)
        self.stripes, self.width, self.vocab_size, self.depth = stripes, width, herd, depth


class Gallop(nn.Module):
    """Attention with a fused [value | query | key], explicit head counts, a gate, and a bias column for each head."""

    def __init__(self, config):
        super().__init__()
        self.how_many = config.stripes
        self.each = config.width // config.stripes
        self.fused = nn.Linear(config.width, 3 * config.width)
        self.gate = nn.Linear(config.width, config.width)
        self.distance = nn.Embedding(16, config.stripes)
        self.back = nn.Linear(config.width, config.width)

    def forward(self, grass):
        rows, length, _ = grass.shape
        value, query, key = (
            part.view(rows, length, self.how_many, self.each).transpose(1, 2) for part in self.fused(grass).chunk(3, -1)
        )
        steps = (torch.arange(length)[:, None] - torch.arange(length)).abs().clamp(max=15)
        scores = query @ key.transpose(-1, -2) / self.each**0.5 + self.distance(steps).permute(2, 0, 1)
        scores = scores.masked_fill(torch.ones(length, length, dtype=torch.bool).triu(1), -torch.inf)
        out = (scores.softmax(-1) @ value).transpose(1, 2).reshape(rows, length, self.how_many * self.each)
        return self.back(out * torch.sigmoid(self.gate(grass)))


class Stride(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.calm = nn.LayerNorm(config.width)
        self.gallop = Gallop(config)
        self.rest = nn.LayerNorm(config.width)
        self.wide = nn.Linear(config.width, 4 * config.width)
        self.narrow = nn.Linear(4 * config.width, config.width)

    def forward(self, grass):
        grass = grass + self.gallop(self.calm(grass))
        return grass + self.narrow(nn.functional.gelu(self.wide(self.rest(grass))))


class ZebraForCausalLM(PreTrainedModel):
    config_class = ZebraConfig

    def __init__(self, config):
        super().__init__(config)
        self.savanna = nn.Embedding(config.vocab_size, config.width)
        self.strides = nn.ModuleList(Stride(config) for _ in range(config.depth))
        self.voice = nn.Linear(config.width, config.vocab_size, bias=False)
        self.post_init()

    def _init_weights(self, module):
        pass

    def get_input_embeddings(self):
        return self.savanna

    def get_output_embeddings(self):
        return self.voice

    def forward(self, input_ids, labels=None, **kwargs):
        grass = self.savanna(input_ids)
        for stride in self.strides:
            grass = stride(grass)
        logits = self.voice(grass)
        loss = None
        if labels is not None:
            loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return CausalLMOutput(loss=loss, logits=logits)


def train_zebra(layout):
    with shardwise.Mesh.open(layout) as mesh:
        torch.manual_seed(0)
        whole = ZebraForCausalLM(ZebraConfig()).eval()
        ids = torch.randint(0, 53, (2, 12), generator=torch.Generator().manual_seed(1))
        return measure(
            whole,
            {"input_ids": ids, "labels": ids},
            mesh,
            split=shardwise.parallelize,
            step=lambda model, mesh, batch: shardwise.TrainStep(model, mesh)(batch).loss,
            num_steps=3,
        )


@pytest.mark.spawn
@pytest.mark.parametrize("layout", ["tp2"])  # for more ranks plans of such models are derived in test_rules.py
def test_a_model_that_nobody_registered_is_derived_and_trains_exactly(layout):
    for found in spawn(train_zebra, int(layout[2:]), layout):
        assert found.passed, found
        assert found.block_share > 0.9, found.replicated


def small(model_type="gpt2", **values):
    config = transformers.AutoConfig.for_model(model_type, **values)
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(config)


GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 61, "n_positions": 64}


@pytest.mark.single
def test_a_derived_plan_is_kept_and_found_again(tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "HF_HOME", str(tmp_path))
    derived, search = [], planning.search_plan

    def search_once(*args, **rest):
        derived.append(derived[0] if derived else search(*args, **rest))
        return derived[0]

    monkeypatch.setattr(planning, "search_plan", search_once)
    first = plan_for(small(**GPT2), ParallelSpec(plan="auto"), num_parts=2)
    assert plan_for(small(**GPT2), ParallelSpec(plan="auto"), num_parts=2) == first
    assert len(derived) == 1
    (kept,) = (tmp_path / "shardwise" / "plans").iterdir()
    assert plan_for(small(**GPT2), ParallelSpec(plan="derived"), num_parts=2) == first
    assert len(derived) == 2, "asked for again"
    kept.write_text("{ damaged")
    assert plan_for(small(**GPT2), ParallelSpec(plan="auto"), num_parts=2) == first
    assert len(derived) == 3, "a damaged file is derived again"


@pytest.mark.single
def test_plans_of_large_models_come_from_tiny_ones_and_cover_all_layers(tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "HF_HOME", str(tmp_path))
    plan = plan_for(small(n_embd=1024, n_layer=24, n_head=16), ParallelSpec(plan="auto"), num_parts=2)
    styles = {rule.pattern: rule.style for rule in plan.rules}
    assert styles["transformer.h.*.attn.c_attn"] == "split(1, sections=3)"
    assert styles["transformer.h.*.mlp.c_proj"] == "rowwise"
    assert Plan.parse(str(plan)) == plan


@pytest.mark.single
def test_without_derivation_a_model_that_declares_nothing_is_an_error_that_teaches(tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "HF_HOME", str(tmp_path))
    with pytest.raises(PlanError, match="GPT2LMHeadModel") as error:
        plan_for(small(**GPT2), ParallelSpec(plan="declared"), num_parts=2)
    assert '"colwise"' in str(error.value)
    rules = {"transformer.h.*.mlp.c_fc": "colwise", "transformer.h.*.mlp.c_proj": "rowwise"}
    assert len(plan_for(small(**GPT2), ParallelSpec(plan=rules), num_parts=2).rules) > len(rules), (
        "rules lie on top of what is derived"
    )


WRONG_RULES = {
    "wrong numbers, on a derived plan": ("gpt2", {"transformer.h.*.attn.c_attn": "split(1)"}, "h.*.attn|gradient|loss"),
    "code that fails, on a proved plan": ("llama", {"model.layers.*.mlp.up_proj": "replicate"}, "mlp"),
    "of one layer of many": ("llama", {"model.layers.2.mlp.up_proj": "replicate"}, "model.layers.2.mlp"),
    "wrong numbers, on a proved plan": ("llama", {"model.norm": "replicated_with_grad_allreduce"}, "model.norm"),
}


@pytest.mark.single
@pytest.mark.parametrize("case", WRONG_RULES)
def test_rules_of_the_user_that_compute_something_else_are_an_error(case):
    family, rules, says = WRONG_RULES[case]
    model = small(**GPT2) if family == "gpt2" else tiny_model(family, num_hidden_layers=4)
    with pytest.raises(PlanError, match="rules given for .* give other results") as error:
        plan_for(model, ParallelSpec(plan=rules), num_parts=2)
    assert re.search(says, f"{error.value.at}\n{error.value.why}")


@pytest.mark.single
def test_a_search_that_fails_is_an_error_with_rules_of_the_user_too():
    config = shrink_config(default_config("xlm", task="masked_lm"), without_dropout=True)
    model = build_tiny_model(config, model_class("XLMWithLMHeadModel"), seed=0)
    rules = {"transformer.layer_norm_emb": "replicate"}
    with pytest.raises(PlanError, match="XLMWithLMHeadModel cannot be split along the sequence"):
        plan_for(model, ParallelSpec(plan=rules, sequence_parallel=True), num_parts=2)


@pytest.mark.single
def test_rules_that_cannot_be_tried_are_used_with_a_warning(caplog):
    plan = plan_for(nn.Sequential(nn.Linear(8, 8)), ParallelSpec(plan={"0": "colwise_gather_output"}), num_parts=2)
    assert [rule.pattern for rule in plan.rules] == ["0"]
    assert "used untried" in caplog.text and "no transformers model" in caplog.text


@pytest.mark.single
def test_a_plan_with_untried_rules_is_not_cached(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(constants, "HF_HOME", str(tmp_path))
    monkeypatch.setattr(planning, "rules_without_names", lambda given, facts: given.rules)
    for _ in range(2):
        plan_for(small(**GPT2), ParallelSpec(plan={"transformer.h.*.mlp": "replicate"}), num_parts=2)
        assert "are used untried" in caplog.text
        caplog.clear()


@pytest.mark.single
def test_plans_of_other_attention_of_a_sub_config_are_cached_apart():
    def path(**implementations):
        text = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
        text |= {"projection_dim": 16, "vocab_size": 60}
        config = transformers.CLIPConfig(text_config=text, vision_config={**text, "image_size": 8, "patch_size": 4})
        model = transformers.CLIPModel(config)
        for name, value in implementations.items():
            setattr(model.config.text_config, name, value)
        return cache_path(model, "plan", {})

    assert path() == path()
    assert len({path(), path(_attn_implementation="eager"), path(_experts_implementation="grouped_mm")}) == 3


@pytest.mark.single
def test_code_that_is_not_of_transformers_is_tried_whatever_its_model_type(monkeypatch):
    """A class of the hub has the config of Llama and another attention."""

    class LlamaForCausalLM(transformers.LlamaForCausalLM):
        def __init__(self, config):
            super().__init__(config)
            for layer in self.model.layers:
                layer.self_attn.o_proj.register_forward_pre_hook(lambda module, args: (args[0].flip(-1),))

    LlamaForCausalLM.__module__ = "transformers_modules.llama"
    model = LlamaForCausalLM(tiny_model("llama").config)
    plan = plan_for(model, ParallelSpec(), num_parts=2)
    assert "model.layers.*.self_attn.q_proj: colwise" not in str(plan)  # the ranks' heads are in the other order
    assert "model.layers.*.mlp.down_proj: rowwise" in str(plan)

    class Square(nn.Module):
        def forward(self, x):
            return x * x

    exchanged = tiny_model("llama")
    exchanged.model.layers[1].mlp.act_fn = Square()
    tried = []
    monkeypatch.setattr(planning, "search_plan", lambda *args, **rest: tried.append(args[0]) or 1 / 0)
    with pytest.raises(ZeroDivisionError):
        plan_for(exchanged, ParallelSpec(), num_parts=2)


class Knot(nn.Module):
    """Every output depends on every weight through a matrix inverse: nothing here falls into parts."""

    def __init__(self):
        super().__init__()
        self.rope = nn.Linear(8, 8)

    def forward(self, x):
        return x @ torch.linalg.inv(self.rope.weight + 3 * torch.eye(8))


@pytest.mark.single
def test_something_that_is_no_transformers_model_says_what_to_do():
    with pytest.raises(PlanError, match="no tensor-parallel plan is known for Knot") as error:
        plan_for(Knot(), ParallelSpec(plan="auto"), num_parts=2)
    assert "give rules" in str(error.value)


def adapted():
    return peft.LoraConfig(target_modules=["q_proj", "v_proj"])


@pytest.mark.single
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")  # what peft asks transformers for
def test_a_proved_plan_that_splits_nothing_in_a_wrapped_model_is_an_error():
    wrapped = peft.get_peft_model(tiny_model("llama"), adapted())
    for asked in ("auto", "declared"):
        with pytest.raises(PlanError, match="the rules declared for PeftModel match nothing") as error:
            plan_for(wrapped, ParallelSpec(plan=asked), num_parts=2)
        assert 'colwise_gather_output" (transformers)' in str(error.value)
        assert "before anything is put around it" in str(error.value)


@pytest.mark.single
def test_a_proved_family_with_adapters_inside_has_the_plan_of_its_base(caplog):
    model = peft.inject_adapter_in_model(adapted(), tiny_model("llama"))
    assert plan_for(model, ParallelSpec(), num_parts=2) == plan_for(tiny_model("llama"), ParallelSpec(), num_parts=2)
    assert not caplog.text


@pytest.mark.single
@pytest.mark.parametrize(
    ("family", "values"),
    [("qwen3_moe", {"mlp_only_layers": [0, 1]}), ("qwen3_moe", {"mlp_only_layers": []}), ("deepseek_v3", {})],
)
def test_rules_for_layers_that_a_config_has_not_are_idle_without_a_word(family, values, caplog):
    model = tiny_model(family, **values)
    facts = read_facts(model)
    declared = declared_plan(model, facts)
    assert 0 < len(rules_without_names(declared, facts)) < len(declared.rules)


@pytest.mark.single
@pytest.mark.skipif("dots3_note" not in transformers.CONFIG_MAPPING, reason="transformers has no such model")
def test_a_config_that_differs_by_layer_is_planned():
    config = shrink_config(default_config("dots3_note", task="causal_lm"), without_dropout=True)
    model = build_tiny_model(config, model_class("Dots3NoteForCausalLM"), seed=0)
    assert plan_for(model, ParallelSpec(plan="derived"), num_parts=2).rules


@pytest.mark.single
def test_modules_made_in_a_forward_draw_weights_that_count_nothing():
    config = shrink_config(default_config("big_bird", task="masked_lm"), without_dropout=True)
    model = build_tiny_model(config, model_class("BigBirdForMaskedLM"), seed=0)  # short rows switch its attention
    assert plan_for(model, ParallelSpec(plan="derived"), num_parts=2).rules
