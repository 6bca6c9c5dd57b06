"""Recomputation keeps less for backward, computes the same, and says so where it cannot be done."""

from __future__ import annotations

import inspect

import pytest
import torch
import transformers

import shardwise
from shardwise.comm.count import CommunicationCount
from shardwise.errors import ConfigError
from shardwise.parallel.activation_memory import MemoryCount
from shardwise.plan.options import ParallelSpec
from tests.families import CACHE, rows_of, tiny_batch, tiny_model

LAYERS, LENGTH = 4, 32


def hold(mode, **options):
    """Bytes held between forward and backward, and the gradients."""
    with shardwise.Mesh.open("tp1") as mesh:
        model = tiny_model("llama", num_hidden_layers=LAYERS)
        batch = tiny_batch(model, length=LENGTH)
        model = shardwise.parallelize(model, mesh, recompute=shardwise.Recompute(mode=mode, **options)).train()
        with MemoryCount(model) as count:
            loss = model(**batch).loss
            held = count.total().activations
        loss.backward()
        return held, {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.single
def test_every_mode_keeps_less_and_computes_the_same():
    found = {
        "none": hold("none"),
        "attention": hold("attention"),
        "selective": hold("selective"),
        "alternate": hold("alternate"),
        "mlps": hold("full", modules=("model.layers.*.mlp",)),
        "full": hold("full"),
    }
    nbytes = {name: count for name, (count, _) in found.items()}
    assert nbytes["selective"] < nbytes["none"] and nbytes["attention"] < nbytes["none"]
    assert nbytes["mlps"] < nbytes["none"]
    assert nbytes["full"] < nbytes["alternate"] < nbytes["selective"]
    hidden = 2 * LENGTH * 64 * 4
    assert nbytes["full"] < nbytes["none"] / 4 and nbytes["full"] >= LAYERS * hidden
    for _, gradients in found.values():
        for name, gradient in found["none"][1].items():
            torch.testing.assert_close(gradients[name], gradient)


def kept_by_compiled(mesh, budget):
    """Bytes that blocks keep for backward besides parameters, and the gradients."""
    kept, recompute = {}, shardwise.Recompute(mode="none" if budget is None else "budget", budget=budget)

    def pack(x):
        if not isinstance(x, torch.nn.Parameter):
            kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    model = tiny_model("llama")
    batch = tiny_batch(model, length=LENGTH)
    choice = shardwise.Compile(backend="aot_eager")
    model = shardwise.parallelize(model, mesh, recompute=recompute, compilation=choice).train()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        loss = model(**batch).loss
    loss.backward()
    torch.compiler.reset()
    return sum(kept.values()), [parameter.grad for parameter in model.parameters()]


@pytest.mark.spawn  # ranks find torch's compiler imported
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")  # what torch's tracing does itself
def test_compiled_blocks_keep_as_much_as_a_budget_allows(on_ranks):
    ((most, expected),) = on_ranks(kept_by_compiled, layout="tp1", budget=None)
    ((least, found),) = on_ranks(kept_by_compiled, layout="tp1", budget=0.0)
    assert least < most / 2
    torch.testing.assert_close(found, expected)


def count_collectives(mesh, mode):
    model = tiny_model("llama", num_hidden_layers=LAYERS)
    batch = tiny_batch(model)
    model = shardwise.parallelize(model, mesh, recompute=shardwise.Recompute(mode=mode))
    with CommunicationCount() as count:
        shardwise.TrainStep(model, mesh)(batch)
    return count.num_calls("all_reduce", at_least_elements=2 * 13 * 64)


@pytest.mark.spawn
def test_full_recomputation_repeats_a_blocks_collectives_and_selective_keeps_them(on_ranks):
    assert on_ranks(count_collectives, layout="tp2", mode="none") == [4 * LAYERS + 2] * 2
    assert on_ranks(count_collectives, layout="tp2", mode="selective") == [4 * LAYERS + 2] * 2
    # The last reduction of a block is followed by nothing that backward needs, so checkpointing stops before it.
    repeated = on_ranks(count_collectives, layout="tp2", mode="full")[0] - (4 * LAYERS + 2)
    assert 0 < repeated <= 2 * LAYERS


def drop_out(mesh, mode):
    """Gradients of a model with dropout, from equal seeds."""
    model = tiny_model("llama", num_hidden_layers=1, attention_dropout=0.3)
    batch = tiny_batch(model)
    model = shardwise.parallelize(model, mesh, recompute=shardwise.Recompute(mode=mode)).train()
    torch.manual_seed(7)
    shardwise.TrainStep(model, mesh)(batch)
    return shardwise.full_gradients(model)


def drop_out_again(mesh, mode):
    recomputed = drop_out(mesh, mode)
    for name, gradient in drop_out(mesh, "none").items():
        torch.testing.assert_close(recomputed[name], gradient)


@pytest.mark.spawn
@pytest.mark.parametrize("mode", ["full", "selective", "attention"])
def test_dropout_is_the_same_when_it_is_drawn_again(on_ranks, mode):
    on_ranks(drop_out_again, layout="tp2")


def freeze(mesh):
    """A frozen model with a trained part, as adapters make it."""
    model = tiny_model("llama")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("layers.1.mlp" in name)
    batch = tiny_batch(model)
    model = shardwise.parallelize(model, mesh, recompute=shardwise.Recompute(mode="full"))
    mine = rows_of(batch, mesh)
    shardwise.TrainStep(model, mesh)(mine)
    found = shardwise.full_gradients(model)
    whole = tiny_model("llama")
    whole(**batch).loss.backward()
    assert set(found) == {f"model.layers.1.mlp.{each}_proj.weight" for each in ("gate", "up", "down")}
    return max(float((found[name] - whole.get_parameter(name).grad).abs().max()) for name in found)


@pytest.mark.spawn
@pytest.mark.parametrize("layout", ["tp2", "fsdp2"])
def test_frozen_bases_are_recomputed_too(on_ranks, layout):
    assert max(on_ranks(freeze)) < 1e-6


@pytest.mark.single
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "ful"}, "did you mean 'full'"),
        ({"mode": "attention", "modules": ("a",)}, "modules with mode"),
        ({"mode": "budget"}, "budget None"),
        ({"mode": "full", "budget": 0.5}, "mode 'full' with budget"),
        ({"mode": "budget", "budget": 2.0}, "budget is 2.0"),
    ],
)
def test_choices_that_make_no_sense_are_errors(options, message):
    with pytest.raises(ConfigError, match=message):
        shardwise.Recompute(**options)


@pytest.mark.single
def test_choices_that_need_compilation_are_errors():
    budget = shardwise.Recompute(mode="budget", budget=0.5)
    for options in ({}, {"compilation": shardwise.Compile(backend="eager")}):
        with pytest.raises(ConfigError, match="without compilation"):
            ParallelSpec(recompute=budget, **options)


@pytest.mark.single
@pytest.mark.parametrize(
    ("modules", "message"),
    [(("model.layers.*.mpl",), "matches no module"), (("model.layers.*", "model.layers.*.mlp"), "is inside another")],
)
def test_patterns_that_cannot_be_followed_are_errors(modules, message):
    with shardwise.Mesh.open("tp1") as mesh, pytest.raises(ConfigError, match=message):
        shardwise.parallelize(tiny_model("llama"), mesh, recompute=shardwise.Recompute(mode="full", modules=modules))


@pytest.mark.single
def test_a_head_that_hands_on_unnamed_whether_to_cache_builds_none():
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_key_value_heads": 2}
    config = transformers.GraniteMoeConfig(**sizes, num_hidden_layers=2, vocab_size=32, num_local_experts=2)
    model = transformers.GraniteMoeForCausalLM(config)
    assert "use_cache" not in inspect.signature(model.forward).parameters
    ids = torch.arange(8)[None]
    with shardwise.Mesh.open("tp1") as mesh:
        shardwise.parallelize(model, mesh, recompute=shardwise.Recompute(mode="selective"))
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()  # a cache that grew in forward would be found longer when blocks run again
        with torch.no_grad():
            assert model(input_ids=ids)[CACHE] is not None
        with pytest.raises(ConfigError, match="use_cache=True"):
            model(input_ids=ids, use_cache=True)


@pytest.mark.single
@pytest.mark.parametrize("mode", ["full", "selective", "attention"])
def test_random_numbers_are_kept_for_the_device_of_arguments_by_name(monkeypatch, mode):
    """An attention is called with its hidden states by name; torch looks for devices among what comes by position."""
    seen = []
    monkeypatch.setattr(
        torch.utils.checkpoint,
        "_infer_device_type",
        lambda *args: seen.append(torch.utils._pytree.tree_leaves(args)) or "cpu",
    )
    with shardwise.Mesh.open("tp1") as mesh:
        model = shardwise.parallelize(tiny_model("llama"), mesh, recompute=shardwise.Recompute(mode=mode))
        model(**tiny_batch(model)).loss.backward()
    assert seen and all(any(isinstance(each, torch.Tensor) for each in leaves) for leaves in seen)
