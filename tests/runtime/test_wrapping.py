"""A model in torch's wrappers for data parallelism is neither split nor trained."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import shardwise
from shardwise.errors import UnsupportedError
from tests.families import tiny_batch, tiny_model

pytestmark = pytest.mark.spawn


def read_state(mesh):
    return len(get_model_state_dict(shardwise.parallelize(tiny_model("llama"), mesh)))


@pytest.mark.parametrize("layout", ["fsdp2"])
def test_torchs_own_state_of_sharded_models_is_still_there(on_ranks, layout):
    assert on_ranks(read_state) == [21, 21]


USES = [("DistributedDataParallel", use) for use in ("split", "train", "forward")]
USES += [("FSDP", use) for use in ("split", "train")]


def use_wrapped(mesh, wrapper, use):
    """What is said of a wrapped model that is split, or a split one that is wrapped."""
    wrap = {
        "DistributedDataParallel": DistributedDataParallel,
        "FSDP": lambda model: fully_shard(model, mesh=mesh.device_mesh["tp"]),
    }[wrapper]
    if use == "split":
        model, door = wrap(tiny_model("llama")), lambda model: shardwise.parallelize(model, mesh)
    elif use == "forward":
        batch = tiny_batch(tiny_model("llama"))
        model, door = (
            DistributedDataParallel(shardwise.parallelize(tiny_model("llama"), mesh)),
            lambda ddp: ddp(**batch),
        )
    else:
        model = wrap(torch.nn.Sequential(shardwise.parallelize(tiny_model("llama"), mesh)))
        door = lambda model: shardwise.build_optimizer(model, torch.optim.SGD, lr=0.1)  # noqa: E731
    with pytest.raises(UnsupportedError) as raised:
        door(model)
    return str(raised.value)


@pytest.mark.parametrize(
    ("wrapper", "use"),
    [("DistributedDataParallel", use) for use in ("split", "train", "forward")]
    + [("FSDP", "split"), ("FSDP", "train")],
)
@pytest.mark.parametrize("layout", ["tp2"])
def test_a_wrapped_model_is_neither_split_nor_trained(on_ranks, layout, wrapper, use):
    for message in on_ranks(use_wrapped):
        assert f"a model in {wrapper}" in message
        assert "train the model itself" in message
