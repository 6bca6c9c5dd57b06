"""Collectives are counted layer by layer, forward and backward apart, and those of other axes not at all."""

from __future__ import annotations

import pytest

import shardwise
from shardwise.proof.counting import counted_layers
from shardwise.ranks.spawn import spawn
from tests.families import tiny_batch, tiny_model

pytestmark = pytest.mark.spawn


def count_layers(layout, sequence_parallel_choices):
    with shardwise.Mesh.open(layout) as mesh:
        found = []
        for sequence_parallel in sequence_parallel_choices:
            model = tiny_model("llama", num_hidden_layers=3)
            batch = tiny_batch(model, rows=4 // mesh.data_size)
            shardwise.parallelize(model, mesh, sequence_parallel=sequence_parallel)
            step = shardwise.TrainStep(model, mesh)
            with counted_layers(model, mesh) as count:
                step(batch)
            step(batch)
            found.append((count.runs, count.per_run))
        return found


def test_a_dense_layer_costs_two_collectives_in_each_direction_and_twice_that_along_the_sequence():
    for plain, along in spawn(count_layers, 2, "tp2", (False, True)):
        assert plain == (3, (2.0, 2.0))
        assert along == (3, (4.0, 4.0)), "the ends of the stack are no layer's"


def test_gathers_of_sharded_parameters_are_not_counted():
    for (found,) in spawn(count_layers, 4, "fsdp2.tp2", (False,)):
        assert found == (3, (2.0, 2.0))


def test_nothing_is_counted_where_nothing_is_split():
    assert spawn(count_layers, 1, "tp1", (False,)) == [[(0, None)]]
