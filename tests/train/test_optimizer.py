"""Parameter groups of split models, and any optimizer class over them."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.tensor import DTensor

import shardwise
from shardwise.errors import ConfigError, UnsupportedError
from shardwise.testing.spawn import spawn
from tests.families import rows_of, tiny_batch, tiny_model


def build(groups):
    with shardwise.Mesh.open("tp1") as mesh:
        model = shardwise.parallelize(tiny_model("llama"), mesh)
        optimizer = shardwise.build_optimizer(model, torch.optim.AdamW, lr=1e-3, weight_decay=0.1, groups=groups)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return {
        names[id(parameter)]: (group["lr"], group["weight_decay"])
        for group in optimizer.param_groups
        for parameter in group["params"]
    }


@pytest.mark.single
def test_the_first_rule_that_fits_holds():
    found = build([{"params": "model.layers.0.**", "lr": 1e-5}, {"max_dims": 1, "weight_decay": 0.0}])
    assert found["model.layers.0.input_layernorm.weight"] == (1e-5, 0.1)
    assert found["model.layers.1.input_layernorm.weight"] == (1e-3, 0.0)
    assert found["model.layers.1.mlp.up_proj.weight"] == (1e-3, 0.1)
    assert len(found) == 21


@pytest.mark.single
def test_a_function_may_choose():
    found = build(lambda name, parameter: {"weight_decay": 0.0} if "norm" in name else {})
    assert {decay for name, (_, decay) in found.items() if "norm" in name} == {0.0}
    assert {decay for name, (_, decay) in found.items() if "norm" not in name} == {0.1}


@pytest.mark.single
@pytest.mark.parametrize(
    ("rule", "message"),
    [({"params": "**.bias", "lr": 1.0}, "fits no parameter"), ({"weight_decay": 0.0}, "does not say which")],
)
def test_rules_that_mean_nothing_are_errors(rule, message):
    with pytest.raises(ConfigError, match=message):
        build([rule])


CLASSES = ("Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD")


def update(layout):
    """The largest difference to the whole model's parameters after two steps with each class."""
    worst = {}
    with shardwise.Mesh.open(layout) as mesh:
        for name in CLASSES if layout == "tp2" else set(CLASSES) - {"Rprop"}:
            cls, whole = getattr(torch.optim, name), tiny_model("llama")
            model = shardwise.parallelize(tiny_model("llama"), mesh)
            options = {"lr": 1e-3, **({"eps": 1e-4} if "eps" in cls.__init__.__code__.co_varnames else {})}
            optimizers = cls(whole.parameters(), **options), shardwise.build_optimizer(model, cls, **options)
            batch = tiny_batch(whole)
            mine = rows_of(batch, mesh)
            for _ in range(2):
                whole(**batch).loss.backward()
                shardwise.TrainStep(model, mesh)(mine)
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
            state = shardwise.full_state_dict(model)
            worst[name] = max(float((state[key] - value).abs().max()) for key, value in whole.state_dict().items())
            states = [value for each in optimizers[1].state.values() for value in each.values() if value.ndim]
            if layout == "fsdp2":
                assert all(isinstance(value, DTensor) for value in states), name
    return worst


def refuse():
    with shardwise.Mesh.open("fsdp2") as mesh:
        model = shardwise.parallelize(tiny_model("llama"), mesh)
        with pytest.raises(UnsupportedError, match="Rprop over fsdp"):
            shardwise.build_optimizer(model, torch.optim.Rprop)


@pytest.mark.spawn
def test_rprop_is_refused_where_it_cannot_work():
    spawn(refuse, 2)


@pytest.mark.spawn
@pytest.mark.parametrize("layout", ["tp2", "fsdp2"])
def test_elementwise_optimizers_update_parts_as_they_would_the_whole(layout):
    for rank in spawn(update, 2, layout):
        assert len(rank) >= len(CLASSES) - 1
        # Rprop takes the sign of differences, which rounding decides where a gradient is zero.
        assert {name: error for name, error in rank.items() if error > (3e-3 if name == "Rprop" else 1e-5)} == {}
