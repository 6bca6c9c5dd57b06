"""Models that people write by hand, in the stages of a pipeline."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn
from transformers.models.bert.modeling_bert import BertConfig, BertForMaskedLM

import shardwise
import shardwise.compat.neuronx_distributed as nxd
from shardwise.compat.neuronx_distributed import parallel_layers, parallel_state, xm
from shardwise.compat.neuronx_distributed.parallel_layers import (
    ColumnParallelLinear,
    ParallelEmbedding,
    RowParallelLinear,
    parallel_cross_entropy,
)
from shardwise.compat.neuronx_distributed.pipeline import NxDPPModel
from shardwise.compat.warned import CompatWarning
from shardwise.errors import ShardwiseError
from tests.families import FULL_PRODUCT
from tests.oracle import differing

pytestmark = pytest.mark.spawn

HIDDEN, WORDS = 8, 20


class Block(nn.Module):
    def __init__(self, parallel):
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.up = ColumnParallelLinear(HIDDEN, 12, gather_output=False) if parallel else nn.Linear(HIDDEN, 12)
        self.down = RowParallelLinear(12, HIDDEN, input_is_parallel=True) if parallel else nn.Linear(12, HIDDEN)

    def forward(self, x, scale):
        return x + self.down(torch.tanh(self.up(self.norm(x)))) * scale


class Words(nn.Module):
    """A language model that divides itself; its layers take a parameter of the model."""

    def __init__(self, parallel):
        super().__init__()
        torch.manual_seed(0)
        self.parallel = parallel
        self.embed = ParallelEmbedding(WORDS, HIDDEN) if parallel else nn.Embedding(WORDS, HIDDEN)
        self.layers = nn.ModuleList(Block(parallel) for _ in range(4))
        self.head = (
            ColumnParallelLinear(HIDDEN, WORDS, bias=False, gather_output=False)
            if parallel
            else nn.Linear(HIDDEN, WORDS, bias=False)
        )
        self.scale = nn.Parameter(torch.tensor(0.7))

    def forward(self, input_ids, labels=None):
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x, self.scale)
        logits = self.head(x)
        if labels is None:
            return logits
        if not self.parallel:
            return F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return parallel_cross_entropy(logits, labels).sum() / (labels != -100).sum()


def bert(parallel):
    """The listing of the tensor-parallel guide: parallel layers in transformers' BERT."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3, "num_attention_heads": 4}
    kept = {"hidden_dropout_prob": 0, "attention_probs_dropout_prob": 0}
    model = BertForMaskedLM(BertConfig(vocab_size=WORDS, max_position_embeddings=16, **kept, **sizes))
    for layer in model.bert.encoder.layer if parallel else ():
        own, out = layer.attention.self, layer.attention.output
        for name in ("query", "key", "value"):
            split = ColumnParallelLinear(16, 16, gather_output=False)
            split.load_state_dict(getattr(own, name).state_dict())
            setattr(own, name, split)
        row = RowParallelLinear(16, 16, input_is_parallel=True)
        row.load_state_dict(out.dense.state_dict())
        out.dense = row
        own.num_attention_heads //= parallel_state.get_tensor_model_parallel_size()
        own.all_head_size //= parallel_state.get_tensor_model_parallel_size()
    return model


def batch_of():
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, WORDS, (8, 6), generator=generator)
    labels = ids.clone()
    labels[1::2, :2] = -100  # as many of every data rank
    return {"input_ids": ids, "labels": labels}


class Numbers(nn.Module):
    """Takes numbers, and sums them up."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.Tanh()) for _ in range(4))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x.sum()

    def to(self, *args, **options):
        self.moved = sum(each.numel() for each in self.parameters())
        return super().to(*args, **options)


def unsplit(kind):
    model = {"words": Words, "bert": bert}[kind](False).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    history = []
    for _ in range(3):
        output = model(**batch_of())
        loss = output if isinstance(output, torch.Tensor) else output.loss
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        history.append([float(loss.detach()), float(norm)])
        optimizer.step()
        optimizer.zero_grad()
    return history, model


def loads_full_tensors(mesh, model, state, path):
    """Loads one file of the unsplit model; this rank takes its parts and its stage."""
    if mesh.rank == 0:
        torch.save(state, path)
    xm.rendezvous("saved")
    parallel_layers.load(path, model, sharded=False)
    full = shardwise.full_state_dict(model.local_module())
    return [f"{name} is not that of the file" for name in full if not torch.equal(full[name], state["model"][name])]


def trained(mesh, kind, tp, zero, options, directory):
    """Three steps in two stages, beside the unsplit model; what the checkpoint gives at other degrees."""
    expected, whole = unsplit(kind)
    pipeline_config = {"num_microbatches": 2, "broadcast_and_average_loss": True, **options}
    build = functools.partial({"words": Words, "bert": bert}[kind], True)
    optimizer_config = {"zero_one_enabled": zero, "max_grad_norm": 0.5}
    nxd_config = nxd.neuronx_distributed_config(
        tp, 2, pipeline_config=pipeline_config, optimizer_config=optimizer_config
    )
    model = nxd.initialize_parallel_model(nxd_config, build)
    optimizer = nxd.initialize_parallel_optimizer(nxd_config, torch.optim.SGD, model.parameters(), lr=0.1)
    size, rank = parallel_state.get_data_parallel_size(), parallel_state.get_data_parallel_rank()
    rows = {name: value.chunk(size)[rank] for name, value in batch_of().items()}
    history = []
    for _ in range(3):
        loss = model.run_train(**rows)
        optimizer.step()
        optimizer.zero_grad()
        history.append([float(loss), float(optimizer.grad_norm)])
    problems = differing("history", torch.tensor(history), torch.tensor(expected), 1e-4)
    full = shardwise.full_state_dict(model.local_module())
    for name, value in whole.named_parameters():
        problems += differing(name, full[name], value.detach(), 1e-4)
    shardwise.export_pretrained(model.local_module(), f"{directory}/exported")
    exported = load_file(f"{directory}/exported/model.safetensors")
    names = [name for name, _ in whole.named_parameters()]  # each of what is tied once
    problems += [f"{name} is exported otherwise" for name in names if not torch.equal(exported[name], full[name])]
    held = {name for name, _ in model.local_named_parameters()}
    nxd.save_checkpoint(directory, model=model, optimizer=optimizer)
    problems += loads_full_tensors(mesh, model, {"model": whole.state_dict()}, f"{directory}/full.pt")
    parallel_state.destroy_model_parallel()
    nxd_config = nxd.neuronx_distributed_config(tp, 1, optimizer_config=optimizer_config)
    model = nxd.initialize_parallel_model(nxd_config, build)
    nxd.load_checkpoint(directory, model=model)
    loaded = shardwise.full_state_dict(model.local_module())
    problems += [f"{name} is loaded otherwise" for name in full if not torch.equal(loaded[name], full[name])]
    parallel_state.destroy_model_parallel()
    return problems, held == set(full)


@pytest.mark.parametrize("layout", ["tp4"])  # so many ranks; the layouts are those of the configs
@pytest.mark.parametrize(
    ("kind", "tp", "zero", "options"),
    [
        *([("words", 2, False, {})] if FULL_PRODUCT else []),
        ("words", 1, True, {"transformer_layer_cls": Block, "pipeline_cuts": ["layers.0"], "num_microbatches": 1}),
        ("bert", 2, False, {"virtual_pipeline_size": 1}),
    ],
)
def test_models_written_by_hand_train_in_stages(on_ranks, layout, kind, tp, zero, options, tmp_path):
    for problems, has_all in on_ranks(trained, directory=str(tmp_path), timeout=200.0):
        assert problems == []
        assert not has_all, "a rank holds its own stages alone"


def of_numbers(mesh):
    """Gradients of a model without labels are the mean of its microbatches', as theirs; it is cut, then moved."""
    parallel_state.initialize_model_parallel(1, 2)
    options = {"transformer_layer_cls": nn.Sequential, "num_microbatches": 4, "output_loss_value_spec": True}
    with pytest.warns(CompatWarning, match="input_names, output_loss_value_spec change nothing"):
        model = NxDPPModel(Numbers(), auto_partition=True, input_names=["x"], **options)
    whole, x = Numbers(), torch.randn(8, HIDDEN, generator=torch.Generator().manual_seed(1))
    (whole(x) / 4).backward()
    loss = model.run_train(x=x)
    expected = {name: each.grad for name, each in whole.named_parameters()}
    problems = differing("loss", loss, whole(x).detach() / 4, 1e-5)
    for name, parameter in model.local_named_parameters():
        problems += differing(name, parameter.grad, expected[name], 1e-4)
    built = nxd.initialize_parallel_model(model.nxd_config, Numbers)
    moved = [each.local_module().moved for each in (model, built)]
    parallel_state.destroy_model_parallel()
    return problems, [numel / sum(each.numel() for each in whole.parameters()) for numel in moved]


@pytest.mark.parametrize("layout", ["tp2"])
def test_a_model_of_numbers_is_cut(on_ranks, layout):
    assert on_ranks(of_numbers) == [([], [0.5, 0.5])] * 2


def not_cut(mesh):
    """A model that no made-up batch runs, and one that fails on one rank."""
    parallel_state.initialize_model_parallel(1, 2)
    said = []
    failing = Words(parallel=True)
    if mesh.rank == 0:
        failing.head = nn.Identity()
    for model in (nn.Sequential(nn.Conv1d(7, 4, 3), nn.Linear(4, 4)), failing):
        try:
            NxDPPModel(model)
        except ShardwiseError as error:
            said.append(str(error))
    parallel_state.destroy_model_parallel()
    return said


@pytest.mark.parametrize("layout", ["tp2"])
def test_what_cannot_be_cut_says_so_on_every_rank(on_ranks, layout):
    first, second = on_ranks(not_cut)
    assert first == second
    parts = ["token ids or numbers", "of the inputs"]
    assert len(first) == len(parts) and all(part in text for part, text in zip(parts, first, strict=True)), first
