"""NxD's parallel layers in hand-written models, whose parameters are known like any other."""

from __future__ import annotations

import copy
import importlib.util
import math

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import shardwise
from shardwise.compat.neuronx_distributed import parallel_layers, parallel_state, xm
from shardwise.compat.neuronx_distributed.modules.qkv_linear import GQAQKVColumnParallelLinear
from shardwise.compat.neuronx_distributed.parallel_layers import (
    ColumnParallelLinear,
    LayerNorm,
    ParallelEmbedding,
    RowParallelLinear,
    clip_grad_norm,
    mappings,
    move_model_to_device,
    parallel_cross_entropy,
    random,
)
from shardwise.errors import LoadError, MeshError, ShardwiseError
from tests.guards.sources import ROOT
from tests.oracle import differing, differing_gradients

pytestmark = pytest.mark.spawn


class Block(nn.Module):
    """Attention with four heads of eight features over two key/value heads, and an MLP."""

    def __init__(self, parallel, *, fused, copies, parts, bias=True):
        super().__init__()
        self.norm = LayerNorm(32, sequence_parallel_enabled=parts) if parallel else nn.LayerNorm(32)
        self.parallel, self.bias = parallel, bias
        if parallel:
            options = {"sequence_parallel_enabled": parts}
            self.qkv = GQAQKVColumnParallelLinear(
                32,
                [32, 16],
                bias=bias,
                gather_output=False,
                fuse_qkv=fused,
                kv_size_multiplier=copies,
                num_heads=2,
                **options,
            )
            self.out = RowParallelLinear(32, 32, input_is_parallel=True, **options)
            self.up = ColumnParallelLinear(32, 40, gather_output=False, **options)
            self.down = RowParallelLinear(40, 32, input_is_parallel=True, **options)
        else:
            self.q, self.k, self.v = nn.Linear(32, 32, bias), nn.Linear(32, 16, bias), nn.Linear(32, 16, bias)
            self.out, self.up, self.down = nn.Linear(32, 32), nn.Linear(32, 40), nn.Linear(40, 32)

    def forward(self, x):  # [s, b, h]
        normed = self.norm(x)
        q, k, v = self.qkv(normed) if self.parallel else (self.q(normed), self.k(normed), self.v(normed))
        q, k, v = (each.unflatten(-1, (-1, 8)).permute(1, 2, 0, 3) for each in (q, k, v))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.out(attended.permute(2, 0, 1, 3).flatten(2))
        return x + self.down(torch.relu(self.up(x)))


class Model(nn.Module):
    def __init__(self, parallel, *, parts=False, **options):
        super().__init__()
        self.parallel, self.parts = parallel, parts
        self.embed = ParallelEmbedding(37, 32, sequence_parallel_enabled=parts) if parallel else nn.Embedding(37, 32)
        self.blocks = nn.ModuleList(Block(parallel, parts=parts, **options) for _ in range(2))
        self.head = (
            ColumnParallelLinear(32, 37, bias=False, gather_output=False) if parallel else nn.Linear(32, 37, False)
        )

    def forward(self, ids, labels):  # [b, s]
        x = self.embed(ids)
        x = x if self.parts else x.transpose(0, 1)
        for block in self.blocks:
            x = block(x)
        if self.parts:
            x = mappings.gather_from_sequence_parallel_region(x, to_model_parallel=False)
        logits = self.head(x)
        if not self.parallel:
            return F.cross_entropy(logits.flatten(0, 1), labels.T.flatten())
        losses = parallel_cross_entropy(logits, labels.T)
        return losses.sum() / (labels != -100).sum()


def full_state(whole, fused):
    """The unsplit model's weights under the parallel one's names."""
    state = {}
    for name, value in whole.state_dict().items():
        place, _, own = name.rpartition(".")
        block, _, letter = place.rpartition(".")
        if letter not in ("q", "k", "v"):
            state[name] = value
        elif not fused:
            state[f"{block}.qkv.{own}_{letter}"] = value
        else:
            state.setdefault(f"{block}.qkv.{own}_qkv", []).append(value)
    return {name: torch.cat(value) if isinstance(value, list) else value for name, value in state.items()}


def gradients_of(whole, fused):
    twin = copy.deepcopy(whole)
    for parameter, own in zip(twin.parameters(), whole.parameters(), strict=True):
        parameter.data = own.grad
    return full_state(twin, fused)


def trains(mesh, tp, fused, copies, parts, loop):
    torch.manual_seed(0)
    whole = Model(False, fused=fused, copies=copies)
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=tp)
    try:
        model = Model(True, fused=fused, copies=copies, parts=parts)
        model.load_state_dict(full_state(whole, fused))
        move_model_to_device(model, "cpu")
        ids = torch.randint(37, (4, 8), generator=torch.Generator().manual_seed(0))
        labels = ids.roll(-1, 1)
        ranks, rank = parallel_state.get_data_parallel_size(), parallel_state.get_data_parallel_rank()
        optimizers = [torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9) for each in (model, whole)]
        problems = []
        for step in range(3):
            loss = model(ids.chunk(ranks)[rank], labels.chunk(ranks)[rank])
            loss.backward()
            expected = whole(ids, labels)
            expected.backward()
            problems += differing("loss", loss.detach(), expected.detach(), 1e-5) if ranks == 1 else []
            problems += differing_gradients(shardwise.full_gradients(model), gradients_of(whole, fused))
            norms = [clip_grad_norm(model.parameters(), 0.5), nn.utils.clip_grad_norm_(whole.parameters(), 0.5)]
            problems += differing(f"norm {step}", *norms, 1e-4)
            if loop == "xm":
                xm.optimizer_step(optimizers[0], groups=parallel_state.get_data_parallel_group(as_list=True))
            else:
                optimizers[0].step()
            optimizers[1].step()
            for each in optimizers:
                each.zero_grad()
        wanted, found = full_state(whole, fused), shardwise.full_state_dict(model)
        problems += [f"{name} drifted" for name in wanted if (found[name] - wanted[name]).abs().max() > 1e-4]
        return problems
    finally:
        parallel_state.destroy_model_parallel()


@pytest.mark.parametrize("layout", ["tp4"])
@pytest.mark.parametrize(
    ("tp", "fused", "copies", "parts", "loop"),
    [
        (4, True, 2, False, "xm"),  # fused: theirs gives a wrong norm, and cannot have biases
        (4, False, 2, True, "torch"),
        (2, True, 1, True, "xm"),
        (2, False, 1, False, "torch"),
        (1, True, 1, False, "xm"),
    ],
)
def test_a_hand_written_model_trains_as_the_unsplit_one(on_ranks, layout, tp, fused, copies, parts, loop):
    assert on_ranks(trains) == [[]] * 4


def details(mesh, directory):
    found = {}
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    state, tp = parallel_state, parallel_state.get_tensor_model_parallel_rank()
    found["groups"] = (
        state.get_tensor_model_parallel_group(as_list=True),
        state.get_data_parallel_group(as_list=True),
        state.get_pipeline_model_parallel_group(as_list=True),
        dist.get_process_group_ranks(state.get_data_parallel_group()) == [tp, tp + 2],
        dist.get_process_group_ranks(state.get_pipeline_model_parallel_group()) == [dist.get_rank()],
        state.get_tensor_parallel_size(),
        state.get_data_parallel_world_size(),
    )
    for name, call in {
        "twice": lambda: state.initialize_model_parallel(2),
        "groups of others": lambda: xm.optimizer_step(torch.optim.SGD([torch.ones(1)]), groups=[[0, 1, 2, 3]]),
        "max_norm": lambda: ParallelEmbedding(4, 4, max_norm=1.0),
        "scale_grad_by_freq": lambda: ParallelEmbedding(4, 4, scale_grad_by_freq=True),
        "reduce_output": lambda: RowParallelLinear(4, 4, True, True, False),
        "skip_bias_add": lambda: ColumnParallelLinear(4, 4, skip_bias_add=True),
        "pair": lambda: GQAQKVColumnParallelLinear(4, 4),
        "not saved": lambda: parallel_layers.load(f"{directory}/nowhere"),
    }.items():
        try:
            call()
        except ShardwiseError as error:
            found[name] = f"{type(error).__name__}: {error}"
    # a model that nobody moved: gradients are this rank's, until xm averages them
    torch.manual_seed(0)
    model = nn.Sequential(
        ColumnParallelLinear(6, 10, gather_output=False), RowParallelLinear(10, 3, input_is_parallel=True)
    )
    norm = nn.LayerNorm(3)
    torch.manual_seed(0)
    reference = nn.Sequential(nn.Linear(6, 10), nn.Linear(10, 3))
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
    norm(model(x.chunk(2)[state.get_data_parallel_rank()])).pow(3).mean().backward()
    unsplit = copy.deepcopy(norm)
    unsplit.zero_grad()
    unsplit(reference(x)).pow(3).mean().backward()
    parameters = [*model.parameters(), *norm.parameters()]
    before = [each.detach().clone() for each in parameters]
    xm.optimizer_step(torch.optim.SGD(parameters, lr=1.0), groups=state.get_data_parallel_group(as_list=True))
    norms = [clip_grad_norm(iter(parameters), math.inf, order) for order in (2, "inf")]
    others = [
        nn.utils.get_total_norm([p.grad for p in (*reference.parameters(), *unsplit.parameters())], o)
        for o in (2, math.inf)
    ]
    found["norms"] = [differing("norm", a, b, 1e-4) for a, b in zip(norms, others, strict=True)]
    found["stepped"] = not torch.equal(before[0], parameters[0])
    # every rank's part, in files of their own
    parallel_layers.save({"model": model.state_dict(), "epoch": 3}, directory)
    parallel_layers.save({"model": model.state_dict()}, f"{directory}/xser", save_xser=True, down_cast_bf16=True)
    kept = model.state_dict()["0.weight"].clone()
    nn.init.zeros_(model[0].weight)
    found["rest"] = parallel_layers.load(directory, model)
    found["loaded"] = torch.equal(model[0].weight, kept)
    narrow = parallel_layers.load(f"{directory}/xser", load_xser=True)["model"]["0.weight"]
    found["xser"] = torch.equal(narrow, kept.to(torch.bfloat16))
    if dist.get_rank() == 0:
        torch.save({"model": reference.state_dict()}, f"{directory}/full.pt")
    xm.rendezvous("saved")
    parallel_layers.load(f"{directory}/full.pt", model_or_optimizer=model, sharded=False)
    found["from full"] = torch.equal(model[0].weight, reference[0].weight.chunk(2)[tp])
    random.model_parallel_xla_manual_seed(7)
    with random.get_xla_rng_tracker().fork():
        own = torch.rand(1).item()
    found["random"] = (torch.rand(1).item(), own)
    x = torch.arange(6.0).view(2, 3).requires_grad_()
    there = mappings.gather_from_tensor_model_parallel_region(
        mappings.scatter_to_tensor_model_parallel_region(x[:, :2])
    )
    mappings.reduce_from_tensor_model_parallel_region(mappings.copy_to_tensor_model_parallel_region(x)).sum().backward()
    found["mappings"] = (torch.equal(there, x[:, :2]), x.grad.unique().tolist())
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(1)
    with pytest.raises(LoadError) as raised:
        parallel_layers.load(directory, nn.Sequential(ColumnParallelLinear(6, 10), RowParallelLinear(10, 3)))
    found["other sizes"] = str(raised.value)
    parallel_state.destroy_model_parallel()
    parallel_state.destroy_model_parallel()
    try:
        ColumnParallelLinear(2, 2)
    except MeshError as error:
        found["before"] = str(error)
    for name, sizes in {"sizes": (3, 1), "no size": (0, 1), "too many": (8, 1)}.items():
        try:
            parallel_state.initialize_model_parallel(*sizes)
        except MeshError as error:
            found[name] = str(error)
    return found


@pytest.mark.parametrize("layout", ["tp4"])
def test_groups_saving_and_what_is_refused(on_ranks, layout, tmp_path):
    ranks = on_ranks(details, directory=str(tmp_path))
    for found in ranks:
        assert found["groups"] == ([[0, 1], [2, 3]], [[0, 2], [1, 3]], [[0], [1], [2], [3]], True, True, 2, 2)
        assert found["norms"] == [[], []] and found["stepped"]
        assert "does not fit at ddp4" in found["other sizes"] and "tp and pp sizes" in found["other sizes"]
        assert found["rest"] == {"epoch": 3} and found["loaded"] and found["xser"] and found["from full"]
        assert found["mappings"] == (True, [2.0])
        expected = {
            "twice": ["initialised already, as ddp2.tp2", "destroy_model_parallel"],
            "groups of others": ["[[0, 1, 2, 3]]", "[[0, 2], [1, 3]]"],
            "max_norm": ["max_norm"],
            "scale_grad_by_freq": ["scale_grad_by_freq"],
            "reduce_output": ["reduce_output=False"],
            "skip_bias_add": ["skip_bias_add"],
            "pair": ["output_size is 4"],
            "not saved": ["no checkpoint at", "nowhere"],
            "before": ["not initialised", "initialize_model_parallel"],
            "sizes": ["= 3 does not divide 4 ranks"],
            "no size": ["tp_size is 0"],
            "too many": ["= 8 does not divide 4 ranks"],
        }
        for name, parts in expected.items():
            assert all(part in found[name] for part in parts), found[name]
    alike, own = zip(*(found["random"] for found in ranks), strict=True)
    assert alike[0] == alike[1] != alike[2] == alike[3], "the same over tp, another over data"
    assert len(set(own)) == 4


def losses(mesh, smoothing, size):
    """Against torch's, and the gradients; logits of this rank's classes."""
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 4, size, generator=generator)
    target = torch.randint(size, (3, 4), generator=generator)
    target[0, 0] = -100
    own = logits.chunk(2, -1)[parallel_state.get_tensor_model_parallel_rank()].clone().requires_grad_()
    before = own.detach().clone()
    loss = parallel_cross_entropy(own, target, label_smoothing=smoothing)
    loss.sum().backward()
    logits.requires_grad_()
    expected = F.cross_entropy(logits.view(-1, size), target.view(-1), reduction="none", label_smoothing=smoothing)
    expected.sum().backward()
    wanted = logits.grad.chunk(2, -1)[parallel_state.get_tensor_model_parallel_rank()]
    problems = differing("loss", loss.detach().flatten(), expected.detach(), 1e-5) + differing(
        "gradient", own.grad, wanted, 1e-5
    )
    parallel_state.destroy_model_parallel()
    return problems + ([] if torch.equal(own, before) else ["the logits were changed"])


@pytest.mark.parametrize("layout", ["tp2"])
@pytest.mark.parametrize(("smoothing", "size"), [(0.0, 8), (0.1, 8), (0.1, 7)])
def test_cross_entropy(on_ranks, layout, smoothing, size):
    assert on_ranks(losses) == [[], []]


def bert(mesh, directory):
    spec = importlib.util.spec_from_file_location("nxd_bert", ROOT / "examples" / "nxd_bert.py")
    listing = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(listing)
    history, state = listing.train(2, directory)
    expected, weights = listing.train_unsplit()
    norms = [abs(mine - theirs) < 1e-4 for (_, mine), (_, theirs) in zip(history, expected, strict=True)]
    drifted = [name for name, value in state.items() if (value - weights[name]).abs().max() > 1e-4]
    return norms, drifted


@pytest.mark.parametrize("layout", ["fsdp2.tp2"])
def test_the_guides_bert_over_two_data_ranks_and_two_tensor_ranks(on_ranks, layout, tmp_path):
    assert on_ranks(bert, directory=str(tmp_path)) == [([True] * 3, [])] * 4
