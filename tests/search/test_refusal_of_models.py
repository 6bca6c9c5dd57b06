"""Models that derivation cannot split: an error that names the modules, says why, and shows how to write rules."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput

import shardwise
from shardwise.errors import PlanError
from shardwise.plan.options import ParallelSpec
from shardwise.plan.spec import Plan
from shardwise.ranks.spawn import spawn
from shardwise.search import deriving
from shardwise.search.planning import plan_for

WIDTH = 16


class KnotConfig(PreTrainedConfig):
    model_type = "knot"

    def __init__(self, straight=0, **kwargs):
        super().__init__(**kwargs)
        self.straight, self.vocab_size = straight, 31


class Knot(nn.Module):
    """Every output depends on every weight through a matrix inverse: nothing here falls into parts."""

    def __init__(self):
        super().__init__()
        self.rope = nn.Parameter(0.1 * torch.randn(WIDTH, WIDTH))
        self.loop = nn.Parameter(0.1 * torch.randn(WIDTH, WIDTH))

    def forward(self, x):
        return x + x @ torch.linalg.inv(self.rope + 3 * torch.eye(WIDTH)) @ torch.linalg.inv(
            self.loop + 3 * torch.eye(WIDTH)
        )


class Straight(nn.Module):
    def __init__(self):
        super().__init__()
        self.wide = nn.Linear(WIDTH, 4 * WIDTH)
        self.narrow = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.narrow(torch.relu(self.wide(x)))


class KnotModel(PreTrainedModel):
    config_class = KnotConfig

    def __init__(self, config):
        super().__init__(config)
        self.letters = nn.Embedding(config.vocab_size, WIDTH)
        self.knots = nn.ModuleList(Knot() for _ in range(2))
        self.straights = nn.ModuleList(Straight() for _ in range(config.straight))
        self.post_init()

    def _init_weights(self, module):
        pass

    def get_input_embeddings(self):
        return self.letters

    def forward(self, input_ids, **kwargs):
        x = self.letters(input_ids)
        for each in (*self.knots, *self.straights):
            x = each(x)
        return BaseModelOutput(last_hidden_state=x)


def build(straight=0):
    torch.manual_seed(0)
    return KnotModel(KnotConfig(straight=straight)).eval()


@pytest.mark.single
def test_the_error_names_modules_says_why_and_shows_how_to_write_rules():
    with pytest.raises(PlanError, match="cannot split KnotModel over tp=2") as error:
        plan_for(build(), ParallelSpec(plan="auto"), num_parts=2)
    said = str(error.value)
    assert "nothing of its layers" in said
    assert "knots.*.rope" in said and "knots.*.loop" in said
    assert "no product in its layer needs just a part of it" in said
    assert '"knots.*.rope": "split(0)"' in said
    assert "shardwise.verify" in said


@pytest.mark.single
def test_rules_of_ones_own_still_pass():
    plan = plan_for(build(), ParallelSpec(plan={"knots.*.rope": "replicate"}), num_parts=2)
    assert "knots.*.rope: replicate" in str(plan)
    assert "letters: embedding_rowwise" in str(plan), "what could be split beside the layers is"


@pytest.mark.single
def test_a_small_stack_stays_whole_beside_one_that_splits_and_says_why():
    plan = plan_for(build(straight=2), ParallelSpec(plan="auto"), num_parts=2)
    assert {rule.style for rule in plan.rules if rule.pattern.startswith("straights")} >= {"rowwise", "split(0)"}
    assert not [rule for rule in plan.rules if rule.pattern.startswith("knots") and rule.style != "replicate"]


@pytest.mark.single
def test_what_is_split_must_be_worth_it(monkeypatch):
    monkeypatch.setattr("shardwise.search.deriving._LEAST", 0.9)
    with pytest.raises(PlanError, match=r"only 8\d\.\d% of its layers can be split"):
        plan_for(build(straight=2), ParallelSpec(plan="auto"), num_parts=2)


@pytest.mark.single
def test_a_model_whose_code_does_not_bear_watching_says_so(monkeypatch):
    def fails(*args, **kwargs):
        raise RuntimeError("no tracing here")

    monkeypatch.setattr(deriving, "find_row_products", fails)
    with pytest.raises(PlanError, match=r"cannot be watched: RuntimeError: no tracing here"):
        plan_for(build(), ParallelSpec(plan="auto"), num_parts=2)


def parallelize_knot():
    with shardwise.Mesh.open("tp2") as mesh:
        model = build()
        before = {name: value.shape for name, value in model.named_parameters()}
        try:
            shardwise.parallelize(model, mesh)
        except PlanError as error:
            return str(error), before == {name: value.shape for name, value in model.named_parameters()}
        return "", False


@pytest.mark.spawn
def test_every_rank_gets_the_same_error_and_the_model_is_as_it_was():
    (first, whole), (second, also) = spawn(parallelize_knot, 2)
    assert first == second and "cannot split KnotModel" in first
    assert whole and also


@pytest.mark.spawn
def test_verify_raises_it_too_and_proves_rules_of_ones_own():
    with pytest.raises(PlanError, match="cannot split KnotModel over tp=2"):
        shardwise.verify(build(), "tp2")
    report = shardwise.verify(build(), "tp2", plan=Plan.of({"knots.*.rope": "replicate"}))
    assert report.passed, report
