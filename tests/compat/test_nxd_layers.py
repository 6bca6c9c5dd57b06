"""NxD's layers beside torch's own: their arguments pairwise, in all dtypes and shapes of inputs, at tp 1, 2 and 4."""

from __future__ import annotations

import functools
import itertools
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shardwise.compat.neuronx_distributed import parallel_state
from shardwise.compat.neuronx_distributed.modules.qkv_linear import GQAQKVColumnParallelLinear
from shardwise.compat.neuronx_distributed.parallel_layers import (
    ColumnParallelLinear,
    ParallelEmbedding,
    RowParallelLinear,
    move_model_to_device,
    pad_model,
)
from shardwise.compat.neuronx_distributed.parallel_layers.pad import get_number_of_extra_heads
from shardwise.errors import ConfigError
from shardwise.parameters.canonical import canonical_tensor
from shardwise.parameters.registry import entries_of

pytestmark = pytest.mark.spawn

INPUTS = {"dtype": (torch.float32, torch.bfloat16), "ndim": (2, 3, 4), "contiguous": (True, False)}
LINEAR = {**INPUTS, "bias": (True, False), "features": (8, 7), "stride": (1, 2)}
COLUMN = {**LINEAR, "gather_output": (True, False), "sequence": (None, 0, 1)}
ROW = {**LINEAR, "input_is_parallel": (True, False), "sequence": (None, 0, 1)}
EMBEDDING = {**INPUTS, "features": (8, 7), "rows": (12, 11), "by_features": (False, True), "padding": (None, 0, 10)}
GROUPED = {**INPUTS, "bias": (True, False), "fused": (True, False), "gather_output": (True, False), "frozen": (0, 1)}
GROUPED |= {"heads": (1, 2, 4), "known": ("at once", "by the config", "by head_dim")}


def pairwise(choices):
    """Few cases in which every two values of two choices meet, among those that are allowed."""
    cells = [dict(zip(choices, values, strict=True)) for values in itertools.product(*choices.values())]
    cells = [cell for cell in cells if allowed(cell)]
    random = torch.Generator().manual_seed(0)
    cells = [cells[number] for number in torch.randperm(len(cells), generator=random)[:600]]
    pairs = [{frozenset(pair) for pair in itertools.combinations(cell.items(), 2)} for cell in cells]
    left, chosen = set().union(*pairs), []
    while left:
        best = max(range(len(cells)), key=lambda number: len(pairs[number] & left))
        chosen.append(cells[best])
        left -= pairs[best]
    return chosen


def allowed(cell):
    if cell.get("stride") == 2 and cell["features"] == 7:
        return False
    if cell.get("sequence") is not None:
        return cell.get("input_is_parallel", True) and cell["ndim"] > cell["sequence"] + 1
    return True


def values(cell, features, *, integers=0):
    """An input whose first dims divide by four ranks; strided where it is not to be contiguous."""
    shape = [4, 4, 2][: cell["ndim"] - 1]
    if integers:
        x = torch.randint(integers, shape)
    else:
        x = torch.randn(*shape, features, dtype=cell["dtype"])
    return x if cell["contiguous"] else x.transpose(0, -1).contiguous().transpose(0, -1)


def own(x, layer, name="weight"):
    """This rank's part of the features."""
    pieces = layer.placements[name].pieces[parallel_state.get_tensor_model_parallel_rank()]
    return torch.cat([x[..., start:stop] for start, stop in pieces], -1) if pieces else x[..., :0]


def part(x, dim):
    """This rank's part of the sequence."""
    return x.chunk(parallel_state.get_tensor_model_parallel_size(), dim)[
        parallel_state.get_tensor_model_parallel_rank()
    ]


def off(name, found, wanted, cell):
    """What differs, in words: float32 sums in another order, bfloat16 ones rounded."""
    bound = (1e-5 if cell["dtype"] is torch.float32 else 2e-2) * (1 + float(wanted.detach().abs().max()))
    if found.shape != wanted.shape or found.dtype != wanted.dtype:
        return [f"{name}: {found.shape} {found.dtype}, not {wanted.shape} {wanted.dtype}: {cell}"]
    worst = float((found.detach().float() - wanted.detach().float()).abs().max()) if found.numel() else 0.0
    return [f"{name} is {worst} off: {cell}"] if worst > bound else []


def gradients_off(layer, reference, cell):
    """Of parameters, as the full layer's."""
    problems = []
    for name, wanted in reference.items():
        parameter, entry = layer._parameters[name], entries_of(layer)[name]
        if parameter.grad is not None:
            full = canonical_tensor(parameter.grad, entry.layout, parallel_state.current_mesh())
            problems += off(f"gradient of {name}", full, wanted, cell)
        elif wanted is not None:
            problems.append(f"no gradient of {name}: {cell}")
    return problems


def gradients_of(reference):
    return {name: each.grad for name, each in reference.named_parameters()}


def column(cell):
    reference = nn.Linear(6, cell["features"], cell["bias"], dtype=cell["dtype"])
    options = {"sequence_parallel_enabled": cell["sequence"] is not None, "sequence_dimension": cell["sequence"]}
    layer = ColumnParallelLinear(
        6,
        cell["features"],
        cell["bias"],
        cell["gather_output"],
        cell["dtype"],
        stride=cell["stride"],
        init_method=nn.init.ones_,
        **options,
    )
    layer.load_state_dict(reference.state_dict())
    full = values(cell, 6)
    x = full if cell["sequence"] is None else part(full, cell["sequence"])
    x, full = x.detach().clone().requires_grad_(), full.detach().clone().requires_grad_()
    out = layer(x)
    wanted = reference(full)
    weight = torch.randn_like(wanted)
    problems = off("output", out, wanted if cell["gather_output"] else own(wanted, layer), cell)
    (out * (weight if cell["gather_output"] else own(weight, layer))).sum().backward()
    (wanted * weight).sum().backward()
    problems += off(
        "gradient of the input",
        x.grad,
        full.grad if cell["sequence"] is None else part(full.grad, cell["sequence"]),
        cell,
    )
    return problems + gradients_off(layer, gradients_of(reference), cell)


def row(cell):
    reference = nn.Linear(cell["features"], 6, cell["bias"], dtype=cell["dtype"])
    options = {"sequence_parallel_enabled": cell["sequence"] is not None, "sequence_dimension": cell["sequence"]}
    layer = RowParallelLinear(
        cell["features"],
        6,
        cell["bias"],
        cell["input_is_parallel"],
        True,
        cell["dtype"],
        stride=cell["stride"],
        **options,
    )
    layer.load_state_dict(reference.state_dict())
    full = values(cell, cell["features"])
    x = (own(full, layer) if cell["input_is_parallel"] else full).detach().clone().requires_grad_()
    full = full.detach().clone().requires_grad_()
    out = layer(x)
    wanted = reference(full)
    weight, dim = torch.randn_like(wanted), cell["sequence"]
    problems = off("output", out, wanted if dim is None else part(wanted, dim), cell)
    (out * (weight if dim is None else part(weight, dim))).sum().backward()
    (wanted * weight).sum().backward()
    problems += off(
        "gradient of the input", x.grad, own(full.grad, layer) if cell["input_is_parallel"] else full.grad, cell
    )
    wanted = gradients_of(reference)
    if dim is not None:  # of parts of the sequence
        wanted.pop("bias", None)
    return problems + gradients_off(layer, wanted, cell)


def embedding(cell):
    size = cell["features"]
    reference = nn.Embedding(cell["rows"], size, cell["padding"], dtype=cell["dtype"])
    layer = ParallelEmbedding(
        cell["rows"], size, cell["padding"], dtype=cell["dtype"], shard_across_embedding=cell["by_features"]
    )
    layer.load_state_dict(reference.state_dict())
    ids = values(cell, 0, integers=cell["rows"])
    out, wanted = layer(ids), reference(ids)
    weight = torch.randn_like(wanted)
    (out * weight).sum().backward()
    (wanted * weight).sum().backward()
    return off("output", out, wanted, cell) + gradients_off(layer, gradients_of(reference), cell)


def grouped(cell):
    """Four query heads of two features over each key/value head; frozen weights still pass gradients on."""
    heads = cell["heads"]
    copies = max(1, parallel_state.get_tensor_model_parallel_size() // heads)
    reference = nn.ModuleList(
        nn.Linear(6, size, cell["bias"], dtype=cell["dtype"]) for size in (8 * heads, 2 * heads, 2 * heads)
    )
    layer = GQAQKVColumnParallelLinear(
        6,
        [8 * heads, 2 * heads],
        cell["bias"],
        cell["gather_output"],
        dtype=cell["dtype"],
        kv_size_multiplier=copies,
        fuse_qkv=cell["fused"],
        **({"num_heads": heads} if cell["known"] == "at once" else {}),
    )
    layer.load_state_dict(joined(reference, lambda each: each.state_dict(), cell["fused"]))
    layer.requires_grad_(not cell["frozen"])
    model = nn.ModuleDict({"qkv": layer})
    model.head_dim = 2 if cell["known"] == "by head_dim" else None
    model.config = SimpleNamespace(num_key_value_heads=heads) if cell["known"] == "by the config" else None
    move_model_to_device(model, "cpu")
    full = values(cell, 6).detach().clone().requires_grad_()
    x = full.detach().clone().requires_grad_()
    problems, total, wanted_total = [], 0.0, 0.0
    for name, out, each in zip("qkv", layer(x), reference, strict=True):
        wanted = each(full)
        if not cell["gather_output"]:  # of the document: heads are replicated, and divided over tp
            wanted = (
                wanted if name == "q" else wanted.unflatten(-1, (heads, 2)).repeat_interleave(copies, -2).flatten(-2)
            )
        weight = torch.randn_like(wanted)
        mine = (wanted, weight) if cell["gather_output"] else (part(wanted, -1), part(weight, -1))
        problems += off(name, out, mine[0], cell)
        total, wanted_total = total + (out * mine[1]).sum(), wanted_total + (wanted * weight).sum()
    total.backward()
    wanted_total.backward()
    problems += off("gradient of the input", x.grad, full.grad, cell)
    wanted = joined(reference, gradients_of, cell["fused"])
    return problems + ([] if cell["frozen"] else gradients_off(layer, wanted, cell))


def joined(reference, read, fused):
    found = {}
    for letter, each in zip("qkv", map(read, reference), strict=True):
        for name, value in each.items():
            found.setdefault(f"{name}_qkv" if fused else f"{name}_{letter}", []).append(value)
    return {name: torch.cat(own) for name, own in found.items()}


def beside_torch(mesh, cells):
    problems = []
    for tp in (1, 2, 4):
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=tp)
        for check, chosen in zip((column, row, embedding, grouped), cells, strict=True):
            for number, cell in enumerate(chosen):
                torch.manual_seed(number)
                problems += [f"{check.__name__} at tp{tp}: {each}" for each in check(cell)]
        parallel_state.destroy_model_parallel()
    return problems


class Attention(nn.Module):
    """Three heads of four features, written as NxD's users do: with the heads that `pad_model` makes of them."""

    def __init__(self, *, parallel):
        super().__init__()
        self.num_heads = 3
        if parallel:
            tp = parallel_state.get_tensor_model_parallel_size()
            self.num_heads = (3 + get_number_of_extra_heads(3, tp)) // tp
            self.q, self.k, self.v = (ColumnParallelLinear(12, 12, gather_output=False) for _ in range(3))
            self.out = RowParallelLinear(12, 12, input_is_parallel=True)
        else:
            self.q, self.k, self.v, self.out = (nn.Linear(12, 12) for _ in range(4))

    def forward(self, x):  # [b, s, h]
        q, k, v = (each(x).unflatten(-1, (self.num_heads, 4)).transpose(1, 2) for each in (self.q, self.k, self.v))
        return self.out(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


def padded(mesh, tp):
    torch.manual_seed(0)
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=tp)
    torch.manual_seed(0)
    whole = Attention(parallel=False)
    models = []  # two in one process
    for _ in range(2):
        torch.manual_seed(0)
        models.append(pad_model(Attention(parallel=True), tp, 3, [Attention]))
    x = torch.randn(2, 5, 12)
    wanted = whole(x)
    wanted.pow(2).sum().backward()
    problems = []
    cell = {"dtype": torch.float32}
    for each in models:
        move_model_to_device(each, "cpu")
        out = each(x)
        problems += off("output", out, wanted, cell)
        out.pow(2).sum().backward()
        for name in ("q", "k", "v", "out"):
            problems += gradients_off(getattr(each, name), gradients_of(getattr(whole, name)), cell)
    sizes = dist.get_world_size() // tp, tuple(models[0].q.weight.shape)
    parallel_state.destroy_model_parallel()
    return problems, sizes


def wrong_copies(mesh):
    """Copies that would give queries the keys of other heads."""
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=4)
    said = []
    build = functools.partial(GQAQKVColumnParallelLinear, 6, gather_output=False)

    def known_late():
        model = nn.ModuleDict({"qkv": build([8, 4], kv_size_multiplier=2)})
        model.config = SimpleNamespace(num_attention_heads=2)
        move_model_to_device(model, "cpu")

    for call in (
        lambda: build([8, 4], kv_size_multiplier=4, num_heads=2),
        lambda: build([6, 6], num_heads=3),
        lambda: build([8, 4], kv_size_multiplier=2, num_heads=2)(torch.randn(1, 6)),
        known_late,
    ):
        try:
            call()
        except ConfigError as error:
            said.append(str(error))
    parallel_state.destroy_model_parallel()
    return said


@pytest.mark.parametrize("layout", ["tp4"])
def test_layers_compute_what_torchs_own_do(on_ranks, layout):
    cells = [pairwise(choices) for choices in (COLUMN, ROW, EMBEDDING, GROUPED)]
    for problems in on_ranks(beside_torch, cells=cells):
        assert problems == []


@pytest.mark.parametrize("layout", ["tp4"])
@pytest.mark.parametrize("tp", [2, 4])
def test_padded_heads_change_nothing(on_ranks, layout, tp):
    for rank, (problems, sizes) in enumerate(on_ranks(padded)):
        assert problems == []
        heads = [2, 1] if tp == 2 else [1, 1, 1, 0]
        assert sizes == (4 // tp, (4 * heads[rank % tp], 12)), "parameters have their true sizes"


@pytest.mark.parametrize("layout", ["tp4"])
def test_copies_of_heads_that_do_not_fit_are_refused(on_ranks, layout):
    for said in on_ranks(wrong_copies):
        assert [text.splitlines()[0].removesuffix(" on 4 tp ranks") for text in said] == [
            "4 copies (kv_size_multiplier) of 2 key/value heads",
            "1 copies (kv_size_multiplier) of 3 key/value heads",
            "a layer with copies of key/value heads in a model that is not known",
            "2 copies (kv_size_multiplier) of 1 key/value heads",
        ]
        assert "ranks / heads as kv_size_multiplier" in said[0]
