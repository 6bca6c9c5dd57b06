"""Training steps through pipelines on real ranks, beside the unsplit model: a product of choices, pairwise."""

from __future__ import annotations

import copy
import functools
import itertools

import pytest
import torch
import transformers

import shardwise
from bench.onecard.reads import ReadCount
from shardwise.data.batch import count_targets, split_rows
from shardwise.errors import ConfigError, GradientError, UnsupportedError
from shardwise.optim.gradients import gradients_of
from shardwise.parameters.registry import registry_of
from shardwise.pipeline.runner import runner_of
from shardwise.plan.options import FsdpPolicy, Pipeline, Precision, Recompute
from shardwise.proof.parity import measure
from shardwise.schedule.schedule import SCHEDULES, build_schedule
from shardwise.topology.shape import MeshShape
from shardwise.train.one_loss import LossHooks
from tests.families import FULL_PRODUCT, MANY_STEPS, rows_of, tiny_batch, tiny_model
from tests.oracle import differing, differing_gradients

pytestmark = pytest.mark.spawn

FAMILIES = ("mixtral", "llama", "qwen3", "t5", "bert", "gemma3_text", "gpt2", "bloom", "gpt_neox", "bart")
LAYOUTS = ("pp2", "pp4", "pp2.tp2", "pp2.tp2 sp", "pp2.fsdp2", *["pp2.ddp2"] * FULL_PRODUCT)
COUNTS = (2, 4, 8)
LAYERS = 4
SPLIT_BACKWARD = ("interleaved_zero_bubble", "zbv", "dualpipev")
"""Schedules that compute gradients of weights by themselves, later."""

SMALL = {"vocab_size": 96, "dropout_rate": 0.0, "dropout": 0.0}
SEQ2SEQ = {
    "t5": {"d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 4}
    | {"decoder_start_token_id": 0},
    "bart": {"d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 96, "decoder_ffn_dim": 96}
    | {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "max_position_embeddings": 64},
}


def model_of(family, tied, num_layers=LAYERS):
    """A model of so many layers of all stacks together, every parameter off its special initial value."""
    if family in ("bloom", *SEQ2SEQ):
        values = SEQ2SEQ.get(family) or {"hidden_size": 64, "n_layer": num_layers, "n_head": 4}
        config = transformers.AutoConfig.for_model(family, **SMALL, **values, tie_word_embeddings=tied)
        auto_class = transformers.AutoModelForSeq2SeqLM if family in SEQ2SEQ else transformers.AutoModelForCausalLM
        torch.manual_seed(0)
        model = auto_class.from_config(config, attn_implementation="eager")
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.05)
        return model.eval()
    return tiny_model(family, tied=tied, **{"n_layer" if family == "gpt2" else "num_hidden_layers": num_layers})


@functools.cache
def has_schedule(layout, name, count):
    pp_size = MeshShape.parse(layout.split()[0]).pp_size
    try:
        schedule = build_schedule(name, pp_size=pp_size, num_microbatches=count)
    except ConfigError:
        return False
    return len(schedule.rank_of) <= LAYERS


def pairs_of(layout, name, count):
    """What a cell shows. Other axes beside stages meet the schedules whose backward is split, and fsdp in `ZERO` meets
    all. Every schedule and every layout has batches of other lengths.
    """
    kind = layout.split()[0]
    if FULL_PRODUCT:
        return {(layout,), (name, count), (layout, count), (kind, name)}
    found = {(layout,), (kind, count)}
    if kind == "pp2" or name in SPLIT_BACKWARD:
        found |= {(kind, name)}
    return found if count == max(COUNTS) else found | {(name, "lengths"), (layout, "lengths")}


def cells():
    """Cells in which choices of layout, schedule and number of microbatches meet that can, as `pairs_of` says; families
    take turns, tied or not, such that few plans are derived. `make coverage` proves every family in each of more.
    """
    pairs = {
        (layout, name, count): pairs_of(layout, name, count)
        for layout, name, count in itertools.product(LAYOUTS, SCHEDULES, COUNTS)
        if has_schedule(layout, name, count)
    }
    left, chosen = set().union(*pairs.values()), []
    while left:
        best = max(pairs, key=lambda cell: len(pairs[cell] & left))
        left -= pairs[best]
        chosen.append(best)
    for number, (layout, name, count) in enumerate(sorted(chosen, key=lambda cell: LAYOUTS.index(cell[0]))):
        for family in FAMILIES if FULL_PRODUCT else FAMILIES[number % len(FAMILIES) :][:1]:
            tied = (number + number // len(FAMILIES) if FULL_PRODUCT else FAMILIES.index(family) + 1) % 2 == 0
            yield layout.split()[0], layout.endswith("sp"), family, name, count, tied


def expected(whole, batch, count):
    """Loss and gradients of the unsplit model, weighted by targets over `count` parts of the batch."""
    whole.zero_grad()
    loss, parts = torch.zeros(()), split_rows(batch, batch["labels"].shape[0], count)
    counts = [count_targets(whole, part) for part in parts]
    for part, own in zip(parts, counts, strict=True):
        if own:
            weighted = whole(**part).loss * (own / sum(counts))
            weighted.backward()
            loss += weighted.detach()
    return loss, {name: value.grad for name, value in whole.named_parameters() if value.grad is not None}


def train_cell(mesh, family, name, count, tied, sp):
    """Of batches of another length next where there are few microbatches: every schedule and every layout has such."""
    return train(mesh, family, name, count, tied, sp, lengths=(6, 9) if count < max(COUNTS) or FULL_PRODUCT else (6,))


def train(mesh, family, name, count, tied, sp=False, lengths=(6, 9), **options):
    """Differences from the unsplit model: of steps on batches of these lengths, whose gradients add up. Stages have two
    layers under pp alone, where they may, and with other axes one.
    """
    num_stages = len(build_schedule(name, pp_size=mesh.size("pp"), num_microbatches=count).rank_of)
    whole = model_of(family, tied, LAYERS if mesh.size("pp") == mesh.shape.world_size or FULL_PRODUCT else num_stages)
    model = shardwise.parallelize(
        copy.deepcopy(whole), mesh, pipeline=Pipeline(schedule=name), sequence_parallel=sp, **options
    )
    step, problems, wanted = shardwise.TrainStep(model, mesh, num_microbatches=count), [], {}
    for length in lengths:
        batch = tiny_batch(whole, rows=count * mesh.data_size, length=length)
        batch["labels"][0, :4] = -100
        # The balance of experts is that of a microbatch of each data rank.
        loss, gradients = expected(whole, batch, count * mesh.data_size if family == "mixtral" else 1)
        result = step(rows_of(batch, mesh))
        problems += differing("loss", result.loss, loss, 1e-5)
        wanted = {fqn: value + wanted.get(fqn, 0) for fqn, value in gradients.items()}
    return problems + differing_gradients(shardwise.full_gradients(model), wanted)


def pytest_generate_tests(metafunc):
    """Gives the test of `cells` its cells: not where it is defined, as every rank imports this module."""
    if metafunc.function is test_steps_have_the_loss_and_gradients_of_the_unsplit_model:
        metafunc.parametrize(
            ("layout", "sp", "family", "name", "count", "tied"),
            list(cells()),
            ids=lambda value: {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value),
        )


def test_steps_have_the_loss_and_gradients_of_the_unsplit_model(on_ranks, layout, sp, family, name, count, tied):
    for problems in on_ranks(train_cell):
        assert not problems, problems


def test_every_two_choices_meet_that_can():
    found = list(cells())
    possible = [cell for cell in itertools.product(LAYOUTS, SCHEDULES, COUNTS) if has_schedule(*cell)]
    assert {(layout, name) for layout, _, _, name, _, _ in found} >= {
        (layout.split()[0], name) for layout, name, _ in possible if layout == "pp2" or name in SPLIT_BACKWARD
    }
    assert {name for name, *_ in ZERO} == set(SCHEDULES)
    assert {(layout, count) for layout, _, _, _, count, _ in found} == {
        (layout.split()[0], count) for layout, _, count in possible
    }
    assert {cell[:2] for cell in found} == {(layout.split()[0], layout.endswith("sp")) for layout in LAYOUTS}
    assert {family for _, _, family, _, _, _ in found} == set(FAMILIES)
    with_other_lengths = [cell for cell in found if cell[4] < max(COUNTS)]
    assert {name for _, _, _, name, _, _ in with_other_lengths} == set(SCHEDULES)
    assert {cell[:2] for cell in with_other_lengths} == {cell[:2] for cell in found}


def train_zero(mesh, name, stage, offload, mode):
    options = {} if mode is None else {"recompute": Recompute(mode=mode)}
    fsdp = FsdpPolicy(zero_stage=stage, cpu_offload=offload)
    return train(mesh, "llama", name, 4, tied=True, lengths=(6,), fsdp=fsdp, **options)


RECOMPUTED = {"1f1b": "full", "looped_bfs": "selective"}
ZERO = [(name, stage, False, RECOMPUTED.get(name)) for stage in (1, 2, 3) for name in SCHEDULES]
ZERO += [("zbv", 2, True, None), ("1f1b", 3, False, None), ("looped_bfs", 3, False, None)]
if not FULL_PRODUCT:  # every stage with some; those whose backward is split are at the third in the cells above
    ZERO = [
        (name, 1 + at % (2 if name in SPLIT_BACKWARD else 3), name == "zbv", RECOMPUTED.get(name))
        for at, name in enumerate(SCHEDULES)
    ]


@pytest.mark.parametrize(("name", "stage", "offload", "mode"), ZERO)
@pytest.mark.parametrize("layout", ["pp2.fsdp2"])
def test_no_gradients_are_lost_with_any_schedule_at_any_zero_stage(on_ranks, layout, name, stage, offload, mode):
    for problems in on_ranks(train_zero):
        assert not problems, problems


def train_long(mesh, name):
    whole = model_of("llama", tied=True, num_layers=2 if name == "1f1b" else LAYERS)
    return measure(
        whole,
        tiny_batch(whole, rows=4),
        mesh,
        split=functools.partial(shardwise.parallelize, pipeline=Pipeline(schedule=name)),
        step=lambda model, mesh, batch: shardwise.TrainStep(model, mesh, num_microbatches=4)(batch).loss,
        num_steps=MANY_STEPS,
    )


@pytest.mark.parametrize("name", ["1f1b", "zbv"] if FULL_PRODUCT else ["1f1b"])  # zbv has its ties on one rank
@pytest.mark.parametrize("layout", ["pp2"])
def test_ties_stay_bit_equal_and_parameters_those_of_the_unsplit_model(on_ranks, layout, name):
    for found in on_ranks(train_long):
        assert found.passed, found


def train_half(mesh, compute):
    """Losses of a few steps, and whether gradients are finite, with computation in a narrow dtype."""
    whole = model_of("llama", tied=True)
    stages = Pipeline(schedule="zbv" if mesh.data_size > 1 else "1f1b")  # zbv has both modules of the tie on one rank
    model = shardwise.parallelize(copy.deepcopy(whole), mesh, precision=Precision(compute=compute), pipeline=stages)
    optimizer = shardwise.build_optimizer(model, torch.optim.AdamW, lr=1e-3)
    step, batch = shardwise.TrainStep(model, mesh, num_microbatches=4), rows_of(tiny_batch(whole, rows=8), mesh)
    losses = []
    for _ in range(4):
        losses.append(float(step(batch).loss))
        optimizer.step()
        optimizer.zero_grad()
    cut_tensor, _ = runner_of(model).stages.shapes(1, {"input_ids": batch["input_ids"][:1]})
    with torch.no_grad():
        return losses, cut_tensor[0].dtype, float(whole(**tiny_batch(whole, rows=8)).loss)


@pytest.mark.parametrize(
    ("layout", "compute"),
    [
        ("pp2", "float16"),
        ("pp2.fsdp2", "bfloat16"),
        *([("pp2", "bfloat16"), ("pp2.fsdp2", "float16")] if FULL_PRODUCT else []),
    ],
)
def test_narrow_dtypes_travel_and_train(on_ranks, layout, compute):
    found = on_ranks(train_half)
    for losses, dtype, loss in found:
        assert dtype is getattr(torch, compute)
        assert losses == found[0][0]
        assert abs(losses[0] - loss) < 0.05
        assert losses[-1] < losses[0] - 0.05


def train_ignored(mesh):
    """Steps in which some microbatches, or all, have no targets."""
    whole = model_of("llama", tied=False)
    model = shardwise.parallelize(copy.deepcopy(whole), mesh)
    step, problems = shardwise.TrainStep(model, mesh, num_microbatches=4), []
    batch = tiny_batch(whole, rows=4)
    batch["labels"][1:3] = -100
    loss, gradients = expected(whole, batch, 1)
    problems += differing("loss", step(batch).loss, loss, 1e-5)
    problems += differing_gradients(shardwise.full_gradients(model), gradients)
    batch["labels"][:] = -100
    nothing = step(batch)
    problems += differing_gradients(shardwise.full_gradients(model), gradients)
    model.zero_grad()
    model.requires_grad_(requires_grad=False)
    with pytest.raises(GradientError, match="depends on nothing that is trained"):
        step(tiny_batch(whole, rows=4))
    if model.train()(**batch).loss.requires_grad:
        problems.append("the loss of a frozen model needs a gradient")
    return problems, float(nothing.loss), nothing.num_tokens


@pytest.mark.parametrize("layout", ["pp2"])
def test_microbatches_without_targets_count_nothing(on_ranks, layout):
    for problems, loss, num_tokens in on_ranks(train_ignored):
        assert not problems, problems
        assert (loss, num_tokens) == (0.0, 0)


def pairs_of_targets():
    """A model of every kind whose loss is a sum of means over different targets, a batch of four rows, and whether some
    microbatch has other numbers of each.
    """
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
    config = transformers.BertConfig(vocab_size=96, **sizes, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    ids = torch.randint(3, 96, (4, 12), generator=torch.Generator().manual_seed(0))
    sentences = {"input_ids": ids, "labels": ids.clone(), "next_sentence_label": torch.tensor([0, 1, 1, -100])}
    sentences["labels"][0, 2:] = -100
    spans = {
        "input_ids": ids,
        "start_positions": torch.tensor([3, 40, 2, 5]),
        "end_positions": torch.tensor([7, 12, 3, 12]),
    }
    none = {
        "input_ids": ids,
        "start_positions": torch.tensor([3, 4, 12, 12]),
        "end_positions": torch.tensor([7, 5, 90, 12]),
    }
    numbers = {"input_ids": ids, "labels": torch.tensor([3, -100, -100, 7])}  # of regression, which ignores none
    targets = {"PreTraining": (sentences,), "QuestionAnswering": (spans, none), "SequenceClassification": (numbers,)}
    for name, batch in ((name, batch) for name, batches in targets.items() for batch in batches):
        torch.manual_seed(0)
        own = copy.deepcopy(config)
        own.num_labels = 1 if batch is numbers else 2
        yield getattr(transformers, f"BertFor{name}")(own), batch, batch is sentences or batch is spans


def train_pairs(mesh):
    """Differences of a step, and of a call in training mode under Lightning, which under pp divides into microbatches,
    too. On four ranks of the first model: how axes meet depends on no kind of targets.
    """
    problems, pairs = [], pairs_of_targets()
    for whole, batch, is_uneven in pairs if mesh.shape.world_size == 2 or FULL_PRODUCT else [next(pairs)]:
        wanted = whole(**batch).loss
        wanted.backward()
        gradients = {name: value.grad for name, value in whole.named_parameters() if value.grad is not None}
        model = shardwise.parallelize(copy.deepcopy(whole), mesh).train()
        model.zero_grad()
        own = split_rows(batch, 4, mesh.data_size)[mesh.data_rank]
        step, losses = shardwise.TrainStep(model, mesh, num_microbatches=2), []
        if is_uneven:
            with pytest.raises(UnsupportedError, match="in [24] parts, with several kinds of targets: "):
                step(own)
        else:
            losses.append(step(own).loss)
            problems += differing_gradients(shardwise.full_gradients(model), gradients)
        model.zero_grad()
        hooks = LossHooks(model, registry_of(model), gradients_of(model))
        if is_uneven and mesh.data_size > 1:
            with pytest.raises(UnsupportedError, match="several kinds of targets"):
                model(**own)
            hooks.remove()
            continue
        loss = model(**own).loss
        loss.backward()
        hooks.remove()
        losses.append(loss.detach())
        problems += differing_gradients(shardwise.full_gradients(model), gradients)
        for loss in losses:
            problems += differing("loss", loss, wanted.detach(), 1e-5)
    return problems


@pytest.mark.parametrize("layout", ["pp2", "fsdp2", "pp2.fsdp2", *["fsdp2.tp2"] * FULL_PRODUCT])
def test_several_targets_count_where_microbatches_have_as_many_of_each_and_are_refused_elsewhere(on_ranks, layout):
    for problems in on_ranks(train_pairs):
        assert not problems, problems


def refuse(mesh):
    """What each bad call says on this rank."""
    whole = model_of("llama", tied=False)
    model = shardwise.parallelize(copy.deepcopy(whole), mesh, pipeline=Pipeline(schedule="1f1b"))
    said = []
    for count, change in ((1, 0), (2, 0), (2, mesh.coord("pp"))):
        batch = tiny_batch(whole, rows=3 if (count, change) == (2, 0) and not said[1:] else 4, seed=change)
        try:
            shardwise.TrainStep(model, mesh, num_microbatches=count)(batch)
        except shardwise.ShardwiseError as error:
            said.append(str(error))
    step, batch = shardwise.TrainStep(model, mesh, num_microbatches=2), tiny_batch(whole, rows=4)
    for more in ({"output_router_logits": True}, {"output_hidden_states": True}, {"num_items_in_batch": 30}):
        try:
            step({**batch, **more})
        except shardwise.ShardwiseError as error:
            said.append(str(error))
    return said


@pytest.mark.parametrize("layout", ["pp2"])
def test_bad_steps_are_the_same_error_on_every_rank(on_ranks, layout):
    first, second = on_ranks(refuse)
    assert first == second
    few, uneven, different, routers, states, number = first
    assert "set config.output_router_logits = True before" in routers
    assert "output_hidden_states=True of a LlamaForCausalLM in stages" in states
    assert "a batch has num_items_in_batch" in number
    assert "a microbatch for each of 2 x 1 = 2 stages" in few
    assert "cannot divide 3 rows into 2 microbatches" in uneven
    assert "pp ranks were given different batches" in different


def step_with_rows_known(mesh):
    """Loss, gradients and reads of a step, as on CPUs and as on a device that computes by itself."""
    for is_late in (False, True):
        model = tiny_model("llama", num_hidden_layers=2).train()
        model.set_attn_implementation("sdpa")
        batch = tiny_batch(model, rows=4)
        batch["attention_mask"] = torch.ones_like(batch["input_ids"])
        batch["attention_mask"][1, 9:] = 0
        model = shardwise.parallelize(model, mesh)
        gradients_of(model).is_late = is_late
        step = shardwise.TrainStep(model, mesh, num_microbatches=2)
        step(batch)
        with ReadCount() as reads:
            loss = step(batch).loss
        yield float(loss), shardwise.full_gradients(model), reads.places


def rows_known(mesh):
    (loss, gradients, looks), (late_loss, late_gradients, reads) = step_with_rows_known(mesh)
    reads = [place for place in reads if "in gathered" not in place]  # of what ranks compare on the host
    return abs(loss - late_loss), differing_gradients(late_gradients, gradients), looks, reads


def test_stages_do_not_look_at_rows_of_which_the_host_knows(on_ranks):
    for error, different, looks, reads in on_ranks(rows_known, layout="pp2"):
        assert error < 1e-6 and not different and any("masking_utils" in place for place in looks) and not reads
