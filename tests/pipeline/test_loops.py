"""Loops by hand over a model in stages: what each rank of a pipeline does to its own part is right, or one error."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.distributed.tensor import DTensor
from transformers import DynamicCache

import shardwise
from shardwise.plan.options import FsdpPolicy
from shardwise.ranks.spawn import spawn
from tests.families import CACHE, tiny_batch, tiny_model
from tests.oracle import Oracle, differing, differing_gradients

pytestmark = pytest.mark.spawn

OPTIONS = {"lr": 1e-2, "eps": 1e-4}
LAST = ("layers.1.", "model.norm", "lm_head")


def both(mesh, tied=False):
    whole = tiny_model("llama", num_hidden_layers=2, tied=tied).train()
    return whole, shardwise.parallelize(copy.deepcopy(whole), mesh).train()


def freeze(models, is_frozen):
    for model in models:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not is_frozen(name))


def gradients(whole):
    return {name: each.grad for name, each in whole.named_parameters() if each.grad is not None}


def same_weights(model, whole):
    state = shardwise.full_state_dict(model)
    return [name for name, value in whole.state_dict().items() if float((state[name] - value).abs().max()) > 2e-5]


def said(call, kinds=(shardwise.ShardwiseError, RuntimeError)):
    """The first line and the place of the error that a call ends in."""
    try:
        call()
    except kinds as error:
        return str(error).splitlines()[0], getattr(error, "at", "")
    return "nothing", ""


def clip(mesh):
    """torch's own clipping and AdamW, and a batch without backward before each step."""
    whole, model = both(mesh, tied=True)
    optimizers = [torch.optim.AdamW(each.parameters(), **OPTIONS) for each in (whole, model)]
    norms = []
    for seed in range(2):
        batch = tiny_batch(whole, rows=4 - seed, seed=seed)  # 3 rows: the last, smaller batch
        model(**tiny_batch(whole, rows=2, seed=9))
        for each, optimizer in zip((whole, model), optimizers, strict=True):
            optimizer.zero_grad()
            each(**batch).loss.backward()
            norms.append(float(torch.nn.utils.clip_grad_norm_(each.parameters(), 0.5)))
            optimizer.step()
    assert norms[0] == pytest.approx(norms[1], rel=1e-4) and norms[2] == pytest.approx(norms[3], rel=1e-4)
    return same_weights(model, whole)


def scale(mesh):
    """`GradScaler` leaves out the step in which one stage has an infinite gradient, on all."""
    whole, model = both(mesh)
    scalers = [torch.amp.GradScaler("cpu", init_scale=256.0) for _ in range(2)]
    optimizers = [torch.optim.AdamW(each.parameters(), **OPTIONS) for each in (whole, model)]
    for seed in range(2):
        batch = tiny_batch(whole, rows=2, seed=seed)
        for each, scaler, optimizer in zip((whole, model), scalers, optimizers, strict=True):
            scaler.scale(each(**batch).loss).backward()
            if seed and (each is whole or mesh.coord("pp")):
                next(p for p in each.parameters() if p.grad is not None).grad.view(-1)[0] = float("inf")
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    assert scalers[1].get_scale() == 128.0
    return same_weights(model, whole)


def frozen_stage(mesh):
    """All of the first stage is frozen: gradients are right, and torch's clipping says that it would wait for it."""
    whole, model = both(mesh)
    freeze((whole, model), lambda name: not any(each in name for each in LAST))
    batch = tiny_batch(whole, rows=4)
    for each in (whole, model):
        each(**batch).loss.backward()
    problems = differing_gradients(shardwise.full_gradients(model), gradients(whole))
    text, _ = said(lambda: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))
    expected = "nothing" if not mesh.coord("pp") else "torch.nn.utils.clip_grad_norm_ on a pipeline"
    norms = [float(shardwise.clip_grad_norm_(each, 1.0)) for each in (model,)]
    norms.append(float(torch.nn.utils.clip_grad_norm_(whole.parameters(), 1.0)))
    assert norms[0] == pytest.approx(norms[1], rel=1e-4)
    return problems + ([] if text.startswith(expected) else [text])


def frozen_model(mesh):
    """Nothing but an input is trained: a soft prompt."""
    whole = tiny_model("llama", num_hidden_layers=2)
    freeze((whole,), lambda name: True)
    batch = tiny_batch(whole, rows=2)
    embeds = whole.get_input_embeddings()(batch.pop("input_ids")).detach().requires_grad_()
    return Oracle(whole, {**batch, "inputs_embeds": embeds}).differences(mesh)


def copied(mesh):
    """A copy has weights and gradients of its own, and runs over the same ranks."""
    whole, model = both(mesh, tied=True)
    batch = tiny_batch(whole, rows=4)
    other = copy.deepcopy(model)
    other_whole = copy.deepcopy(whole)
    problems = []
    with torch.no_grad():
        for parameter in (*other.parameters(), *other_whole.parameters()):
            parameter.mul_(1.5)
    for each, expected in ((other, other_whole), (model, whole)):
        each(**batch).loss.backward()
        expected(**batch).loss.backward()
        problems += differing_gradients(shardwise.full_gradients(each), gradients(expected))
    return problems


def two_models(mesh):
    """Two pipelines in one process, whose losses are added up; evaluation with and without gradients in between."""
    pairs = [both(mesh), both(mesh, tied=True)]
    batch = tiny_batch(pairs[0][0], rows=4)
    for number in range(2):
        (pairs[0][number](**batch).loss + 2 * pairs[1][number](**batch).loss).backward()
    problems = []
    for whole, model in pairs:
        with torch.no_grad():
            assert float(model(**batch).loss) == pytest.approx(float(whole(**batch).loss), abs=1e-5)
        problems += differing_gradients(shardwise.full_gradients(model), gradients(whole))
    return problems


def chosen(mesh):
    """`backward(inputs=...)` of some parameters, then `torch.autograd.grad` of all."""
    whole, model = both(mesh, tied=True)
    batch = tiny_batch(whole, rows=4)
    for each in (whole, model):
        each(**batch).loss.backward(inputs=[p for name, p in each.named_parameters() if "mlp" in name])
    problems = differing_gradients(shardwise.full_gradients(model), gradients(whole))
    found = torch.autograd.grad(model(**batch).loss, list(model.parameters()), allow_unused=True)
    model.zero_grad()
    for parameter, gradient in zip(model.parameters(), found, strict=True):
        parameter.grad = gradient
    whole.zero_grad()
    whole(**batch).loss.backward()
    return problems + differing_gradients(shardwise.full_gradients(model), gradients(whole))


def hooks(mesh):
    """Hooks on parameters are called once a backward, with the gradient of all microbatches."""
    whole, model = both(mesh)
    seen: dict[str, list[torch.Tensor]] = {}
    for name, parameter in model.named_parameters():
        parameter.register_hook(lambda gradient, name=name: seen.setdefault(name, []).append(gradient.clone()))
        parameter.register_post_accumulate_grad_hook(lambda p, name=name: seen[name].append(p.grad.clone()))
    batch = tiny_batch(whole, rows=4)
    for each in (whole, model):
        each(**batch).loss.backward()
    assert {len(found) for found in seen.values()} == {2}
    expected = {name: gradients(whole)[name] for name in seen}
    return [line for at in (0, 1) for line in differing_gradients({n: f[at] for n, f in seen.items()}, expected)]


def interleaved(mesh):
    """Two forwards before a backward, gradients zeroed and tokens written in between, evaluation without gradients."""
    whole, model = both(mesh, tied=True)
    problems, written = [], []
    for each in (whole, model):
        first, second = (each(**tiny_batch(whole, rows=4, seed=seed)).loss for seed in (0, 1))
        for parameter in each.parameters():
            parameter.grad = torch.ones_like(parameter)
        each.zero_grad(set_to_none=False)
        (first * 0.5).backward()
        with torch.inference_mode():
            each(**tiny_batch(whole, rows=3, seed=2))
            ids = tiny_batch(whole, rows=2)["input_ids"]
            written.append(each.generate(ids, max_new_tokens=3, pad_token_id=0, do_sample=False))
        (second + each(**tiny_batch(whole, rows=5, seed=3)).loss).backward()
    problems = differing_gradients(shardwise.full_gradients(model), gradients(whole))
    return problems + ([] if torch.equal(*written) else ["the tokens"])


def autocast(mesh):
    """The same model with and without autocast, whose dtypes cross the cuts."""
    whole, model = both(mesh)
    batch, losses = tiny_batch(whole, rows=4), []
    for each in (whole, model):
        each(**batch).loss.backward()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = each(**batch).loss
        loss.backward()
        losses.append(float(loss.detach()))
    norms = [
        float(shardwise.clip_grad_norm_(model, 1e9)),
        float(torch.nn.utils.get_total_norm(gradients(whole).values())),
    ]
    return (
        [] if abs(losses[0] - losses[1]) < 0.02 and norms[0] == pytest.approx(norms[1], rel=0.02) else [losses, norms]
    )


def outputs_as_tuples(mesh):
    """Positions for names, and outputs as tuples."""
    whole, model = both(mesh)
    batch, found = tiny_batch(whole, rows=4), []
    for each in (whole, model):
        loss, logits, *_ = each(batch["input_ids"], labels=batch["labels"], return_dict=False)
        loss.backward()
        found.append((loss.detach(), torch.as_tensor(logits + 0).detach()))
    problems = differing("loss", found[1][0], found[0][0], 1e-5) + differing("logits", found[1][1], found[0][1], 1e-4)
    return problems + differing_gradients(shardwise.full_gradients(model), gradients(whole))


def changing(mesh):
    """Steps of other numbers of rows, tokens and microbatches, two for an update, a scheduler, evaluation and generated
    tokens in between.
    """
    whole, model = both(mesh, tied=True)
    steps = [shardwise.TrainStep(model, mesh, num_microbatches=count) for count in (2, 4)]
    optimizers = [torch.optim.AdamW(whole.parameters(), **OPTIONS)]
    optimizers.append(shardwise.build_optimizer(model, torch.optim.AdamW, **OPTIONS))
    schedulers = [torch.optim.lr_scheduler.LambdaLR(each, lambda step: 1 / (1 + step)) for each in optimizers]
    problems = []
    for number, (rows, length) in enumerate(((8, 6), (4, 9), (2, 5), (8, 7))):
        batch = tiny_batch(whole, rows=rows, length=length, seed=number)
        expected = whole(**batch).loss
        expected.backward()
        problems += differing("loss", steps[number % 2](batch).loss, expected.detach(), 1e-5)
        if number % 2:
            problems += differing_gradients(shardwise.full_gradients(model), gradients(whole))
            for each in (*optimizers, *schedulers):
                each.step()
            for optimizer in optimizers:
                optimizer.zero_grad()
        else:
            model.eval()
            with torch.no_grad():
                problems += differing("loss", model(**batch).loss, whole(**batch).loss, 1e-5)
            model.generate(batch["input_ids"][:2], max_new_tokens=2, pad_token_id=0, do_sample=False)
            model.train()
    return problems + same_weights(model, whole)


def own_loss(mesh):
    """A loss of the caller's own, no mean over targets, is one of the whole batch."""
    whole, model = both(mesh)
    weight = torch.linspace(0.1, 1.0, whole.config.vocab_size)

    def weighted(logits, labels, vocab_size, **_):
        flat = logits[:, :-1].reshape(-1, vocab_size)
        return torch.nn.functional.cross_entropy(flat, labels[:, 1:].reshape(-1), weight=weight)

    for each in (whole, model):
        each.loss_function = weighted
        each(**tiny_batch(whole, rows=4)).loss.backward()
    return differing_gradients(shardwise.full_gradients(model), gradients(whole))


LOOPS = [changing, own_loss, clip, scale, frozen_stage, frozen_model, copied, two_models]
LOOPS += [chosen, hooks, interleaved, autocast, outputs_as_tuples]


@pytest.mark.parametrize("loop", LOOPS, ids=lambda x: x.__name__)
@pytest.mark.parametrize("layout", ["pp2"])
def test_loops_by_hand_are_those_of_the_unsplit_model(on_ranks, layout, loop):
    for problems in on_ranks(run_loop):
        assert not problems, problems


def run_loop(mesh, loop):
    return loop(mesh)


def refuse(mesh):
    """What each call says on this rank that some ranks make otherwise, or that no stage can serve."""
    whole, model = both(mesh)
    other = shardwise.parallelize(copy.deepcopy(whole), mesh)
    batch, is_last = tiny_batch(whole, rows=4), bool(mesh.coord("pp"))
    steps = {each: shardwise.TrainStep(each, mesh, num_microbatches=2) for each in (model, other)}
    optimizer = torch.optim.LBFGS(model.parameters())

    def without_gradients_on_one():
        model.train()
        with torch.set_grad_enabled(is_last):
            model(**batch)

    found = {
        "mode": said(lambda: model.train(is_last)(**batch)),
        "gradients": said(without_gradients_on_one),
        "model": said(lambda: steps[other if is_last else model](batch)),
    }
    model.train()

    def with_logits():
        output = model(**batch)
        (output.loss + 1e-4 * output.logits.logsumexp(-1).pow(2).mean()).backward()

    found |= {"z-loss": said(with_logits), "base": said(lambda: model.model(input_ids=batch["input_ids"]))}
    found |= {"second order": said(lambda: second_order(model(**batch).loss, list(model.parameters())))}
    cache = DynamicCache(config=model.config)
    for layer in range(2):
        cache.update(torch.zeros(4, 2, 1, 16), torch.zeros(4, 2, 1, 16), layer)
    found |= {"prefix": said(lambda: model(**batch, **{CACHE: cache}))}
    loss = model(**batch).loss
    loss.backward(retain_graph=True)
    found |= {"again": said(loss.backward), "lbfgs": said(lambda: optimizer.step(lambda: model(**batch).loss))}
    return found


def second_order(loss, parameters):
    found = torch.autograd.grad(loss, parameters, create_graph=True, allow_unused=True)
    found = [each for each in found if each is not None]
    torch.autograd.backward(found, [torch.ones_like(each) for each in found])


@pytest.mark.parametrize("layout", ["pp2"])
def test_what_ranks_do_otherwise_is_the_same_error_on_all(on_ranks, layout):
    first, second = on_ranks(refuse)
    assert first == second
    different = "tp and pp ranks were given different batches"
    assert [first[name] for name in ("mode", "gradients", "model")] == [
        (different, "model.training"),
        (different, "gradients"),
        (different, "the model"),
    ]
    assert first["z-loss"][0] == "a gradient of the output of a model in stages other than its loss"
    assert first["base"][0] == "LlamaModel is a part of a model in stages: no rank can run it alone"
    assert "does not require grad" in first["second order"][0]
    assert "in stages that goes on from keys and values" in first["prefix"][0]
    assert "the gradients of this forward have been added already" in first["again"][0]
    assert "LBFGS on parameters of this split model" in first["lbfgs"][0]


def alone(mesh):
    """What every rank is told where one of four is in eval mode, or takes no gradients, or two data ranks differ; and
    gradients of batches of unequal sizes after that.
    """
    whole = tiny_model("llama", num_hidden_layers=2, tied=True).train()
    model = shardwise.parallelize(copy.deepcopy(whole), mesh, fsdp=FsdpPolicy(zero_stage=3)).train()
    is_freed = []  # some models read the tied weight after the embedding has run
    if not mesh.coord("pp"):
        embedding = model.get_input_embeddings()
        model.model.layers[0].register_forward_pre_hook(
            lambda *_: is_freed.append(isinstance(embedding.weight, DTensor))
        )
    batches = [tiny_batch(whole, rows=rows, seed=rows) for rows in (4, 6)]
    batch, is_last = batches[mesh.data_rank], mesh.rank == mesh.shape.world_size - 1

    def without_gradients_on_one():
        model.train()
        with torch.set_grad_enabled(not is_last):
            model(**batch)

    found = [
        said(lambda: model.train(not is_last)(**batch)),
        said(without_gradients_on_one),
        said(lambda: model.train(mesh.data_rank == 0)(**batch)),
        said(lambda: model.train()(**batch, output_attentions=is_last)),
    ]
    model(**batch).loss.backward()
    for each in batches:
        (whole(**each).loss / 2).backward()
    problems = ["the tied weight is freed"] if any(is_freed) else []
    return found, problems + differing_gradients(shardwise.full_gradients(model), gradients(whole))


@pytest.mark.parametrize("layout", ["pp2.fsdp2"])
def test_data_ranks_all_raise_or_all_go_on(on_ranks, layout):
    first, *others = on_ranks(alone)
    assert not any(problems for _, problems in (first, *others)), first[1]
    assert all(found == first[0] for found, _ in others)
    different = "tp and pp ranks were given different batches"
    assert first[0] == [
        (different, "model.training"),
        (different, "gradients"),
        ("ranks do not train alike", "model.training"),
        (different, "['output_attentions']"),
    ]


def break_down(mesh):
    """What every rank is told where one stage raises in the middle, and at the next call."""
    _, model = both(mesh)
    batch = tiny_batch(model, rows=4)
    return said(lambda: model(**{**batch, "input_ids": batch["input_ids"] + 10**6}), (Exception,))[0], said(
        lambda: model(**batch)
    )[0]


@pytest.mark.parametrize("layout", ["pp2"])
def test_a_call_that_fails_on_one_stage_ends_on_all(on_ranks, layout):
    for failed, again in on_ranks(break_down):
        assert failed != "nothing"
        assert again == "this pipeline has failed before"


def clip_the_first_stage():
    """A list of parameters of which the second stage has none, in a process with one model."""
    with shardwise.Mesh.open("pp2") as mesh:
        whole, model = both(mesh)
        freeze((whole, model), lambda name: ".layers.0." not in name)
        batch = tiny_batch(whole, rows=4)
        norms = []
        for each, clip in ((whole, torch.nn.utils.clip_grad_norm_), (model, shardwise.clip_grad_norm_)):
            each(**batch).loss.backward()
            norms.append(float(clip([value for value in each.parameters() if value.requires_grad], 1.0)))
        return norms


def test_a_stage_without_any_of_the_parameters_takes_part_in_their_norm():
    for expected, found in spawn(clip_the_first_stage, 2):
        assert found == pytest.approx(expected, rel=1e-5)
