"""What ranks drop, put together for the full model: trials and `verify` find masks that it could not have drawn."""

from __future__ import annotations

import copy
import random

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

import shardwise
from bench.sweep.known import default_config, model_class
from shardwise.api.verifying import Proof, _prove_on_this_rank
from shardwise.data.batch import split_rows
from shardwise.plan.options import ParallelSpec
from shardwise.plan.pipeline_plan import LayerOrder, PipelinePlan
from shardwise.plan.spec import Plan
from shardwise.probe.trial import Trial
from shardwise.proof.draws import RecordRandom, ReplayRandom
from shardwise.proof.parity import measure_narrow, runs_in_float64
from shardwise.ranks.spawn import spawn
from shardwise.runtime.context import SplitContext
from shardwise.search.planning import plan_for
from shardwise.stages.model import Stages
from shardwise.stages.run import ComputeRun
from shardwise.tiny.models import build_tiny_model, make_batch, shrink_config, training_copy
from tests.families import FULL_PRODUCT, derive_plan, tiny_model

WIDTH, VOCABULARY = 16, 23


def trial_of(model, parts=2, *, drops=True):
    padded = split_rows(make_batch(model, seed=0, padding="right"), 2, 2)[1] if drops else None
    return Trial(copy.deepcopy(model), make_batch(model, seed=0), num_parts=parts, padded=padded)


@pytest.fixture
def starcoder():
    return tiny_model("starcoder2", num_key_value_heads=4).eval()


@pytest.mark.single
@pytest.mark.parametrize(
    ("family", "name", "sequence_parallel"),
    [
        ("starcoder2", "Starcoder2ForCausalLM", False),
        *(  # verified on ranks below
            [
                ("mixtral", "MixtralForCausalLM", True),
                ("starcoder2", "Starcoder2ForCausalLM", True),
                ("mixtral", "MixtralForCausalLM", False),
            ]
            if FULL_PRODUCT
            else []
        ),
    ],
)
def test_a_split_that_drops_right_passes(family, name, sequence_parallel):
    config = shrink_config(default_config(family, task="causal_lm"))
    config.attention_dropout = 0.1
    tiny = build_tiny_model(config, model_class(name), seed=0)
    plan = derive_plan(tiny, Plan(()), num_parts=2, sequence_parallel=sequence_parallel)
    verdict = trial_of(tiny.eval()).run(plan, sequence_parallel=sequence_parallel)
    assert verdict.passed, verdict.reason


@pytest.mark.single
@pytest.mark.parametrize(
    ("fault", "sequence_parallel", "said"),
    [
        ("fork_rng", False, "ranks draw the same for parts of their own"),
        ("fork_rng", True, "ranks draw the same for parts of their own"),
        ("restore_rng", False, "ranks draw differently for what they compute alike"),
    ],
)
def test_a_split_that_drops_wrongly_is_refused(starcoder, monkeypatch, fault, sequence_parallel, said):
    plan = plan_for(starcoder, ParallelSpec(), num_parts=2)
    trial = trial_of(starcoder)
    monkeypatch.setattr(SplitContext, fault, lambda *_, **__: None)
    without = trial_of(starcoder, drops=False)
    assert without.run(plan, sequence_parallel=sequence_parallel).passed, "without dropout nothing is wrong"
    verdict = trial.run(plan, sequence_parallel=sequence_parallel)
    assert not verdict.passed
    assert verdict.reason.startswith("with padding and dropout: ")
    assert said in verdict.reason


class Forgetful(nn.Module):
    """Drops what it is given, of which every rank holds all, before it is split; and again inside."""

    def __init__(self, chance):
        super().__init__()
        self.drop, self.drop_inside = nn.Dropout(chance), nn.Dropout(chance)
        self.wide, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.narrow(self.drop_inside(torch.relu(self.wide(self.drop(x)))))


class ForgetfulModel(PreTrainedModel):
    config_class = PreTrainedConfig

    def __init__(self, config, chance=0.1):
        super().__init__(config)
        self.letters = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Forgetful(chance) for _ in range(2))
        self.guess = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, input_ids, labels):
        x = self.letters(input_ids)
        for each in self.layers:
            x = each(x)
        logits = self.guess(x)
        return CausalLMOutput(loss=F.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits=logits)


REGION = {"layers.*": "region", "layers.*.wide": "split(0)", "layers.*.narrow": "rowwise"}


@pytest.mark.single
@pytest.mark.parametrize("parts", [2, 4])
def test_what_is_dropped_between_two_split_linears_is_a_part_on_each_rank(parts):
    torch.manual_seed(0)
    model = ForgetfulModel(PreTrainedConfig(vocab_size=VOCABULARY)).eval()
    plan = Plan.of({"layers.*.wide": "colwise", "layers.*.narrow": "rowwise"})
    verdict = trial_of(model, parts=parts).run(plan)
    assert verdict.passed, verdict.reason


@pytest.mark.single
def test_a_plan_that_drops_wrongly_gives_way_to_one_that_does_not():
    torch.manual_seed(0)
    model = ForgetfulModel(PreTrainedConfig(vocab_size=VOCABULARY)).eval()
    trial = trial_of(model)
    assert not trial.run(Plan.of(REGION)).passed
    found = derive_plan(model, Plan.of(REGION), num_parts=2)
    assert trial.run(found).passed
    assert "layers.*.wide" in str(found), "the layers are still split"


@pytest.mark.single
def test_what_a_model_never_drops_need_not_be_right():
    torch.manual_seed(0)
    model = ForgetfulModel(PreTrainedConfig(vocab_size=VOCABULARY), chance=0.0).eval()
    assert "layers.*: region" in str(derive_plan(model, Plan.of(REGION), num_parts=2))
    model.layers[1].drop.p = 0.1
    assert "layers.*: region" not in str(derive_plan(model, Plan.of(REGION), num_parts=2))


@pytest.mark.single
def test_planning_leaves_the_callers_random_numbers_alone(starcoder, monkeypatch):
    with torch.device("meta"):  # of which a tiny model is built
        model = type(starcoder)(starcoder.config)
    monkeypatch.setattr(torch.cuda, "manual_seed_all", lambda seed: pytest.fail("one rank alone seeds its device"))
    before = torch.get_rng_state(), numpy.random.get_state()[1].tolist(), random.getstate()
    plan_for(model, ParallelSpec(plan="derived"), num_parts=2)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (numpy.random.get_state()[1].tolist(), random.getstate()) == before[1:]


class Fussy(ForgetfulModel):
    """Trains on nothing that it is given, or runs on nothing."""

    def forward(self, input_ids, labels):
        if self.training or self.config.refuses:
            raise ValueError("give me something else")
        return super().forward(input_ids, labels)


@pytest.mark.single
def test_a_tiny_model_that_cannot_be_trained_runs_as_it_is_or_not_at_all():
    ids = torch.arange(8).view(1, 8)
    batch = {"input_ids": ids, "labels": ids}
    forgetful = ForgetfulModel(PreTrainedConfig()).eval()
    assert training_copy(forgetful, batch).training
    assert training_copy(forgetful, batch).layers[0].drop.p > 0
    fussy = Fussy(PreTrainedConfig(refuses=False)).eval()
    assert not training_copy(fussy, batch).training
    fussy.config.refuses = True
    assert training_copy(fussy, batch) is None


def redrawn(*ranks, shape):
    """What the full model draws where the ranks drew so, and what is wrong."""
    state = torch.get_rng_state()
    redraws = ReplayRandom([[each] for each in ranks], [state] * len(ranks))
    with redraws:
        return torch.empty(shape).bernoulli_(0.5), redraws.problems + redraws.unequal


@pytest.mark.single
def test_masks_of_parts_are_joined_and_the_others_must_be_equal():
    with RecordRandom() as draws:
        F.dropout(torch.ones(2, 12, 4), 0.5)
    (mask,) = draws.values
    assert torch.equal(redrawn(mask, mask, shape=(2, 12, 4))[0], mask)
    for dim in range(3):
        found, problems = redrawn(*mask.chunk(2, dim), shape=(2, 12, 4))
        assert torch.equal(found, mask) and not problems
    padded = F.pad(mask, (0, 0, 0, 2)).chunk(2, 1)  # 14 positions on two ranks, of which 12 are true
    assert torch.equal(redrawn(*padded, shape=(2, 12, 4))[0], mask)
    half = mask[:, :6]
    for ranks, said in [
        ((mask, 1 - mask), "differently for what they compute alike"),
        ((half, half), "the same for parts of their own"),
        ((half[:, :3], half[:, :3]), "no parts of it"),
        ((half[..., :2], half[..., 2:]), "no parts of it"),
    ]:
        assert said in redrawn(*ranks, shape=(2, 12, 4))[1][0]


@pytest.mark.single
def test_ranks_draw_equally_often_and_end_at_the_same_place():
    state, other = torch.get_rng_state(), torch.Generator().manual_seed(1).get_state()
    assert "draw 1 and 0 times" in ReplayRandom([[state], []], [state, state]).problems[0]
    assert "different places" in ReplayRandom([[], []], [state, other]).problems[0]
    redraws = ReplayRandom([[], []], [state, state])
    with redraws:
        torch.rand(3)
    assert "draws more often" in redraws.problems[0]


# verify


def verify_along_the_sequence(config, name, layout, **options):
    """As `shardwise.verify`, with fewer steps: those after the third are those of tests/train/test_data_parallel.py."""
    spec = ParallelSpec(sequence_parallel=True)
    proof = Proof(config=config, model_class=model_class(name), layout=layout, spec=spec, num_steps=3, **options)
    return proof.run()


@pytest.mark.spawn
def test_verify_pads_and_drops():
    config = shrink_config(tiny_model("mixtral").config, without_dropout=True)
    report = verify_along_the_sequence(config, "MixtralForCausalLM", "fsdp2.tp2", num_microbatches=2)
    assert report.passed, str(report)
    assert report.measurements[0].in_training.error > 0
    assert "padding, dropout" in str(report)


def drop_wrongly(layout):
    """`verify` on ranks that all draw from the common stream."""
    SplitContext.fork_rng = lambda *_, **__: None
    config = shrink_config(tiny_model("starcoder2").config, without_dropout=True)
    own_class = model_class("Starcoder2ForCausalLM")
    return _prove_on_this_rank(Proof(config=config, model_class=own_class, layout=layout, num_steps=3))


@pytest.mark.spawn
def test_verify_finds_masks_that_are_wrong():
    for found in spawn(drop_wrongly, 2, "tp2"):
        assert not found.passed and not found.in_training.passed
        assert "ranks draw the same for parts of their own" in found.in_training.name
        assert found.gradient.passed


def off_by(bias, dtype):
    """Splits a model into one part whose gradients are off by `bias` in this dtype."""

    def scale(_, __, out):
        if out.requires_grad:
            out.register_hook(lambda gradient: gradient * (1 + bias * (gradient.dtype is dtype)))

    def split(model, mesh):
        model = shardwise.parallelize(model, mesh)
        model.model.layers[-1].mlp.register_forward_hook(scale)
        return model

    return split


@pytest.mark.single
@pytest.mark.parametrize(("bias", "dtype", "passes"), [(2e-2, torch.float32, False), (2e-2, torch.float64, True)])
def test_a_fault_of_the_dtype_of_the_run_alone_is_found(bias, dtype, passes):
    full = tiny_model("llama")
    batch = make_batch(full, seed=0)
    assert runs_in_float64(full, batch)
    with shardwise.Mesh.open("tp1") as mesh:
        found = measure_narrow(
            full,
            copy.deepcopy(full).double(),
            batch,
            mesh,
            dtype=torch.float32,
            split=off_by(bias, dtype),
            step=lambda model, mesh, batch: shardwise.TrainStep(model, mesh)(batch).loss,
            loss_of=lambda model, batch: model(**batch).loss,
        )
    assert found.passed == passes


@pytest.mark.single
@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("mixtral", "MixtralForCausalLM"),  # grouped products of experts
        ("prophetnet", "ProphetNetForCausalLM"),  # masks that overflow
        ("switch_transformers", "SwitchTransformersForConditionalGeneration"),  # routers that stay in float32
    ],
)
def test_models_that_do_not_run_in_float64_are_proved_in_float32(kind, name):
    config = shrink_config(default_config(kind, task="causal_lm"))
    full = build_tiny_model(config, model_class(name), seed=0)
    assert not runs_in_float64(full, make_batch(full, seed=0))


@pytest.mark.spawn
def test_fnet_trains_on_parts_of_the_sequence():
    config = shrink_config(default_config("fnet", task="masked_lm"), without_dropout=True)
    report = verify_along_the_sequence(config, "FNetForMaskedLM", "tp2", dtype="float32")
    assert report.passed, str(report)
    assert report.measurements[0].in_training is not None
    assert report.measurements[0].narrow.name == "float32", "the proof is in float64"


@pytest.mark.single
def test_what_is_drawn_in_code_of_other_stages_is_not_recorded():
    order = LayerOrder(calls=("0", "1"), uses={}, cut_tensors=((),))
    plan = PipelinePlan(order=order, schedule="1f1b", starts=(0, 1), rank_of=(0, 1))
    stages = Stages(own=(1,), model=nn.Linear(1, 1), plan=plan)
    with RecordRandom(stages) as draws:
        for is_foreign, times in ((True, 1), (False, 2), (False, 0), (False, 1)):
            stages.current = ComputeRun(stages, first=int(is_foreign), last=None, received=())
            torch.zeros(2)
            for _ in range(times):
                torch.rand(2)
    assert [len(drawn) for drawn in draws.forwards] == [2, 0, 1], "one of each own forward, also where it drew nothing"
