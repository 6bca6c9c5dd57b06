"""Dropout: equal on all ranks where they compute alike, different where each works on its own part of the data."""

from __future__ import annotations

import hashlib

import pytest
import torch
import torch.nn.functional as F

import shardwise
from shardwise.parameters.registry import registry_of
from shardwise.ranks.spawn import spawn
from shardwise.runtime.context import Axis, SplitContext
from tests.families import checkpoint_layers, tiny_batch, tiny_model
from tests.oracle import differing_gradients

pytestmark = pytest.mark.spawn

FAMILIES = {
    "llama": {"attention_dropout": 0.3, "num_key_value_heads": 4},
    "gpt_neox": {"attention_dropout": 0.3, "hidden_dropout": 0.2},
    # Drops hidden states inside attention and MLP, after their row-split linears.
    "starcoder2": {
        "attention_dropout": 0.3,
        "residual_dropout": 0.2,
        "embedding_dropout": 0.1,
        "num_key_value_heads": 4,
    },
    # Its router draws, on hidden states that all ranks hold whole.
    "mixtral": {"attention_dropout": 0.3, "router_jitter_noise": 0.4, "num_key_value_heads": 4},
}
ROWS, LENGTH, HIDDEN, LOCAL_HEADS = 2, 8, 64, 2


WHOLE_ATTENTION = {
    **{f"model.layers.*.self_attn.{name}_proj": "replicate" for name in "qkvo"},
    "model.layers.*.self_attn": "whole_sequence",
    "model.layers": "sequence",
}
"""Rules for attentions that every rank computes on all of the sequence, beside MLPs that are split."""


def record(mesh, family, sequence_parallel, plan="auto"):
    """What this rank drew and computed in one training step."""
    model = tiny_model(family, num_hidden_layers=2, **FAMILIES[family])
    batch = tiny_batch(model, rows=ROWS, length=LENGTH)
    shardwise.parallelize(model, mesh, plan=plan, sequence_parallel=sequence_parallel).train()
    masks = []
    real = F.dropout

    def dropout(x, p=0.5, training=True, inplace=False):
        scale = real(torch.ones_like(x), p, training)
        if training:
            masks.append((tuple(x.shape), digest(scale)))
        return x * scale

    F.dropout = dropout
    torch.manual_seed(5)
    step = shardwise.TrainStep(model, mesh)
    losses = [float(step(batch).loss) for _ in range(2)]
    state = digest(torch.get_rng_state())
    whole = {
        name: digest(value.grad)
        for name, value in model.named_parameters()
        if registry_of(model).entry(name).split is None
    }
    torch.manual_seed(5)
    again = float(step(batch).loss)
    model.eval()
    with torch.no_grad():
        still = digest(model(input_ids=batch["input_ids"]).logits), digest(torch.get_rng_state())
    F.dropout = real
    return {"masks": masks, "losses": losses, "again": again, "state": state, "whole": whole, "still": still}


def digest(value):
    return hashlib.sha256(value.detach().contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()[:16]


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_masks_are_equal_where_ranks_compute_alike_and_only_there(on_ranks, family, sequence_parallel):
    first, second = on_ranks(record, layout="tp2")
    for name in ("losses", "again", "state", "whole", "still"):
        assert first[name] == second[name], name
    assert first["losses"][0] == first["again"], "the same seed drops the same"
    assert first["losses"][0] != first["losses"][1], "every step drops again"
    shapes = [shape for shape, _ in first["masks"]]
    assert shapes == [shape for shape, _ in second["masks"]]
    attention = (ROWS, LOCAL_HEADS, LENGTH, LENGTH)
    assert attention in shapes
    for (shape, here), (_, there) in zip(first["masks"], second["masks"], strict=True):
        part_of_sequence = sequence_parallel and shape == (ROWS, LENGTH // 2, HIDDEN)
        assert (here != there) == (shape == attention or part_of_sequence), f"{shape} is dropped on the wrong stream"
    assert len({mask for _, mask in first["masks"]}) >= len(shapes) * 2 // 3, "masks repeat"


def test_a_module_given_the_whole_sequence_drops_alike_on_all_ranks_and_anew_in_every_layer(on_ranks):
    first, second = on_ranks(record, layout="tp2", family="llama", sequence_parallel=True, plan=WHOLE_ATTENTION)
    for name in ("losses", "again", "state", "whole", "still"):
        assert first[name] == second[name], name
    assert first["losses"][0] == first["again"]
    assert first["losses"][0] != first["losses"][1]
    assert first["masks"] == second["masks"]
    assert {shape for shape, _ in first["masks"]} == {(ROWS, 2 * LOCAL_HEADS, LENGTH, LENGTH)}
    assert len({mask for _, mask in first["masks"]}) == 4, "two layers, two steps; the third began as the first"


def draw_twice(layout):
    """What two modules of one layer draw that are both to draw alike."""
    with shardwise.Mesh.open(layout) as mesh:
        context = SplitContext(tp=Axis("tp", size=2, coord=mesh.rank), has_dropout=True)
        module, found = torch.nn.Linear(2, 2).train(), []
        torch.manual_seed(3)
        context.fork_rng("layer", module)
        for name in ("layers.0.first", "layers.0.second"):
            context.fork_rng("full_sequence", module, replicated=name)
            found.append(digest(torch.rand(4)))
            context.restore_rng("full_sequence")
        found.append(digest(torch.rand(4)))
        context.restore_rng("layer")
        return found


def test_modules_of_one_layer_that_draw_alike_do_not_repeat_each_other():
    first, second = spawn(draw_twice, 2, "tp2")
    assert first[:2] == second[:2]
    assert len({*first, second[2]}) == 4


class FaultError(Exception):
    pass


def fail_inside(layout):
    """A forward that raises inside a region leaves the shared stream to the caller."""
    with shardwise.Mesh.open(layout) as mesh:
        found = {}
        for sequence_parallel in (False, True):
            model = tiny_model("gpt_neox", **FAMILIES["gpt_neox"])
            batch = tiny_batch(model)
            shardwise.parallelize(model, mesh, sequence_parallel=sequence_parallel).train()
            for where in (
                "gpt_neox.layers.0.attention.dense",
                "gpt_neox.layers.1.mlp.act",
                "gpt_neox.layers.0",
                "lm_head",
            ):
                hook = torch.nn.Module.register_forward_pre_hook(model.get_submodule(where), fail)
                torch.manual_seed(6)
                with pytest.raises(FaultError):
                    model(**batch)
                hook.remove()
                torch.manual_seed(7)
                found[where, sequence_parallel] = digest(torch.rand(4)), float(model(**batch).loss.detach())
        return found


def fail(module, args):
    raise FaultError


def test_a_forward_that_raises_gives_the_stream_back():
    first, second = spawn(fail_inside, 2, "tp2")
    assert first == second
    assert len({drawn for drawn, _ in first.values()}) == 1
    for sequence_parallel in (False, True):
        assert len({loss for (_, on), (_, loss) in first.items() if on == sequence_parallel}) == 1


def recompute_attention(mesh, family):
    """Gradients with and without running attentions again in backward, which are regions and drop after them, too."""
    found = []
    for mode in ("none", "attention"):
        model = tiny_model(family, **FAMILIES[family])
        shardwise.parallelize(model, mesh, recompute=shardwise.Recompute(mode=mode)).train()
        torch.manual_seed(9)
        model(**tiny_batch(model)).loss.backward()
        found.append(shardwise.full_gradients(model))
    return differing_gradients(found[1], found[0])


def test_regions_that_run_again_in_backward_drop_the_same(on_ranks):
    assert on_ranks(recompute_attention, layout="tp2", family="starcoder2") == [[], []]


def recompute(mesh, family):
    """Gradients with and without running layers again in backward, and the stream afterwards."""
    found = {}
    for sequence_parallel in (False, True):
        model = tiny_model(family, **FAMILIES[family])
        batch = tiny_batch(model)
        shardwise.parallelize(model, mesh, sequence_parallel=sequence_parallel).train()
        for again in (False, True):
            checkpoint_layers(model, enable=again)
            torch.manual_seed(9)
            model(**batch).loss.backward()
            gradients = shardwise.full_gradients(model)
            found[sequence_parallel, again] = gradients, digest(torch.get_rng_state())
            model.zero_grad()
    return found


@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "gpt_neox"])  # whose kinds others have
def test_layers_that_run_again_in_backward_drop_the_same(on_ranks, family):
    for rank in on_ranks(recompute, layout="tp2"):
        for sequence_parallel in (False, True):
            expected, stream = rank[sequence_parallel, False]
            found, stream_again = rank[sequence_parallel, True]
            assert stream == stream_again
            assert not differing_gradients(found, expected)


def no_dropout(layout):
    """A model without dropout draws nothing; splitting it does not either."""
    with shardwise.Mesh.open(layout) as mesh:
        model = tiny_model("llama")
        torch.manual_seed(8)
        before = torch.get_rng_state()
        shardwise.parallelize(model, mesh, sequence_parallel=True).train()
        shardwise.TrainStep(model, mesh)(tiny_batch(model))
        return torch.equal(before, torch.get_rng_state())


def test_nothing_is_drawn_without_dropout():
    assert spawn(no_dropout, 2, "tp2") == [True, True]
