"""LoRA on NxD's parallel layers in hand-written models, beside PEFT on the unsplit model."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from peft import get_peft_model_state_dict
from safetensors.torch import load_file
from torch import nn

import shardwise
import shardwise.compat.neuronx_distributed as nxd
from shardwise.compat.neuronx_distributed import parallel_state
from shardwise.compat.neuronx_distributed.modules.lora import LoraConfig, LoraModel
from shardwise.compat.neuronx_distributed.modules.qkv_linear import GQAQKVColumnParallelLinear
from shardwise.compat.neuronx_distributed.parallel_layers import (
    ColumnParallelLinear,
    ParallelEmbedding,
    RowParallelLinear,
)
from shardwise.parameters.replicas import find_unequal_replicas
from tests.families import FULL_PRODUCT
from tests.oracle import differing

pytestmark = pytest.mark.spawn

HIDDEN, WORDS, HEADS, KEYS, WIDTH = 8, 21, 4, 2, 3


class Block(nn.Module):
    def __init__(self, tp, copies, parts):
        super().__init__()
        options = {"sequence_parallel_enabled": parts, "sequence_dimension": 1}
        self.tp, self.head_dim = tp, WIDTH
        if tp:
            sizes = [HEADS * WIDTH, KEYS * WIDTH]
            self.qkv = GQAQKVColumnParallelLinear(
                HIDDEN, sizes, gather_output=False, kv_size_multiplier=copies, **options
            )
            self.out = RowParallelLinear(HEADS * WIDTH, HIDDEN, input_is_parallel=True, **options)
            self.up = ColumnParallelLinear(HIDDEN, 13, gather_output=False, **options)
            self.down = RowParallelLinear(13, HIDDEN, input_is_parallel=True, **options)
        else:
            self.qkv, self.out = nn.Linear(HIDDEN, (HEADS + 2 * KEYS) * WIDTH), nn.Linear(HEADS * WIDTH, HIDDEN)
            self.up, self.down = nn.Linear(HIDDEN, 13), nn.Linear(13, HIDDEN)

    def forward(self, x):  # [b, s, h], or of s this rank's part
        three = self.qkv(x)
        three = three.split([HEADS * WIDTH, KEYS * WIDTH, KEYS * WIDTH], -1) if not self.tp else three
        query, key, value = (each.unflatten(-1, (-1, WIDTH)).transpose(1, 2) for each in three)
        key, value = (each.repeat_interleave(query.shape[1] // key.shape[1], 1) for each in (key, value))
        x = x + self.out(F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2))
        return x + self.down(torch.tanh(self.up(x)))


class Words(nn.Module):
    def __init__(self, tp=0, copies=1, parts=False):
        super().__init__()
        self.parts = parts
        options = {"sequence_parallel_enabled": parts, "sequence_dimension": 1}
        self.embed = ParallelEmbedding(WORDS, HIDDEN, 0, **options) if tp else nn.Embedding(WORDS, HIDDEN, 0)
        self.layers = nn.ModuleList(Block(tp, copies, parts) for _ in range(2))
        self.head = (
            ColumnParallelLinear(HIDDEN, WORDS, gather_output=True, **options) if tp else nn.Linear(HIDDEN, WORDS)
        )

    def forward(self, input_ids, labels):
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def name_of(name):
    """The parallel layers' name of a parameter of the unsplit model."""
    return name if ".qkv." not in name or "lora_A" in name else f"{name}_qkv"


def ids_of(step):
    return torch.randint(0, WORDS, (4, 8), generator=torch.Generator().manual_seed(step))


def train(model, optimizer, run, norm_of):
    history = []
    for step in range(3):
        ids = ids_of(step)
        loss = run(ids)
        optimizer.step()
        history += [float(loss.detach()), float(norm_of())]
        optimizer.zero_grad()
    return history


CONFIG = {"lora_rank": 3, "lora_alpha": 6, "init_lora_weights": "gaussian"}


def adapters(mesh, tp, copies, parts, base, merged, biases, directory):
    """Three steps, beside the unsplit model; saved, and loaded at another degree."""
    directory = f"{directory}/saved"
    options = {**CONFIG, "bias": biases, "target_modules": ["embed", "qkv", "out", "up", "down", "head"]}
    torch.manual_seed(0)
    whole = Words()
    start = {name_of(name): value.clone() for name, value in whole.state_dict().items()}
    torch.manual_seed(1)
    unsplit = LoraModel(whole, LoraConfig(**options)).train()
    own = [each for each in unsplit.parameters() if each.requires_grad]
    optimizer = torch.optim.SGD(own, lr=0.1)
    norms = []

    def run(ids):
        loss = unsplit(input_ids=ids, labels=ids)
        loss.backward()
        norms.append(nn.utils.clip_grad_norm_(own, 0.5))
        return loss

    expected = train(unsplit, optimizer, run, lambda: norms[-1])

    def build(tp, copies):
        model = Words(tp, copies, parts)
        model.load_state_dict(start)
        torch.manual_seed(1)
        return model

    config = LoraConfig(save_lora_base=base, merge_lora=merged, save_lora_config_adapter=base, **options)
    nxd_config = nxd.neuronx_distributed_config(tp, optimizer_config={"max_grad_norm": 0.5}, lora_config=config)
    model = nxd.initialize_parallel_model(nxd_config, build, tp, copies)
    trained = [each for each in model.parameters() if each.requires_grad]
    optimizer = nxd.initialize_parallel_optimizer(nxd_config, torch.optim.SGD, trained, lr=0.1)
    size, rank = parallel_state.get_data_parallel_size(), parallel_state.get_data_parallel_rank()

    def run(ids):
        rows = ids.chunk(size)[rank]
        loss = model.run_train(input_ids=rows, labels=rows)
        dist.all_reduce(loss)  # of every data rank, as often as it has tp ranks
        return loss / dist.get_world_size()

    found = train(model, optimizer, run, lambda: optimizer.grad_norm)
    problems = differing("history", torch.tensor(found), torch.tensor(expected), 1e-4)
    full = shardwise.full_state_dict(model.local_module())
    for name, value in unsplit.named_parameters():
        problems += differing(name, full[name_of(name)], value.detach(), 1e-4)
    nxd.save_checkpoint(directory, "last", model=model, optimizer=optimizer, user_content=7)
    place = f"last/{'merged' if merged else 'base'}/model" if base else "lora_adapter/adapter_model"
    written = load_file(f"{directory}/{place}.safetensors")
    if not base:
        wanted = get_peft_model_state_dict(unsplit)
    elif merged:
        wanted = unsplit.merge_and_unload().state_dict()
    else:
        wanted = start
    wanted = {name if name in start else name_of(name): value for name, value in wanted.items()}
    problems += [f"{place} has {written.keys() ^ wanted.keys()}"] if written.keys() != wanted.keys() else []
    problems += [each for name in written for each in differing(f"{place}: {name}", written[name], wanted[name], 1e-4)]
    parallel_state.destroy_model_parallel()
    again = LoraConfig(load_lora_from_ckpt=True, lora_save_dir=directory, lora_load_tag="last")
    nxd_config = nxd.neuronx_distributed_config(1, lora_config=again)
    parts = False
    model = nxd.initialize_parallel_model(nxd_config, build, 1, 1)
    loaded = shardwise.full_state_dict(model.local_module())
    problems += [f"{name} is loaded otherwise" for name in full if not torch.equal(full[name], loaded[name])]
    problems += [] if nxd.load_checkpoint(directory, "last", model=model) == 7 else ["user_content"]
    parallel_state.destroy_model_parallel()
    return problems


@pytest.mark.filterwarnings("ignore::UserWarning")  # peft's
@pytest.mark.parametrize("layout", ["tp4"])
@pytest.mark.parametrize(
    ("tp", "copies", "parts", "base", "merged", "biases"),
    [
        *([(2, 1, True, True, False, "none")] if FULL_PRODUCT else []),
        (2, 1, False, True, True, "all"),
        (4, 2, True, False, False, "lora_only"),
    ],
)
def test_adapters_of_parallel_layers(on_ranks, layout, tp, copies, parts, base, merged, biases, tmp_path):
    for problems in on_ranks(adapters, directory=str(tmp_path), timeout=200.0):
        assert problems == [], problems


def drops(mesh):
    """Copies after steps with dropout, of layers of which ranks have parts of different sizes."""
    config = LoraConfig(**CONFIG, lora_dropout=0.3, target_modules=["qkv", "out", "up", "down", "head"])
    nxd_config = nxd.neuronx_distributed_config(4, lora_config=config)
    torch.manual_seed(0)
    model = nxd.initialize_parallel_model(nxd_config, Words, 4, 2)
    optimizer = nxd.initialize_parallel_optimizer(nxd_config, torch.optim.SGD, model.parameters(), lr=0.1)
    model.train()
    for step in range(2):
        model.run_train(input_ids=ids_of(step), labels=ids_of(step))
        optimizer.step()
        optimizer.zero_grad()
    found = find_unequal_replicas(model.local_module())
    parallel_state.destroy_model_parallel()
    return found


@pytest.mark.filterwarnings("ignore::UserWarning")  # peft's
@pytest.mark.parametrize("layout", ["tp4"])
def test_ranks_with_parts_of_other_sizes_drop_alike_what_they_all_have(on_ranks, layout):
    assert [*map(list, on_ranks(drops))] == [[]] * 4
