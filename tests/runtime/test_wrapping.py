"""Wrappers that take a split model for a copy of the unsplit one are refused in words, before they change it."""

from __future__ import annotations

import gc
import tempfile

import accelerate
import pytest
import torch
import transformers
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

import shardwise
from shardwise.errors import UnsupportedError
from tests.families import tiny_batch, tiny_model

pytestmark = pytest.mark.spawn


class Holder(torch.nn.Module):
    """As a LightningModule holds a model."""

    def __init__(self, model):
        super().__init__()
        self.held = model

    def forward(self, **batch):
        return self.held(**batch)


def ddp(model, mesh):
    DistributedDataParallel(model)


def ddp_of_a_part(model, mesh):
    DistributedDataParallel(model.model)


def ddp_around(model, mesh):
    DistributedDataParallel(Holder(model))


def fsdp1(model, mesh):
    FullyShardedDataParallel(model, device_id=torch.device("cpu"))


def fsdp1_around(model, mesh):
    FullyShardedDataParallel(Holder(model), device_id=torch.device("cpu"))


def fsdp2(model, mesh):
    fully_shard(model, mesh=mesh.device_mesh)


def fsdp2_of_layers(model, mesh):
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh.device_mesh)


def accelerates(model, mesh):
    accelerate.Accelerator(cpu=True).prepare(model)


def trainers(model, mesh):
    arguments = transformers.TrainingArguments(
        tempfile.mkdtemp(), use_cpu=True, max_steps=1, report_to=[], save_strategy="no"
    )
    rows = [{"input_ids": torch.arange(3, 11), "labels": torch.arange(3, 11)}] * 4
    transformers.Trainer(model, arguments, train_dataset=rows).train()


WRAPPERS = (ddp, ddp_of_a_part, ddp_around, fsdp1, fsdp1_around, fsdp2, fsdp2_of_layers, accelerates, trainers)


def wrap(mesh, wrapper):
    """What is said, and whether parameters are what they were."""
    model = shardwise.parallelize(tiny_model("llama"), mesh)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    with pytest.raises(UnsupportedError) as raised:
        globals()[wrapper](model, mesh)
    is_kept = all(torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))
    shardwise.TrainStep(model, mesh)(tiny_batch(model))
    return str(raised.value), is_kept


# FSDP1 warns that it has been told to leave a module alone, which it asks to be.
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("wrapper", [each.__name__ for each in WRAPPERS])
@pytest.mark.parametrize("layout", ["tp2"])
def test_wrappers_are_refused_before_they_change_anything(on_ranks, layout, wrapper):
    for text, is_kept in on_ranks(wrap):
        assert "over a model that Shardwise has split" in text and "ddp2.tp2" in text
        assert is_kept


def split_under_wrapper(mesh, wrapped):
    """What is said, and the loss once the wrapper has gone."""
    model = tiny_model("llama")
    wrapper = DistributedDataParallel({"all": model, "a part": model.model, "around": Holder(model)}[wrapped])
    with pytest.raises(UnsupportedError) as raised:
        shardwise.parallelize(model, mesh)
    del wrapper
    gc.collect()
    kept = model(**tiny_batch(model)).loss  # a graph alone is no wrapper
    shardwise.parallelize(model, mesh)
    del kept
    return str(raised.value), shardwise.TrainStep(model, mesh)(tiny_batch(model)).loss.item()


@pytest.mark.parametrize("wrapped", ["all", "a part", "around"])
@pytest.mark.parametrize("layout", ["tp2", "fsdp2"])
def test_a_model_that_is_in_a_wrapper_made_before_is_not_split(on_ranks, layout, wrapped):
    (first, loss), (second, other) = on_ranks(split_under_wrapper)
    assert first == second and "a model that a DistributedDataParallel was made of cannot be split" in first
    assert loss == other > 0


def shard_around(mesh):
    """Whether parameters are what they were, and the loss before and after."""
    model = shardwise.parallelize(tiny_model("llama"), mesh)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    batch = tiny_batch(model)
    losses = [float(model(**batch).loss.detach())]
    holder = fully_shard(Holder(model), mesh=mesh.device_mesh)
    losses.append(float(holder(**batch).loss.detach()))
    return all(torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True)), losses


@pytest.mark.parametrize("layout", ["tp2"])
def test_fsdp_around_a_module_leaves_the_split_model_in_it_alone(on_ranks, layout):
    for is_kept, (before, after) in on_ranks(shard_around):
        assert is_kept and before == after


def read_state(mesh):
    return len(get_model_state_dict(shardwise.parallelize(tiny_model("llama"), mesh)))


@pytest.mark.parametrize("layout", ["fsdp2"])
def test_torchs_own_state_of_sharded_models_is_still_there(on_ranks, layout):
    assert on_ranks(read_state) == [21, 21]


def split_wrapped(mesh, wrapper):
    model = tiny_model("llama")
    wrapped = {
        "DistributedDataParallel": DistributedDataParallel,
        "FSDP": lambda each: fully_shard(each, mesh=mesh.device_mesh["tp"]),
    }[wrapper](model)
    try:
        shardwise.parallelize(wrapped, mesh)
    except UnsupportedError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("wrapper", ["DistributedDataParallel", "FSDP"])
@pytest.mark.parametrize("layout", ["tp2"])
def test_a_wrapped_model_is_not_split(on_ranks, layout, wrapper):
    for message in on_ranks(split_wrapped):
        assert f"a model in {wrapper} cannot be split" in message
        assert "split the model itself" in message
