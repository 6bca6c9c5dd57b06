"""Plans derived from structure alone: a model that nobody has seen, split and held against itself."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

from bench.sweep.known import default_config, model_class
from shardwise.parallel.facts import read_facts
from shardwise.plan.spec import Plan
from shardwise.probe.trial import Trial
from shardwise.search.influence import find_row_products
from shardwise.search.rules import Block, find_blocks
from shardwise.search.traced_sizes import Equation, TracedInt, solve
from shardwise.tiny.models import build_tiny_model, make_batch, shrink_config

pytestmark = pytest.mark.single

WIDTH, NODES, SPAN, VOCABULARY = 32, 4, 12, 48


class OddConfig(PretrainedConfig):
    model_type = "odd"


class Looking(nn.Module):
    """Attention whose fused projection holds value, gate, key and query, and whose scores have a bias table."""

    def __init__(self) -> None:
        super().__init__()
        self.nodes, self.reach = NODES, WIDTH // NODES
        self.everything = nn.Linear(WIDTH, 4 * WIDTH)
        self.nearness = nn.Parameter(torch.randn(SPAN, NODES) * 0.3)
        self.away = nn.Linear(WIDTH, WIDTH)

    def forward(self, stream: Tensor) -> Tensor:
        rows, length, _ = stream.shape
        whole = self.everything(stream).view(rows, length, 4, self.nodes * self.reach)
        value, gate, key, query = (
            part.reshape(rows, length, self.nodes, self.reach).transpose(1, 2) for part in whole.unbind(2)
        )
        places = torch.arange(length)
        distance = (places[:, None] - places[None, :]).clamp(min=0)
        scores = query @ key.mT + self.nearness[distance].permute(2, 0, 1)
        scores = scores.masked_fill(places[:, None] < places[None, :], float("-inf"))
        seen = (scores.softmax(-1) @ value) * torch.sigmoid(gate)
        return self.away(seen.transpose(1, 2).reshape(rows, length, self.nodes * self.reach))


class Thinking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(WIDTH, 6 * WIDTH, bias=False), nn.Linear(3 * WIDTH, WIDTH)

    def forward(self, stream: Tensor) -> Tensor:
        left, right = self.wide(stream).chunk(2, -1)
        return self.narrow(F.gelu(left) * right)


class ScheduleRun(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.looking, self.thinking = Looking(), Thinking()

    def forward(self, stream: Tensor) -> Tensor:
        stream = stream + self.looking(self.first(stream))
        return stream + self.thinking(self.second(stream))


class OddModel(PreTrainedModel):
    config_class = OddConfig

    def __init__(self, config: OddConfig) -> None:
        super().__init__(config)
        self.letters = nn.Embedding(VOCABULARY, WIDTH)
        self.rounds = nn.ModuleList(ScheduleRun() for _ in range(2))
        self.guess = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
        stream = self.letters(input_ids)
        for each in self.rounds:
            stream = each(stream)
        logits = self.guess(stream)
        return CausalLMOutput(loss=F.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits=logits)


@pytest.fixture
def odd() -> OddModel:
    torch.manual_seed(0)
    return OddModel(OddConfig()).eval()


@pytest.fixture
def batch() -> dict[str, Tensor]:
    ids = torch.randint(0, VOCABULARY, (2, SPAN), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "labels": ids}


def blocks_of(model: nn.Module, batch: dict[str, Tensor], parts: int) -> list[Block]:
    watched = copy.deepcopy(model)
    products, layers = find_row_products(watched, batch, num_parts=parts)
    return find_blocks(watched, read_facts(watched), products, layers, num_parts=parts)


def first_plans(blocks: list[Block]) -> Plan:
    together = Plan(())
    for block in blocks:
        together |= block.plans[0]
    return together


@pytest.mark.parametrize("parts", [2, 4])
def test_the_first_guess_splits_an_unseen_model(odd: OddModel, batch: dict[str, Tensor], parts: int) -> None:
    plan = first_plans(blocks_of(odd, batch, parts))
    verdict = Trial(odd, batch, num_parts=parts).run(plan)
    assert verdict.passed, verdict.reason


def test_all_of_its_matrices_are_split(odd: OddModel, batch: dict[str, Tensor]) -> None:
    blocks = blocks_of(odd, batch, 2)
    split = frozenset().union(*(block.parameters for block in blocks))
    matrices = {name for name, value in odd.rounds.named_parameters(prefix="rounds") if value.ndim > 1}
    assert matrices <= split


def test_the_rules_say_what_each_part_is(odd: OddModel, batch: dict[str, Tensor]) -> None:
    plan = first_plans(blocks_of(odd, batch, 2))
    styles = {rule.pattern.removeprefix("rounds.0."): rule.style for rule in plan.rules if "rounds.0" in rule.pattern}
    assert styles == {
        "looking": "region",
        "looking.everything": "split(0, sections=4)",
        "looking.nearness": "split(1)",
        "looking.away": "rowwise",
        "looking.nodes": "divided",
        "thinking": "region",
        "thinking.wide": "split(0, sections=2)",
        "thinking.narrow": "rowwise",
    }


def test_a_wrong_guess_does_not_pass(odd: OddModel, batch: dict[str, Tensor]) -> None:
    plan = first_plans(blocks_of(odd, batch, 2))
    wrong = Plan(tuple(rule for rule in plan.rules if rule.style != "divided"))
    assert not Trial(odd, batch, num_parts=2).run(wrong).passed


def test_blocks_of_one_kind_have_one_key(odd: OddModel, batch: dict[str, Tensor]) -> None:
    keys = [block.key for block in blocks_of(odd, batch, 2)]
    assert sorted(keys) == [("looking.away.weight",)] * 2 + [("thinking.narrow.weight",)] * 2


# What real architectures need beside splits


def first_that_passes(model: nn.Module, batch: dict[str, Tensor], parts: int) -> Plan:
    """The blocks' plans, each kind at its first guess that passes alone; fails the test where none does."""
    trial = Trial(model, batch, num_parts=parts)
    kinds: dict[tuple[str, ...], list[list[Plan]]] = {}
    for block in blocks_of(model, batch, parts):
        kinds.setdefault(block.key, []).append(list(block.plans))
    total = Plan(())
    for alike in kinds.values():
        for guesses in zip(*alike, strict=True):
            together = functools.reduce(Plan.__or__, guesses)
            if trial.run(together).passed:
                total |= together
                break
        else:
            pytest.fail(f"nothing passes for {alike[0][0]}")
    verdict = trial.run(total)
    assert verdict.passed, verdict.reason
    return total


@pytest.mark.parametrize(
    ("model_type", "class_name", "pattern", "style"),
    [
        pytest.param("bloom", "BloomForCausalLM", ".alibi", "split(0)", id="a bias of the model's"),
        pytest.param("gpt_oss", "GptOssForCausalLM", "mlp.experts.down_proj_bias", "added_once", id="an expert's bias"),
        pytest.param("jetmoe", "JetMoeForCausalLM", "mlp.bias", "added_once", id="a bias after experts"),
        pytest.param("bamba", "BambaForCausalLM", "mamba.norm", "norm_split", id="a gated norm"),
        pytest.param("falcon", "FalconForCausalLM", "self_attention.num_heads", "divided", id="a shared key"),
        pytest.param("t5", "T5ForConditionalGeneration", "relative_attention_bias", "split(1)", id="a table for all"),
        pytest.param(
            "longcat_flash", "LongcatFlashForCausalLM", "identity_expert", "moe_identity_expert", id="identity"
        ),
    ],
)
def test_what_a_structure_needs_is_found(model_type: str, class_name: str, pattern: str, style: str) -> None:
    config = shrink_config(default_config(model_type, task=None), without_dropout=True)
    model = build_tiny_model(config, model_class(class_name), seed=0).eval()
    for choose in ("set_attn_implementation", "set_experts_implementation"):
        getattr(model, choose)("eager")
    plan = first_that_passes(model, make_batch(model, seed=0), 2)
    styles = {rule.style for rule in plan.rules if pattern in rule.pattern}
    assert style in styles


# Counts


def half(*names: str) -> dict[str, Fraction]:
    return dict.fromkeys(names, Fraction(1, 2))


def test_a_count_computes_like_the_integer_and_remembers_its_formula() -> None:
    heads, dim = TracedInt.of("heads", 8), TracedInt.of("dim", 16)
    fused = (heads + 2) * dim
    assert fused == 160
    assert fused.names == {"heads", "dim"}
    assert fused.formula(half("heads")) == 96
    assert (dim - 4).formula(half("dim")) == 4
    assert (2 * dim // heads).formula(half("heads")) == 8


def equations(*pairs: tuple[TracedInt, Fraction | None]) -> Iterator[Equation]:
    return (Equation(count, part) for count, part in pairs)


def test_the_attributes_that_count_what_is_split_solve_the_sizes() -> None:
    heads, dim = TracedInt.of("heads", 8), TracedInt.of("dim", 16)
    told = equations((heads, Fraction(1, 2)), (dim, Fraction(1)), (heads * dim, Fraction(1, 2)))
    assert solve(list(told), limit=1) == [half("heads")]


def test_a_product_alone_leaves_two_solutions() -> None:
    product = TracedInt.of("heads", 8) * TracedInt.of("dim", 16)
    assert solve([Equation(product, Fraction(1, 2))], limit=2) == [half("heads"), half("dim")]


def test_sizes_outside_break_the_tie() -> None:
    heads, dim = TracedInt.of("heads", 8), TracedInt.of("dim", 16)
    assert solve(list(equations((heads * dim, Fraction(1, 2)), (dim, None))), limit=1) == [half("heads")]


def test_without_split_sizes_nothing_is_divided() -> None:
    assert (
        solve(list(equations((TracedInt.of("dim", 16), Fraction(1)), (TracedInt.of("other", 3), None))), limit=3) == []
    )
