"""Calls of NxD's documents that once gave other numbers, or did not do what the document says."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import shardwise
import shardwise.compat.neuronx_distributed as nxd
from shardwise.compat.neuronx_distributed import optimizer as zero_redundancy
from shardwise.compat.neuronx_distributed import parallel_layers, parallel_state
from shardwise.compat.neuronx_distributed.modules.lora import LoraConfig, LoRAModel
from shardwise.compat.neuronx_distributed.modules.qkv_linear import GQAQKVColumnParallelLinear
from shardwise.compat.neuronx_distributed.optimizer import NeuronZero1Optimizer
from shardwise.compat.neuronx_distributed.parallel_layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    checkpointing,
    get_number_of_extra_heads,
    pad_model,
    parallel_cross_entropy,
)
from shardwise.compat.warned import CompatWarning
from shardwise.errors import ConfigError, ShardwiseError
from shardwise.train.step import TrainStep
from tests.families import FULL_PRODUCT, tiny_model
from tests.oracle import differing, differing_gradients
from tests.programs import run_script

pytestmark = pytest.mark.spawn
WORDS = 24  # which the number of heads divides


class Attention(nn.Module):
    """Three heads, with the head of a language model beside them."""

    def __init__(self, parallel):
        super().__init__()
        torch.manual_seed(0)
        self.num_heads = 3
        self.qkv, self.out = nn.ModuleList(nn.Linear(12, 12) for _ in range(3)), nn.Linear(12, 12)
        self.head = nn.Linear(12, WORDS, bias=False)
        if not parallel:
            return
        tp = parallel_state.get_tensor_model_parallel_size()
        self.num_heads = (3 + get_number_of_extra_heads(3, tp)) // tp
        torch.manual_seed(0)
        self.qkv = nn.ModuleList(ColumnParallelLinear(12, 12, gather_output=False) for _ in range(3))
        self.out = RowParallelLinear(12, 12, input_is_parallel=True)
        self.head = ColumnParallelLinear(12, WORDS, bias=False, gather_output=False)

    def forward(self, x, labels):
        q, k, v = (each(x).unflatten(-1, (self.num_heads, 4)).transpose(1, 2) for each in self.qkv)
        logits = self.head(self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)))
        if isinstance(self.head, nn.Linear):
            return F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return parallel_cross_entropy(logits, labels).mean()


def padded(mesh, start):
    parallel_state.initialize_model_parallel(2)
    whole, model = Attention(parallel=False), Attention(parallel=True)
    if start == "assigned":
        model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)
    pad_model(model, 2, 3)
    parallel_layers.move_model_to_device(model, "cpu")
    x, labels = torch.randn(2, 5, 12), torch.randint(WORDS, (2, 5))
    wanted, found = whole(x, labels), model(x, labels)
    wanted.backward()
    found.backward()
    problems = differing("loss", found.detach(), wanted.detach(), 1e-5)
    gradients = {name: value.grad for name, value in whole.named_parameters()}
    problems += differing_gradients(shardwise.full_gradients(model), gradients)
    problems += [] if model.head.weight.tensor_model_parallel and model.head.weight.partition_dim == 0 else ["marks"]
    parallel_state.destroy_model_parallel()
    return problems


@pytest.mark.parametrize("layout", ["tp2"])
@pytest.mark.parametrize("start", ["real", "assigned"])
def test_heads_are_padded_and_the_vocabulary_is_not(on_ranks, layout, start):
    assert on_ranks(padded) == [[], []]


class Grouped(nn.Module):
    head_dim = 4

    def __init__(self):
        super().__init__()
        self.qkv = GQAQKVColumnParallelLinear(8, [16, 8], gather_output=False, kv_size_multiplier=2, bias=False)
        self.pos = nn.Parameter(torch.ones(3))

    def forward(self, x):
        return sum(each.sum() for each in self.qkv(x))


def copies(mesh):
    """Heads are counted when the model is known, after its parameters were replaced."""
    parallel_state.initialize_model_parallel(4)
    torch.manual_seed(0)
    model = Grouped()
    with torch.device("meta"):
        empty = Grouped()
    empty.load_state_dict(model.state_dict(), assign=True)
    for each in (model, empty):
        parallel_layers.move_model_to_device(each, "cpu")
    x = torch.randn(2, 8)
    same = torch.equal(model(x), empty(x))
    parallel_state.destroy_model_parallel()
    return same


@pytest.mark.parametrize("layout", ["tp4"])
def test_copies_of_heads_are_divided_again_where_parameters_were_replaced(on_ranks, layout):
    assert on_ranks(copies) == [True] * 4


class Own(nn.Module):
    """Has parameters of its own beside those of its children."""

    def __init__(self):
        super().__init__()
        self.pos, self.layer = nn.Parameter(torch.ones(4)), nn.Linear(4, 4)

    def forward(self, x):
        return self.layer(x + self.pos).pow(2).mean()


def wrapped(mesh, directory):
    found = {}
    config = nxd.neuronx_distributed_config(2)
    model = nxd.initialize_parallel_model(config, Own)
    seen = []
    model.apply(lambda module: seen.append(type(module).__name__))
    found["applied to"] = sorted(seen)
    model.to(torch.bfloat16)
    found["dtypes"] = {str(each.dtype) for each in model.parameters()}
    padding = nxd.neuronx_distributed_config(2, pad_model=True)
    with pytest.raises(ShardwiseError) as raised:
        nxd.initialize_parallel_model(padding, Own)
    found["no config"] = str(raised.value)
    heads = {"hidden_size": 48, "num_attention_heads": 3, "num_key_value_heads": 3}
    with pytest.raises(ShardwiseError) as raised, pytest.warns(CompatWarning, match="pad_model change nothing"):
        nxd.initialize_parallel_model(padding, tiny_model, "llama", **heads)
    found["of transformers"] = str(raised.value)
    with mock.patch.object(TrainStep, "__init__", autospec=True, side_effect=TrainStep.__init__) as built:
        model = nxd.initialize_parallel_model(config, tiny_model, "llama")
        for _ in range(3):
            model.run_train(input_ids=torch.ones(2, 4, dtype=torch.long), labels=torch.ones(2, 4, dtype=torch.long))
        found["steps built"] = built.call_count
    grouped = Grouped()
    grouped.head_dim = 8  # one key/value head, which both ranks have
    unfused = nn.Sequential(GQAQKVColumnParallelLinear(8, [16, 16], fuse_qkv=False))
    with pytest.raises(ConfigError, match="build the layer with fuse_qkv=True"):
        LoRAModel(unfused, LoraConfig(target_modules="0", save_lora_base=True, merge_lora=True))
    adapted = LoRAModel(grouped, LoraConfig(target_modules=["qkv"]))
    parallel_layers.move_model_to_device(adapted, "cpu")
    shardwise.full_state_dict(adapted)
    found["norm"] = float(shardwise.clip_grad_norm_(adapted, 1.0))
    parallel_state.destroy_model_parallel()
    return found


@pytest.mark.parametrize("layout", ["tp2"])
def test_wrappers_are_seen_through(on_ranks, layout, tmp_path):
    for found in on_ranks(wrapped, directory=str(tmp_path)):
        assert found["applied to"] == ["Linear", "Own"]
        assert found["dtypes"] == {"torch.bfloat16"}
        assert "pad_model" in found["no config"] and "num_attention_heads" in found["no config"]
        assert "3" in found["of transformers"]
        assert found["steps built"] == 1


def own_file_alone(mesh, directory):
    model = nxd.initialize_parallel_model(nxd.neuronx_distributed_config(2), tiny_model, "llama")
    new = lambda: NeuronZero1Optimizer(model.parameters(), torch.optim.AdamW, lr=1e-3)  # noqa: E731
    optimizer = new()
    with pytest.warns(CompatWarning, match="grad_norm_groups, pin_layout change nothing"):
        NeuronZero1Optimizer(model.parameters(), torch.optim.AdamW, grad_norm_groups=[[0]], pin_layout=True)
    ids = torch.ones(2, 4, dtype=torch.long)
    model.run_train(input_ids=ids, labels=ids)
    optimizer.step()
    optimizer.save_sharded_state_dict(directory)
    with mock.patch.object(zero_redundancy, "read_tree", side_effect=zero_redundancy.read_tree) as read:
        again = new()
        again.load_sharded_state_dict(directory)
    parallel_state.destroy_model_parallel()
    same = [
        torch.equal(own["exp_avg"], loaded["exp_avg"])
        for own, loaded in zip(
            optimizer.base_optimizer.state.values(), again.base_optimizer.state.values(), strict=True
        )
    ]
    return read.call_count, bool(same) and all(same)


@pytest.mark.parametrize("layout", ["tp2"])
def test_a_rank_reads_its_own_states(on_ranks, layout, tmp_path):
    assert on_ranks(own_file_alone, directory=str(tmp_path)) == [(1, True), (1, True)]


class Content:
    """Something that no document lists."""


def parts_saved(mesh, directory):
    found = {}
    config = nxd.neuronx_distributed_config(2)
    model = nxd.initialize_parallel_model(config, tiny_model, "llama")
    optimizer = nxd.initialize_parallel_optimizer(config, torch.optim.AdamW, model.parameters(), lr=1e-3)
    ids = torch.ones(2, 4, dtype=torch.long)
    model.run_train(input_ids=ids, labels=ids)
    optimizer.step()
    nxd.save_checkpoint(directory, "optimizer", optimizer=optimizer)
    nxd.save_checkpoint(directory, "content", user_content={"step": 3, "seen": {1, 2}, "shape": torch.Size([1, 2])})
    expected = {name: value["exp_avg"].clone() for name, value in states_by_name(model, optimizer).items()}
    again = nxd.initialize_parallel_optimizer(config, torch.optim.AdamW, model.parameters(), lr=1e-3)
    nxd.load_checkpoint(directory, "optimizer", optimizer=again)
    loaded = states_by_name(model, again)
    found["optimizer"] = all(torch.equal(value, loaded[name]["exp_avg"]) for name, value in expected.items())
    found["content"] = nxd.load_checkpoint(directory, "content")
    nxd.save_checkpoint(directory, "dictionaries", optimizer={"state": optimizer.state_dict()}, user_content=7)
    taken = {"state": None}
    found["with dictionaries"] = nxd.load_checkpoint(directory, "dictionaries", optimizer=taken)
    own, was = taken["state"]["state"], optimizer.state_dict()["state"]
    found["dictionary"] = all(torch.equal(own[key]["exp_avg"], was[key]["exp_avg"]) for key in was)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpointing, "write_tree", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            nxd.save_checkpoint(directory, "dictionaries", optimizer={"state": 0})
    found["kept"] = nxd.load_checkpoint(directory, "dictionaries", optimizer={"state": None}) == 7
    with pytest.raises(ConfigError, match="is a Content"):
        nxd.save_checkpoint(directory, "class", model=model, user_content=Content())
    parallel_state.destroy_model_parallel()
    return found


def states_by_name(model, optimizer):
    return {name: optimizer.state[value] for name, value in model.named_parameters()}


@pytest.mark.parametrize("layout", ["tp2"])
def test_what_is_saved_may_be_any_part(on_ranks, layout, tmp_path):
    for found in on_ranks(parts_saved, directory=str(tmp_path)):
        assert found.pop("content") == {"step": 3, "seen": {1, 2}, "shape": (1, 2)}
        assert found.pop("with dictionaries") == 7
        assert found == {"optimizer": True, "dictionary": True, "kept": True}


@pytest.mark.single
def test_values_that_only_look_right_are_refused():
    with pytest.raises(ConfigError, match="zero_one_enabled"):
        nxd.neuronx_distributed_config(optimizer_config={"zero_one_enabled": "False"})
    with pytest.raises(ConfigError, match="sequence_parallel"):
        nxd.neuronx_distributed_config(sequence_parallel="False")
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel()
    with pytest.raises(ConfigError, match="label_smoothing is 1.5"):
        parallel_cross_entropy(torch.ones(1, 4), torch.ones(1, dtype=torch.long), label_smoothing=1.5)
    parallel_state.destroy_model_parallel()


SCRIPT = """
import torch
import shardwise.compat.neuronx_distributed as nxd
from torch.utils.data import DataLoader
from lightning.pytorch import Trainer
from shardwise.compat.neuronx_distributed.lightning import NeuronLTModule, NeuronXLAStrategy
from tests.families import tiny_model

config = nxd.neuronx_distributed_config({tp})
module = NeuronLTModule(tiny_model, config, torch.optim.AdamW, None, ("llama",), opt_kwargs={{"lr": 1e-3}})
rows = [dict(input_ids=torch.full((4,), n + 3), labels=torch.full((4,), n + 3)) for n in range(4)]
trainer = Trainer(
    strategy=NeuronXLAStrategy(config), accelerator="cpu", devices=2, max_steps=1, logger=False,
    enable_checkpointing=False, enable_progress_bar=False,
)
trainer.fit(module, DataLoader(rows, batch_size=2))
print(f"rank {{trainer.global_rank}} of {{trainer.world_size}}: {{trainer.strategy.mesh.shape}}\\n", end="", flush=True)
import torch.distributed as dist
assert dist.get_world_size() == 2
"""


@pytest.mark.parametrize("tp", [2, *[1] * FULL_PRODUCT])
def test_the_trainer_starts_the_ranks_of_a_plain_script(tmp_path, tp):
    (tmp_path / "script.py").write_text(SCRIPT.format(tp=tp))
    run = run_script(tmp_path / "script.py")
    assert run.returncode == 0, run.stderr[-3000:]
    shape = "ddp2" if tp == 1 else "tp2"
    assert sorted(run.stdout.split("\n")[-3:]) == ["", f"rank 0 of 2: {shape}", f"rank 1 of 2: {shape}"], run.stdout
