"""Where models are cut into stages."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest

from shardwise.errors import ConfigError
from shardwise.estimate.cuts import balance, check_pipeline, cut
from shardwise.estimate.memory import state_bytes
from shardwise.plan.options import Pipeline, Recompute
from shardwise.plan.pipeline_plan import LayerOrder
from shardwise.plan.structure import ModelFacts, ModuleFacts
from shardwise.schedule.schedule import SCHEDULES
from shardwise.sharding.layout import Layout, Step
from shardwise.sharding.placement import Chunk, Replicate, split_even
from shardwise.topology.shape import MeshShape

pytestmark = pytest.mark.pure


WIDTH = 10


def model(num_layers: int, vocab_size: int, *, tied: bool = False) -> tuple[LayerOrder, ModelFacts]:
    """An embedding, layers of one weight each, and a head."""
    linear = ModuleFacts(kind="linear", parameters={"weight": (WIDTH, WIDTH)})
    layers = [f"layers.{number}" for number in range(num_layers)]
    modules = {
        "": ModuleFacts(kind="other"),
        "embed": ModuleFacts(kind="embedding", parameters={"weight": (vocab_size, WIDTH)}),
        **dict.fromkeys(layers, linear),
        "head": ModuleFacts(kind="linear", parameters={"weight": (vocab_size, WIDTH)}),
    }
    uses = {f"{layer}.weight": (number,) for number, layer in enumerate(layers)}
    uses |= {"embed.weight": (0,), "head.weight": (num_layers - 1,)}
    order = LayerOrder(calls=tuple(layers), uses=uses, cut_tensors=((),) * (num_layers - 1))
    return order, ModelFacts(model_type="", modules=modules, tied={"head.weight": "embed.weight"} if tied else {})


@pytest.mark.parametrize(
    ("num_layers", "vocab_size", "pp_size", "starts"),
    [
        (4, 1, 2, (0, 2)),
        (8, 1, 4, (0, 2, 4, 6)),
        (8, WIDTH, 2, (0, 4)),
        (12, 4 * WIDTH, 4, (0, 1, 6, 11)),  # a head costs as much as four layers, an embedding as two
        (7, 1, 3, (0, 2, 5)),
    ],
)
def test_stages_cost_alike(num_layers, vocab_size, pp_size, starts):
    found = cut(*model(num_layers, vocab_size), Pipeline(), pp_size=pp_size)
    assert (found.starts, found.rank_of, found.schedule) == (starts, tuple(range(pp_size)), "1f1b")


@pytest.mark.parametrize(("top_k", "second"), [(2, 4), (8, 3), (1, 4)])
def test_experts_cost_what_is_held_and_what_a_token_is_multiplied_with(top_k, second):
    """Eight experts first, of the size of the eleven layers after them: they hold 8 and multiply `top_k`."""
    order, facts = model(12, 1)
    experts = ModuleFacts(kind="other", parameters={"weight": (8, WIDTH, WIDTH)}, attributes={"top_k": top_k})
    facts = replace(facts, modules={**facts.modules, "layers.0": experts})
    assert cut(order, facts, Pipeline(), pp_size=2).starts == (0, second)


def test_the_balance_is_the_best_of_all_cuts():
    draw = random.Random(0)
    for _ in range(50):
        costs = [draw.randint(1, 9) for _ in range(draw.randint(3, 9))]
        num_stages = draw.randint(2, min(4, len(costs)))

        def cost(start, end, costs=costs):
            return sum(costs[start:end])

        def measure(starts, cost=cost, costs=costs):
            return max(cost(*pair) for pair in itertools.pairwise((*starts, len(costs))))

        best = min(measure((0, *rest)) for rest in itertools.combinations(range(1, len(costs)), num_stages - 1))
        assert measure(balance(cost, len(costs), num_stages)) == best


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_places_as_many_stages_as_it_takes(name):
    found = cut(*model(12, 1), Pipeline(schedule=name), pp_size=2)
    expected = {"zbv": (0, 1, 1, 0), "dualpipev": (0, 1, 1, 0), "interleaved_1f1b": (0, 1, 0, 1)}
    assert found.rank_of == expected.get(name, (0, 1) if found.num_stages == 2 else (0, 1, 0, 1))


def test_a_hundred_layers_are_cut_in_no_time():
    assert len(cut(*model(126, 100), Pipeline(schedule="zbv"), pp_size=16).starts) == 32


@pytest.mark.parametrize("layers", [(0, 1, 7), (1, 6, 1)])
def test_users_name_first_layers_or_numbers_of_layers(layers):
    found = cut(*model(8, 1), Pipeline(layers=layers), pp_size=3)
    assert found.starts == (0, 1, 7)
    assert [list(found.segments(stage)) for stage in range(3)] == [[0], [1, 2, 3, 4, 5, 6], [7]]


def test_users_numbers_say_how_many_stages_a_rank_holds():
    found = cut(*model(8, 1), Pipeline(schedule="interleaved_1f1b", layers=(2, 2, 2, 2)), pp_size=2)
    assert found.rank_of == (0, 1, 0, 1)


@pytest.mark.parametrize(
    ("pipeline", "says"),
    [
        (Pipeline(layers=(0, 5, 3)), "these are first layers, ascending, of 8"),
        (Pipeline(layers=(0, 3, 3)), "these are first layers, ascending, of 8"),
        (Pipeline(layers=(0, 3, 8)), "these are first layers, ascending, of 8"),
        (Pipeline(layers=(2, 2, 2)), "numbers of layers: 6 together, of 8"),
        (Pipeline(layers=(4, 0, 4)), "do not fit a model that runs 8 layers"),
        (Pipeline(layers=(0, 4)), "makes 2 stages"),
        (Pipeline(layers=(0, 1, 2), num_stages_per_rank=2), "each of 3 ranks along pp holds 2"),
        (Pipeline(schedule="interleaved_1f1b", layers=(0, 1, 2)), "at least 2, not 1"),
        (Pipeline(schedule="interleaved_1f1b", num_stages_per_rank=3), "9 stages for a model that runs 8 layers"),
    ],
)
def test_cuts_that_do_not_fit(pipeline, says):
    with pytest.raises(ConfigError) as caught:
        cut(*model(8, 1), pipeline, pp_size=3)
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("pipeline", "layout", "recompute", "says"),
    [
        (Pipeline(schedule="1f1B"), "pp2", "none", "did you mean '1f1b'"),
        (Pipeline(schedule="1f1B"), "tp2", "none", "did you mean '1f1b'"),
        (Pipeline(schedule="zbv", num_stages_per_rank=3), "pp2", "none", "exactly 2, not 3"),
        (Pipeline(layers=(0, 2)), "tp2", "none", "pp_size is 1"),
        (Pipeline(num_stages_per_rank=2, schedule="zbv"), "tp1", "none", "pp_size is 1"),
        (Pipeline(schedule="zbv"), "pp2", "full", "splits the backward"),
        (Pipeline(schedule="interleaved_zero_bubble"), "pp2", "attention", "splits the backward"),
        (Pipeline(layers=(0, 1, 2)), "pp2", "none", "holds equally many"),
    ],
)
def test_options_that_fit_no_pipeline(pipeline, layout, recompute, says):
    with pytest.raises(ConfigError) as caught:
        check_pipeline(pipeline, MeshShape.parse(layout), Recompute(mode=recompute))
    assert says in str(caught.value)


def test_options_that_fit():
    check_pipeline(Pipeline(), MeshShape.parse("tp2"), Recompute(mode="full"))
    for name in SCHEDULES:
        check_pipeline(Pipeline(schedule=name), MeshShape.parse("pp4"), Recompute())
        check_pipeline(Pipeline(schedule=name), MeshShape(), Recompute())


def test_every_axis_takes_its_share_and_the_first_rank_holds_most():
    weight = Layout((10, 6), (Step(("tp",), (2,), split_even(1, 6, parts=2)), Step(("fsdp",), (4,), Chunk(0))))
    norm = Layout((10,), (Step(("tp",), (2,), Replicate()), Step(("fsdp",), (4,), Chunk(0))))
    first = state_bytes([weight, norm], {"tp": 0, "fsdp": 0})
    assert first.parameters == first.gradients == (3 * 3 + 3) * 4
    assert first.optimizer == 2 * first.parameters and first.total == 4 * first.parameters
    assert state_bytes([weight, norm], {"tp": 1, "fsdp": 3}).parameters == (1 * 3 + 1) * 4


def test_dtypes_count():
    layout = Layout((8,))
    assert state_bytes([layout], {}, itemsize=2).total == 8 * 2 * 4
