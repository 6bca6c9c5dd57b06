"""Plans along the sequence: what runs when decides, whatever the order of registration, and what mixes is given all."""

from __future__ import annotations

import copy
import functools
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

from bench.sweep.known import default_config, model_class
from shardwise.errors import PlanError
from shardwise.parallel.facts import read_facts
from shardwise.plan.regions import Region, find_sequence
from shardwise.plan.resolve import resolve
from shardwise.plan.rule import InputRule, ParameterRule, SequenceRule
from shardwise.plan.spec import Plan
from shardwise.plan.structure import LayerStack
from shardwise.probe.trial import Trial
from shardwise.search.deriving import Candidate, widen_regions
from shardwise.search.generalize import generalize
from shardwise.search.rules import _choices
from shardwise.tiny.models import build_tiny_model, make_batch, shrink_config
from tests.families import FULL_PRODUCT, derive_plan

pytestmark = pytest.mark.single

WIDTH, HEADS, VOCABULARY = 32, 4, 48


class Looking(nn.Module):
    """Attention that adds what it is given to pass by."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = HEADS
        self.query, self.key, self.value, self.away = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, stream: Tensor, passing: Tensor, context: Tensor | None = None) -> Tensor:
        other = stream if context is None else context
        query, key, value = (
            each(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for each, x in ((self.query, stream), (self.key, other), (self.value, other))
        )
        return passing + self.away(F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2))


class Smear(nn.Module):
    """Mixes positions without anything to split."""

    def __init__(self) -> None:
        super().__init__()
        self.rate = nn.Parameter(torch.ones(WIDTH))

    def forward(self, stream: Tensor) -> Tensor:
        return stream.cumsum(1) * self.rate / stream.shape[1]


class Ladder(nn.Module):
    """Has a number for every position, so that it needs them all, though no gradient says so."""

    steps = torch.ones(1)

    def forward(self, stream: Tensor) -> Tensor:
        return stream * self.steps[:, None]


class ScheduleRun(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calm, self.looking, self.smear = nn.LayerNorm(WIDTH), Looking(), Smear()
        self.wide, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.ladder: nn.Module = nn.Identity()

    def forward(self, stream: Tensor, hint: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        stream = self.looking(self.calm(stream), stream, context) * hint
        stream = stream + self.ladder(self.smear(stream))
        return stream + self.narrow(F.gelu(self.wide(stream))), stream.detach()


class OddModel(PreTrainedModel):
    """The transform of its head is registered in front, the norm of its embedding after, and it has two stacks."""

    config_class = PretrainedConfig

    def __init__(self, config: PretrainedConfig, *, stacks: int) -> None:
        super().__init__(config)
        self.transform, self.final = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        self.first = nn.ModuleList(ScheduleRun() for _ in range(2)) if stacks > 1 else None
        self.rounds = nn.ModuleList(ScheduleRun() for _ in range(2))
        self.between, self.embedding_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.words, self.hints = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(VOCABULARY, WIDTH)
        self.voice = nn.Linear(WIDTH, VOCABULARY)

    def _init_weights(self, module: nn.Module) -> None:
        pass

    def get_input_embeddings(self) -> nn.Module:
        return self.words

    def get_output_embeddings(self) -> nn.Module:
        return self.voice

    def forward(self, input_ids: Tensor, labels: Tensor) -> CausalLMOutput:
        stream, hint, context = self.embedding_norm(self.words(input_ids)), self.hints(input_ids), None
        if self.first is not None:
            context = stream
            for each in self.first:
                context, _ = each(context, hint)
            context = self.between(context)
        for each in self.rounds:
            each.ladder.steps = torch.linspace(0.5, 1, input_ids.shape[1])
            stream, _ = each(stream, hint, context)
        logits = self.voice(F.gelu(self.transform(self.final(stream))))
        return CausalLMOutput(loss=F.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits=logits)


def odd_model(stacks=1):
    torch.manual_seed(0)
    return OddModel(PretrainedConfig(vocab_size=VOCABULARY), stacks=stacks).eval()


def trial_of(model, parts=2, length=12):
    ids = torch.randint(0, VOCABULARY, (2, length), generator=torch.Generator().manual_seed(1))
    return Trial(model, {"input_ids": ids, "labels": ids.roll(-1, 1)}, num_parts=parts)


def styles(plan):
    return {rule.pattern: rule.style for rule in plan.rules}


@functools.cache
def odd_plan(parts):
    return derive_plan(odd_model(), Plan(()), num_parts=parts, sequence_parallel=True)


@pytest.mark.parametrize(("parts", "length"), [(2, 12), (2, 7), *[(4, 7)] * FULL_PRODUCT])
def test_what_runs_behind_is_told_by_running_and_what_mixes_is_given_all(parts, length):
    model, plan = odd_model(), odd_plan(parts)
    found = styles(plan)
    assert found["rounds"] == "sequence"
    assert found["rounds.*.smear"] == "whole_sequence"
    assert found["rounds.*.hint"] == "sequence"
    assert found["rounds.*.looking.passing"] == "aside"
    verdict = trial_of(model, parts, length).run(plan, sequence_parallel=True)
    assert verdict.passed, verdict.reason
    verdict = trial_of(model, parts, length).run(plan)
    assert verdict.passed, f"rules along the sequence mean nothing without: {verdict.reason}"


@pytest.mark.parametrize("broken", ["rounds.*.smear", "rounds.*.hint", "rounds.*.looking.passing"])
def test_every_one_of_these_rules_is_needed(broken):
    model, plan = odd_model(), odd_plan(2)
    without = Plan(tuple(rule for rule in plan.rules if rule.pattern != broken))
    assert len(without.rules) == len(plan.rules) - 1
    assert not trial_of(model).run(without, sequence_parallel=True).passed


def test_what_needs_all_positions_without_a_gradient_that_says_so_is_for_the_user_to_name():
    model = odd_model()
    for each in model.rounds:
        each.ladder = Ladder()
    with pytest.raises(PlanError, match=r"rounds\.\*\.ladder"):
        derive_plan(model, Plan(()), num_parts=2, sequence_parallel=True)
    given = Plan.of({"rounds.*.ladder": "whole_sequence"})
    plan = derive_plan(model, Plan(()), num_parts=2, sequence_parallel=True, given=given)
    assert trial_of(model, length=9).run(plan | given, sequence_parallel=True).passed


def test_two_stacks_have_lengths_and_ends_of_their_own():
    model = odd_model(stacks=2)
    found = styles(plan := derive_plan(model, Plan(()), num_parts=2, sequence_parallel=True))
    assert (found["first"], found["rounds"]) == ("sequence", "sequence")
    assert trial_of(model, length=9).run(plan, sequence_parallel=True).passed


SEEN_ELSEWHERE = (  # of models written by hand, above and below
    ("axk1", "causal_lm", "AXK1ForCausalLM"),  # experts whose routing is along the sequence, a norm on their sum
    ("neomme", "masked_lm", "NeoMMEForMaskedLM"),  # an input that only the last layer is given
    # and on ranks, test_sequence_rules_on_ranks.py
    ("bart", "seq2seq_lm", "BartForConditionalGeneration"),  # two stacks, a norm registered after and run before
    ("codegen", "causal_lm", "CodeGenForCausalLM"),  # an attention that stays replicated
)


PROVED_BY_THE_SWEEP = (  # of `make coverage`, as every architecture is
    ("llama4_text", "causal_lm", "Llama4ForCausalLM"),  # experts that flatten what they return
    ("gemma4_text", "causal_lm", "Gemma4ForCausalLM"),  # embedded tokens also enter every layer by another way
)


@pytest.mark.parametrize(
    ("model_type", "task", "name"),
    [
        ("camembert", "masked_lm", "CamembertForMaskedLM"),  # the head is registered in front
        *(*PROVED_BY_THE_SWEEP, *SEEN_ELSEWHERE) * FULL_PRODUCT,
    ],
)
def test_architectures_that_the_order_of_registration_misleads(model_type, task, name):
    tiny = build_tiny_model(
        shrink_config(default_config(model_type, task=task), without_dropout=True), model_class(name), seed=0
    )
    plan = derive_plan(tiny, Plan(()), num_parts=2, sequence_parallel=True)
    verdict = Trial(tiny, make_batch(tiny, seed=0), num_parts=2).run(plan, sequence_parallel=True)
    assert verdict.passed, verdict.reason


def test_without_rules_the_one_stack_and_the_order_of_registration_are_taken():
    facts = read_facts(odd_model(stacks=2))
    with pytest.raises(PlanError, match="one stack") as error:
        find_sequence(facts, {}, {}, ())
    assert "0 stacks" in str(error.value)


def test_rules_name_stacks_whole_modules_and_parts():
    facts = read_facts(odd_model(stacks=2))
    rules = {"first": "sequence", "rounds": "sequence", "rounds.0.smear": "whole_sequence"}
    governing = {name: SequenceRule(name, style) for name, style in rules.items()}
    inputs = {"rounds.0.hint": InputRule("rounds.0.hint", "sequence")}
    found = find_sequence(facts, governing, inputs, ())
    assert found.stacks == ("first", "rounds")
    assert found.inputs == ("rounds.0.hint",)
    assert found.stack_of("rounds.0.smear") is None, "it computes alike on every rank"
    assert found.stack_of("rounds.1.smear") == "rounds"
    assert found.stack_of("final") is None
    with pytest.raises(PlanError, match="final is no list of layers"):
        find_sequence(facts, {"final": SequenceRule("final", "sequence")}, {}, ())


def test_rules_for_whole_modules_need_none_for_the_stack():
    facts = read_facts(odd_model())
    rules = {name: SequenceRule(name, "whole_sequence") for name in ("rounds.0.smear", "final")}
    found = find_sequence(facts, rules, {}, (Region(fqn="rounds.0.calm", edge="row"),))
    assert found.stacks == ("rounds",) and found.full_sequence == ("rounds.0.smear",)


def test_stacks_are_chosen_together_then_all_but_one_then_alone_then_by_layers():
    sizes = {"a": 3, "b": 1, "c": 2}
    stacks = tuple(LayerStack(fqn=name, items=(f"{name}.0", f"{name}.1")) for name in sizes)
    facts = SimpleNamespace(stacks=stacks, inside=lambda name: range(sizes[name]))
    *chosen, last = _choices([*sizes], facts, ["a.0.o", "a.0.down", "c.0.o"])
    assert ["".join(each) for each in chosen] == ["abc", "ac", "ab", "bc", "a", "c", "b"]
    assert last == ("a.0", "a.1"), "the layers of others have one sum at most"


def test_inputs_that_only_some_layers_are_given_have_rules_in_all():
    tiny, model = odd_model(), copy.deepcopy(odd_model())
    calm = tuple(ParameterRule(f"rounds.{layer}.calm", "replicate") for layer in range(2))
    plan = Plan((*calm, InputRule("rounds.1.hint", "sequence", "structure")))
    assert styles(generalize(plan, tiny, model)) == {"rounds.*.calm": "replicate", "rounds.*.hint": "sequence"}


def test_a_block_of_experts_becomes_one_region():
    tiny = build_tiny_model(
        shrink_config(default_config("qwen2_moe", task="causal_lm"), without_dropout=True),
        model_class("Qwen2MoeForCausalLM"),
        seed=0,
    )
    plan = derive_plan(tiny, Plan(()), num_parts=2)
    blocks = {name: style for name, style in styles(plan).items() if style in ("region", "region_output")}
    assert blocks == {"model.layers.*.self_attn": "region", "model.layers.*.mlp": "region_output"}
    facts = read_facts(tiny)
    candidate = Candidate(plan=plan, split=resolve(plan, facts, num_parts=2), facts=facts)
    assert widen_regions(candidate) == plan, "a block is no layer's whole"
