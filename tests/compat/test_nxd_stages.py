"""Models that people write by hand, in the stages of a pipeline: cut by hand, or between their layers."""

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
from shardwise.compat.neuronx_distributed import parallel_state
from shardwise.compat.neuronx_distributed.parallel_layers import (
    ColumnParallelLinear,
    ParallelEmbedding,
    RowParallelLinear,
    parallel_cross_entropy,
)
from shardwise.compat.neuronx_distributed.pipeline import NxDPPModel
from shardwise.compat.neuronx_distributed.pipeline.manual_pipe_stage import PipelineStageModule
from shardwise.compat.warned import CompatWarning
from shardwise.errors import ShardwiseError
from tests.families import FULL_PRODUCT
from tests.oracle import differing

pytestmark = pytest.mark.spawn

HIDDEN, WORDS = 8, 20


class Layer(nn.Linear):
    """Takes and returns a list, as layers of manual pipelines do."""

    def forward(self, passed):
        x, mask = passed[0], passed[1] if len(passed) > 1 else None
        x = torch.tanh(super().forward(x if mask is None else x * mask))
        return [x, torch.ones_like(x)]


def layers(shares=False):
    torch.manual_seed(0)
    made = [Layer(HIDDEN, HIDDEN, bias=False) for _ in range(5)]
    if shares:
        PipelineStageModule.mark_weight_sharing([(made[0], "weight"), (made[-1], "weight")], "ends")
    return made


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


def batch_of(kind):
    generator = torch.Generator().manual_seed(1)
    if kind == "layers":
        labels = torch.randint(0, HIDDEN, (8,), generator=generator)
        return {"inputs": torch.randn(8, HIDDEN, generator=generator), "labels": labels}
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


class Unsplit(nn.Module):
    def __init__(self, shares):
        super().__init__()
        self.layers = nn.ModuleList(layers(shares))

    def forward(self, inputs, labels):
        passed = [inputs]
        for layer in self.layers:
            passed = layer(passed)
        return F.cross_entropy(passed[0], labels)


def unsplit(kind, shares):
    model = {"layers": functools.partial(Unsplit, shares), "words": lambda: Words(False), "bert": lambda: bert(False)}
    model = model[kind]().train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    history = []
    for _ in range(3):
        output = model(**batch_of(kind))
        loss = output if isinstance(output, torch.Tensor) else output.loss
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        history.append([float(loss.detach()), float(norm)])
        optimizer.step()
        optimizer.zero_grad()
    return history, model


def uneven(layers, num_stages):
    assert num_stages == 2
    return {layer: int(number > 0) for number, layer in enumerate(layers)}


def trained(mesh, kind, tp, zero, options, directory):
    """Three steps in two stages, beside the unsplit model; what the checkpoint gives at other degrees."""
    shares = options.pop("shares", False)
    expected, whole = unsplit(kind, shares)
    by_hand = {"manual_pp_partition": True, "manual_pp_loss_fn": nn.CrossEntropyLoss()} if kind == "layers" else {}
    pipeline_config = {"num_microbatches": 2, "broadcast_and_average_loss": True, **by_hand, **options}
    build = {"layers": lambda: layers(shares), "words": lambda: Words(True), "bert": lambda: bert(True)}[kind]
    optimizer_config = {"zero_one_enabled": zero, "max_grad_norm": 0.5}
    nxd_config = nxd.neuronx_distributed_config(
        tp, 2, pipeline_config=pipeline_config, optimizer_config=optimizer_config
    )
    model = nxd.initialize_parallel_model(nxd_config, build)
    optimizer = nxd.initialize_parallel_optimizer(nxd_config, torch.optim.SGD, model.parameters(), lr=0.1)
    size, rank = parallel_state.get_data_parallel_size(), parallel_state.get_data_parallel_rank()
    rows = {name: value.chunk(size)[rank] for name, value in batch_of(kind).items()}
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
    parallel_state.destroy_model_parallel()
    nxd_config = nxd.neuronx_distributed_config(tp, 1, pipeline_config=by_hand, optimizer_config=optimizer_config)
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
        ("layers", 1, True, {"shares": True}),
        ("layers", 2, False, {"manual_pp_stage_partition_fn": uneven}),
        *([("words", 2, False, {})] if FULL_PRODUCT else []),
        ("words", 1, True, {"transformer_layer_cls": Block, "pipeline_cuts": ["layers.0"], "num_microbatches": 1}),
        ("bert", 2, False, {"virtual_pipeline_size": 1}),
    ],
)
def test_models_written_by_hand_train_in_stages(on_ranks, layout, kind, tp, zero, options, tmp_path):
    for problems, has_all in on_ranks(trained, directory=str(tmp_path), timeout=200.0):
        assert problems == []
        assert not has_all, "a rank holds its own stages alone"


def losses_of_microbatches(mesh):
    """By hand, and of a transformers model, with what each gives alone; and evaluation, and what is refused."""
    parallel_state.initialize_model_parallel(1, 2)
    options = {"manual_pp_partition": True, "manual_pp_loss_fn": nn.CrossEntropyLoss(), "_all_reduce_send_recv": False}
    model = NxDPPModel(layers(), num_microbatches=4, return_mb_loss=True, **options)
    batch, whole = batch_of("layers"), Unsplit(shares=False)
    losses = model.run_train(**batch)
    parts = [{name: value[at : at + 2] for name, value in batch.items()} for at in range(0, 8, 2)]
    problems = differing("losses", torch.stack(losses), torch.stack([whole(**part).detach() for part in parts]), 1e-5)
    passed = [batch["inputs"]]
    for layer in whole.layers:
        passed = layer(passed)
    problems += differing("output", model.run_eval(inputs=batch["inputs"]), passed[0].detach(), 1e-5)
    labels = torch.where(torch.arange(8) < 1, -100, batch["labels"])  # one target in the first microbatch
    model.zero_grad()
    model.run_train(batch["inputs"], labels)
    whole(batch["inputs"], labels).backward()
    expected = {name: each.grad for name, each in whole.named_parameters()}
    for name, parameter in model.local_named_parameters():
        problems += differing(name, parameter.grad, expected[name], 1e-4)
    said = []
    for call in (
        lambda: model(**batch),
        lambda: model.run_train(**{name: value[:3] for name, value in batch.items()}),
        lambda: model.run_train(batch["inputs"], torch.where(torch.arange(8) < 2, -100, labels)),
    ):
        try:
            call()
        except ShardwiseError as error:
            said.append(str(error))
    nxd_config = nxd.neuronx_distributed_config(1, 2, pipeline_config={"num_microbatches": 2, "return_mb_loss": True})
    planned = nxd.initialize_parallel_model(nxd_config, bert, parallel=False)
    batch = batch_of("bert")
    losses, whole = planned.run_train(**batch), bert(parallel=False)
    parts = [{name: value[at : at + 4] for name, value in batch.items()} for at in (0, 4)]
    problems += differing("planned", torch.stack(losses), torch.stack([whole(**x).loss.detach() for x in parts]), 1e-5)
    parallel_state.destroy_model_parallel()
    return problems, said


@pytest.mark.parametrize("layout", ["tp2"])
def test_losses_of_microbatches_are_returned_on_every_rank(on_ranks, layout):
    first, second = on_ranks(losses_of_microbatches)
    assert first == second
    problems, (forward, rows, targets) = first
    assert problems == []
    assert "run_train" in forward and "cannot divide 3 rows into 4 microbatches" in rows
    assert "a microbatch has no targets" in targets


def of_numbers(mesh):
    """Gradients of a model without labels are the mean of its microbatches', as theirs; it is cut, then moved."""
    parallel_state.initialize_model_parallel(1, 2)
    options = {"transformer_layer_cls": nn.Sequential, "num_microbatches": 4, "output_loss_value_spec": True}
    with pytest.warns(CompatWarning, match="input_names, output_loss_value_spec change nothing"):
        model = NxDPPModel(Numbers(), auto_partition=True, input_names=["x"], **options)
    whole, x = Numbers(), batch_of("layers")["inputs"]
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
    """A model that no made-up batch runs, one that fails on one rank, stages in no order, weights of two shapes."""
    parallel_state.initialize_model_parallel(1, 2)
    said = []
    failing = Words(parallel=True)
    if mesh.rank == 0:
        failing.head = nn.Identity()
    scattered = {"manual_pp_partition": True, "manual_pp_stage_partition_fn": lambda given, _: dict.fromkeys(given, 1)}
    different = [(nn.Linear(2, 3), "weight"), (nn.Linear(3, 2), "weight")]
    for call in (
        lambda: NxDPPModel(nn.Sequential(nn.Conv1d(7, 4, 3), nn.Linear(4, 4))),
        lambda: NxDPPModel(failing),
        lambda: NxDPPModel(layers(), **scattered),
        lambda: NxDPPModel(layers()[:1], manual_pp_partition=True),
        lambda: PipelineStageModule.mark_weight_sharing(different, "ends"),
    ):
        try:
            call()
        except ShardwiseError as error:
            said.append(str(error))
    parallel_state.destroy_model_parallel()
    return said


@pytest.mark.parametrize("layout", ["tp2"])
def test_what_cannot_be_cut_says_so_on_every_rank(on_ranks, layout):
    first, second = on_ranks(not_cut)
    assert first == second
    parts = ["by hand", "of the inputs", "follow one another", "2 stages for 1 layer", "(3, 2) and (2, 3)"]
    assert len(first) == len(parts) and all(part in text for part, text in zip(parts, first, strict=True)), first
