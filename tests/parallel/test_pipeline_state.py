"""What stages of a pipeline hold, give out and take in: each its own parameters, all of them together the model."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode

import shardwise
from shardwise.errors import UnsupportedError
from shardwise.parameters.registry import canonical_entries, local_part, registry_of
from shardwise.parameters.replicas import find_unequal_replicas
from tests.families import FULL_PRODUCT, MANY_STEPS, rows_of, tiny_batch, tiny_model
from tests.oracle import differing_gradients

pytestmark = pytest.mark.spawn

ADAMW = {"lr": 1e-3, "eps": 1e-6}

CASES = {
    ("pp2", "1f1b"): {"tied": True},
    ("pp2", "zbv"): {"tied": True},
    ("pp2.fsdp2", "zbv"): {"tied": True, "fsdp": shardwise.FsdpPolicy(zero_stage=2)},
    ("pp2.ddp2", "interleaved_1f1b"): {"tied": True},
    ("pp2.tp2", "gpipe"): {"tied": True, "sequence_parallel": True},
}
"""Every axis beside stages, with one stage on a rank and with two."""
if FULL_PRODUCT:  # other schedules of the same kinds, which tests/pipeline/test_step.py has in these layouts, too
    CASES |= {("pp2.fsdp2", "1f1b"): {"fsdp": shardwise.FsdpPolicy(zero_stage=2)}, ("pp2.tp2", "looped_bfs"): {}}


def build(mesh, schedule, *, tied=False, buffers=False, **options):
    whole = tiny_model("llama", num_hidden_layers=4, tied=tied)
    for layer in whole.model.layers if buffers else ():
        layer.register_buffer("runs", torch.zeros((), dtype=torch.int64))
    pipeline = shardwise.Pipeline(schedule=schedule)
    return whole, shardwise.parallelize(copy.deepcopy(whole), mesh, pipeline=pipeline, **options)


def train(mesh, schedule):
    """What is wrong with loss, gradients, norms and parameters in three steps, and with copies after them: after more
    where tied weights are split over tp too (those of pp2 alone, which fsdp shards and copies no further, go on in
    tests/pipeline/test_step.py, those of ddp in tests/train/test_data_parallel.py).
    """
    whole, model = build(mesh, schedule, **CASES[str(mesh.shape), schedule])
    batch = tiny_batch(whole, rows=4 * mesh.data_size)
    rows, step, problems = rows_of(batch, mesh), shardwise.TrainStep(model, mesh, num_microbatches=4), []
    optimizers = [torch.optim.AdamW(whole.parameters(), **ADAMW)]
    optimizers.append(shardwise.build_optimizer(model, torch.optim.AdamW, **ADAMW))
    is_long = CASES[str(mesh.shape), schedule].get("tied") and mesh.size("tp") > 1
    for _ in range(3):
        loss = step(rows).loss
        expected = whole(**batch).loss
        expected.backward()
        problems += [] if abs(float(loss) - expected.item()) < 1e-5 else [f"loss {loss}, not {expected}"]
        problems += differing_gradients(
            shardwise.full_gradients(model), {name: each.grad for name, each in whole.named_parameters()}
        )
        norms = shardwise.clip_grad_norm_(model, 1.0), torch.nn.utils.clip_grad_norm_(whole.parameters(), 1.0)
        problems += [] if abs(float(norms[0] - norms[1])) < 1e-4 else [f"norms {norms}"]
        for optimizer in optimizers:
            optimizer.step(), optimizer.zero_grad()
        found = shardwise.full_state_dict(model)
        errors = {name: float((found[name] - value).abs().max()) for name, value in whole.state_dict().items()}
        problems += [f"{name} off by {error}" for name, error in errors.items() if error > 1e-5]
    step = shardwise.TrainStep(model, mesh, num_microbatches=2)
    for _ in range(MANY_STEPS - 3 if is_long else 0):
        step(rows), optimizers[1].step(), optimizers[1].zero_grad()
    return problems, find_unequal_replicas(model)


@pytest.mark.parametrize(("layout", "schedule"), CASES)
def test_stages_train_as_the_whole_model(on_ranks, layout, schedule):
    for problems, unequal in on_ranks(train):
        assert problems == []
        assert unequal == ()


def states(mesh, schedule, tied, directory):
    whole, model = build(mesh, schedule, tied=tied)
    registry = registry_of(model)
    state = shardwise.full_state_dict(model)
    on_first = shardwise.full_state_dict(model, rank0_only=True)
    with pytest.raises(UnsupportedError, match="state_dict.. of a LlamaForCausalLM that is split over pp=2"):
        model.state_dict()
    other = tiny_model("llama", num_hidden_layers=4, tied=tied, seed=1)
    shardwise.export_pretrained(model, directory / schedule / str(tied))
    shardwise.export_pretrained(other_on(mesh, model, other), directory / f"{schedule} other" / str(tied))
    return {
        "state": list(state) == list(whole.state_dict())
        and all(map(torch.equal, state.values(), whole.state_dict().values())),
        "on first": bool(on_first) == (mesh.rank == 0)
        and all(torch.equal(state[name], on_first[name]) for name in on_first),
        "held": sum(local_part(each).numel() for each in model.parameters()),
        "planned": sum(
            torch.Size(entry.layout.local_shape(mesh.coords)).numel()
            for entry in registry.entries.values()
            if entry.is_held
        ),
        "names": list(canonical_entries(model)) == [name for name, _ in whole.named_parameters()],
    }


def other_on(mesh, model, other):
    """`model` with the values of another one, given in full."""
    model.load_state_dict(other.state_dict())
    assert all(map(torch.equal, shardwise.full_state_dict(model).values(), other.state_dict().values()))
    return model


@pytest.mark.parametrize("layout", ["pp2"])
@pytest.mark.parametrize(
    ("schedule", "tied"), [("1f1b", True), ("zbv", True), *[("interleaved_1f1b", False)] * FULL_PRODUCT]
)
def test_the_whole_state_goes_out_and_in(on_ranks, tmp_path_factory, layout, schedule, tied):
    directory = tmp_path_factory.getbasetemp()
    whole = tiny_model("llama", num_hidden_layers=4, tied=tied)
    found = on_ranks(states, directory=directory)
    for rank in found:
        assert rank["state"] and rank["on first"] and rank["names"]
        assert rank["held"] == rank["planned"]
    copies = whole.lm_head.weight.numel() if tied and schedule == "1f1b" else 0
    assert sum(rank["held"] for rank in found) == sum(each.numel() for each in whole.parameters()) + copies
    assert max(rank["held"] for rank in found) < 0.7 * sum(each.numel() for each in whole.parameters())
    for name, seed in ((schedule, 0), (f"{schedule} other", 1)):
        read = transformers.AutoModelForCausalLM.from_pretrained(directory / name / str(tied))
        expected = tiny_model("llama", num_hidden_layers=4, tied=tied, seed=seed)
        assert all(map(torch.equal, read.state_dict().values(), expected.state_dict().values()))


def trained_in_part(mesh, trained):
    """Gradients' names and the loss after a step of an optimizer, where only some parameters are trained."""
    whole = tiny_model("llama", num_hidden_layers=4)
    for name, parameter in whole.named_parameters():
        parameter.requires_grad_(name.startswith(trained))
    model = shardwise.parallelize(whole, mesh, precision=shardwise.Precision(compute="float32"))
    groups = [{"params": f"{trained}**", "lr": 1e-2}]
    optimizer = shardwise.build_optimizer(model, torch.optim.AdamW, lr=1e-3, groups=groups)
    step = shardwise.TrainStep(model, mesh, num_microbatches=2)
    losses = []
    for _ in range(3):
        losses.append(float(step(tiny_batch(model, rows=2)).loss))
        names = sorted(shardwise.full_gradients(model))
        optimizer.step(), optimizer.zero_grad()
    return losses, names


@pytest.mark.parametrize("layout", ["pp2"])
@pytest.mark.parametrize("trained", ["lm_head.", "model.layers.0."])
def test_a_stage_may_have_nothing_to_train(on_ranks, layout, trained):
    first, second = on_ranks(trained_in_part)
    assert first == second
    losses, names = first
    assert losses[2] < losses[0]
    assert names and all(name.startswith(trained) for name in names)


class Casts(TorchDispatchMode):
    """Counts parameters that are copied in another dtype."""

    num_parameters = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        is_cast = func is torch.ops.aten._to_copy.default and isinstance(args[0], torch.nn.Parameter)
        self.num_parameters += is_cast
        return func(*args, **(kwargs or {}))


def casts_of_a_step(mesh, schedule):
    """How often a step casts a parameter, how many this rank holds, and how far losses are off float32's."""
    whole = tiny_model("llama", num_hidden_layers=4, tied=True)
    options = {"pipeline": shardwise.Pipeline(schedule=schedule), "precision": shardwise.Precision()}
    model = shardwise.parallelize(copy.deepcopy(whole), mesh, **options)
    batch = tiny_batch(whole, rows=4)
    step = shardwise.TrainStep(model, mesh, num_microbatches=4)
    step(batch)  # the first one also finds out the shapes of what stages send
    model.zero_grad()
    with Casts() as casts:
        loss = step(batch).loss
    expected = whole(**batch).loss
    expected.backward()
    gradients = shardwise.full_gradients(model)
    off = {
        name: float((gradients[name] - each.grad).norm() / each.grad.norm()) for name, each in whole.named_parameters()
    }
    return casts.num_parameters, len(list(model.parameters())), abs(float(loss) - expected.item()), max(off.values())


@pytest.mark.parametrize("layout", ["pp2"])
@pytest.mark.parametrize("schedule", ["zbv", *["1f1b"] * FULL_PRODUCT])
def test_microbatches_share_what_is_cast_for_them(on_ranks, layout, schedule):
    for num_cast, num_held, loss, gradient in on_ranks(casts_of_a_step):
        assert num_cast == num_held
        assert loss < 0.02 and gradient < 0.1


def random_values(mesh, seed, tied):
    config = tiny_model("llama", num_hidden_layers=4, tied=tied).config
    state = shardwise.full_state_dict(shardwise.load(config, mesh, seed=seed))
    return {name: float(value.double().sum()) for name, value in state.items()}


@pytest.mark.parametrize("layout", ["pp2"])
@pytest.mark.parametrize(("seed", "tied"), [(1, True)])
def test_random_values_do_not_depend_on_stages(on_ranks, layout, seed, tied):
    with shardwise.Mesh.open("tp1") as mesh:
        expected = random_values(mesh, seed, tied)
    for found in on_ranks(random_values):
        assert found == expected


def count_runs(mesh):
    """The full state of buffers in which layers count their runs, of which each rank runs some; and an export's."""
    whole, model = build(mesh, "1f1b", buffers=True)

    def count(layer, args, output):
        layer.runs.add_(1)

    for number in (0, 3):
        model.model.layers[number].register_forward_hook(count)
    shardwise.TrainStep(model, mesh, num_microbatches=4)(tiny_batch(whole, rows=4))
    state = shardwise.full_state_dict(model)
    return [int(state[f"model.layers.{number}.runs"]) for number in range(4)]


@pytest.mark.parametrize("layout", ["pp2"])
def test_buffers_are_those_of_the_stage_that_computes_with_them(on_ranks, layout):
    assert on_ranks(count_runs) == [[4, 0, 0, 4]] * 2
