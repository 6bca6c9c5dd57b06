"""Compiled blocks are one graph each, compute the same, keep their names, and hold their collectives."""

from __future__ import annotations

import copy
import itertools
from types import SimpleNamespace

import peft
import pytest
import torch
from torch import nn

import shardwise
from shardwise.api.rehearsal import fake_mesh
from shardwise.comm import collectives
from shardwise.comm.collectives import reduce_scatter_single
from shardwise.errors import ConfigError, UnsupportedError
from shardwise.ranks.spawn import spawn
from shardwise.topology.shape import MeshShape
from tests.families import CACHE, FULL_PRODUCT, rows_of, tiny_batch, tiny_model

# torch's tracing warns of what it does itself: of reading .grad, of making instances of autograd functions.
pytestmark = pytest.mark.filterwarnings(
    "ignore::UserWarning", "ignore::DeprecationWarning", "ignore:.is_gradient_checkpointing:FutureWarning"
)


def forget_compilation():
    """What other tests of this process have compiled does not count."""
    from torch._dynamo.utils import clear_compilation_metrics, counters

    torch.compiler.reset()
    counters.clear()
    clear_compilation_metrics()


def count_compilation():
    """Graphs, reasons why a graph ended, and how many were compiled before for other inputs; of this process."""
    from torch._dynamo.utils import counters, get_compilation_metrics

    recompiles = sum(metrics.recompile_reason is not None for metrics in get_compilation_metrics())
    graphs, breaks = counters["stats"]["unique_graphs"], dict(counters["graph_break"])
    return SimpleNamespace(graphs=graphs, recompiles=recompiles, graph_breaks=breaks)


def train_compiled(mesh, mode):
    """Worst gradient against the unsplit model's, relative, and what was compiled in two steps of equal shape."""
    whole = tiny_model("llama", num_hidden_layers=3)
    batch = tiny_batch(whole)
    # aot_eager traces and differentiates as inductor does, and generates no code: that takes a minute here. What stages
    # do with blocks shows without, and what FSDP2 does with them.
    backend = "aot_eager" if mesh.size("tp") > 1 or FULL_PRODUCT else "eager"
    model = shardwise.parallelize(
        copy.deepcopy(whole),
        mesh,
        sequence_parallel=mode == "full",
        compilation=shardwise.Compile(backend=backend),
        recompute=shardwise.Recompute(mode=mode),
    )
    names, held = [name for name, _ in whole.named_parameters()], [name for name, _ in model.named_parameters()]
    assert held == [name for name in names if name in held] and (held == names or mesh.size("pp") > 1)
    whole(**batch).loss.backward()
    step = shardwise.TrainStep(model, mesh, num_microbatches=mesh.size("pp"))
    mine = rows_of(batch, mesh)
    for _ in range(2):
        model.zero_grad()
        step(mine)
    gradients = shardwise.full_gradients(model)
    worst = max(
        float((gradients[name] - parameter.grad).abs().max() / parameter.grad.abs().max())
        for name, parameter in whole.named_parameters()
    )
    return worst, count_compilation()


TRAINED = (("tp2", "full"), ("fsdp2", "selective"), ("pp2", "none"))


def compile_whole(mesh):
    whole = tiny_model("llama", num_hidden_layers=2)
    model, batch = shardwise.parallelize(copy.deepcopy(whole), mesh), tiny_batch(whole)
    with pytest.raises(UnsupportedError, match="torch.compile of a LlamaForCausalLM"):
        torch.compile(model, backend="eager")(**batch)
    forget_compilation()
    if mesh.size("pp") > 1:
        with pytest.raises(UnsupportedError, match="torch.compile of a LlamaForCausalLM in stages"):
            model.compile(backend="eager")
    return float(model(**batch).loss.detach()), float(whole(**batch).loss.detach())


def on_two_ranks():
    """What a rank finds on every mesh, one after another: to load torch's compiler costs more than they all."""
    found = {}
    for layout, mode in TRAINED:
        with shardwise.Mesh.open(layout) as mesh:
            torch.manual_seed(0)
            forget_compilation()
            found[layout] = train_compiled(mesh, mode)
    for layout in ("pp2", "tp2"):
        with shardwise.Mesh.open(layout) as mesh:
            torch.manual_seed(0)
            forget_compilation()
            found[f"{layout} whole"] = compile_whole(mesh)
    return found


@pytest.fixture(scope="module")
def ranks():
    return spawn(on_two_ranks, 2)


@pytest.mark.spawn
@pytest.mark.parametrize("layout", [layout for layout, _ in TRAINED])
def test_blocks_are_compiled_whole_and_compute_the_same(ranks, layout):
    for worst, found in (rank[layout] for rank in ranks):
        assert worst < 1e-4
        assert not found.graph_breaks
        assert (found.graphs, found.recompiles) == (1, 0), "every block runs what was compiled for the first"


@pytest.mark.spawn
@pytest.mark.parametrize("layout", ["pp2", "tp2"])
def test_torch_compile_of_the_model_is_refused_and_harms_nothing(ranks, layout):
    for found, wanted in (rank[f"{layout} whole"] for rank in ranks):
        assert found == pytest.approx(wanted, abs=1e-5)


LAYOUTS = ("tp1", "tp2", "tp2+sp", "fsdp2", "fsdp2.tp2+sp")
PRECISIONS = (None, "bfloat16")
MODES = ("none", "full", "selective", "attention")
ADAPTERS = (False, True)
CHOICES = (LAYOUTS, PRECISIONS, MODES, ADAPTERS)
PRODUCT = list(itertools.product(*CHOICES))


@pytest.fixture
def forget():
    forget_compilation()


CHOSEN = [
    ("tp1", None, "attention", True),
    ("tp2", "bfloat16", "attention", False),
    ("tp2+sp", None, "full", True),
    ("fsdp2", "bfloat16", "full", False),
    ("fsdp2.tp2+sp", None, "none", False),
]
"""What could not be compiled once, or was compiled in pieces, each for a reason of its own; the whole product, in which
graphs are differentiated, too, is proved in `make coverage`.
"""


@pytest.mark.single
def test_every_choice_is_there():
    trained = {mode for _, mode in TRAINED}
    found = [{cell[number] for cell in CHOSEN} | (trained if number == 2 else set()) for number in range(4)]
    assert found == list(map(set, CHOICES))


def build(mesh, cell, compilation, *, dropout=0.0):
    layout, precision, mode, has_adapter = cell
    whole = tiny_model("llama", attention_dropout=dropout)
    if has_adapter:
        torch.manual_seed(3)
        config = peft.LoraConfig(
            r=4, target_modules="all-linear", init_lora_weights=False, lora_dropout=dropout, task_type="CAUSAL_LM"
        )
        whole = peft.get_peft_model(whole, config)
    return shardwise.parallelize(
        whole,
        mesh,
        sequence_parallel=layout.endswith("+sp"),
        precision=shardwise.Precision(compute=precision) if precision is not None else None,
        recompute=shardwise.Recompute(mode=mode),
        compilation=compilation,
    ).train()


def steps(model, mesh, num_steps):
    """The losses of steps on one batch, this rank's gradients of the last one, and what was compiled after each."""
    step, batch, losses, counts = shardwise.TrainStep(model, mesh), tiny_batch(tiny_model("llama")), [], []
    for _ in range(num_steps):
        torch.manual_seed(5)
        model.zero_grad()
        losses.append(float(step(batch).loss))
        counts.append(count_compilation().graphs)
    found = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    return losses, {name: getattr(grad, "_local_tensor", grad).clone() for name, grad in found.items()}, counts


def writes_what_is_scattered(mesh):
    """Whether ranks that are not there have values: in torch 2.11 their reduce-scatter leaves its output as it was
    allocated. What such steps compute is compared on ranks (`test_blocks_are_compiled_whole_and_compute_the_same`).
    """
    scattered = torch.zeros(1)
    reduce_scatter_single(scattered, torch.ones(mesh.shape.world_size), mesh.group())
    return float(scattered) != 0


@pytest.mark.single
@pytest.mark.parametrize("cell", PRODUCT if FULL_PRODUCT else CHOSEN, ids=lambda cell: "-".join(map(str, cell)))
def test_every_product_is_compiled_whole(forget, cell):
    with fake_mesh(MeshShape.parse(cell[0].removesuffix("+sp"))) as mesh:
        is_told = mesh.group() is None or writes_what_is_scattered(mesh)
        losses, gradients, _ = steps(build(mesh, cell, None), mesh, 1)
        # Graphs and breaks are the same for every backend.
        choice = shardwise.Compile(backend="aot_eager" if FULL_PRODUCT else "eager")
        compiled_losses, compiled, counts = steps(build(mesh, cell, choice), mesh, 3 if FULL_PRODUCT else 2)
    found = count_compilation()
    assert not found.graph_breaks
    assert 1 <= found.graphs <= 2
    assert found.recompiles <= 1, "the first block of a frozen model has an input without gradient"
    assert counts[-1] == counts[0], "what the first step compiled serves the others"
    assert list(compiled) == list(gradients)
    if not is_told:
        return
    assert {abs(loss - losses[0]) < 1e-6 for loss in compiled_losses} == {True}
    for name, gradient in gradients.items():
        torch.testing.assert_close(compiled[name], gradient, rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.single
@pytest.mark.parametrize("mode", ["none", "full"] if FULL_PRODUCT else ["full"])
def test_dropout_is_compiled_on_one_tp_rank(forget, mode):
    """Gradients are those of the masks of the forward, drawn once: a constant batch has the loss of its gradient."""
    with fake_mesh(MeshShape.parse("tp1")) as mesh:
        cell = ("tp1", None, mode, False)
        eager = steps(build(mesh, cell, None, dropout=0.3), mesh, 1)
        compiled = steps(build(mesh, cell, shardwise.Compile(backend="aot_eager"), dropout=0.3), mesh, 2)
    assert count_compilation().graphs == 1 and not count_compilation().graph_breaks
    assert compiled[0] == pytest.approx([eager[0][0]] * 2, abs=1e-6)
    for name, gradient in eager[1].items():
        torch.testing.assert_close(compiled[1][name], gradient, rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.single
def test_blocks_that_fill_a_cache_run_as_they_are(forget):
    with fake_mesh(MeshShape.parse("tp1")) as mesh, torch.no_grad():
        model = build(mesh, ("tp1", None, "none", False), shardwise.Compile(backend="eager")).eval()
        assert model(**tiny_batch(model))[CACHE] is not None
    assert count_compilation().graphs == 0


@pytest.mark.single
def test_dropout_under_tp_is_refused():
    with fake_mesh(MeshShape.parse("tp2")) as mesh, pytest.raises(UnsupportedError, match="one stream of random"):
        build(mesh, ("tp2", None, "none", False), shardwise.Compile(backend="eager"), dropout=0.1)


class Breaking(nn.Linear):
    def forward(self, x):
        torch._dynamo.graph_break()
        return super().forward(x)


@pytest.mark.single
def test_a_block_that_is_not_one_graph_is_an_error_that_names_the_line(forget):
    with fake_mesh(MeshShape.parse("tp1")) as mesh:
        model = tiny_model("llama")
        model.model.layers[1].mlp.up_proj.__class__ = Breaking
        model = shardwise.parallelize(model, mesh, compilation=shardwise.Compile(backend="eager")).train()
        with pytest.raises(torch._dynamo.exc.Unsupported, match=r"graph_break\(\)") as raised:
            model(**tiny_batch(model))
    assert "test_compiled.py" in str(raised.value)


class Graphs:
    """A backend that differentiates, keeps the graphs, and runs them as they are."""

    def __init__(self):
        self.found = []

    def __call__(self, module, inputs):
        from torch._dynamo.backends.common import aot_autograd
        from torch._inductor.decomposition import select_decomp_table

        def keep(graph, inputs):
            self.found.append(graph)
            return graph

        return aot_autograd(fw_compiler=keep, bw_compiler=keep, decompositions=select_decomp_table())(module, inputs)


def assert_found_by_inductor(graph, num):
    """There are so many gathers and scatters, each waited for once, and inductor can overlap them."""
    from torch._inductor.fx_passes import micro_pipeline_tp

    functional, targets = torch.ops._c10d_functional, [node.target for node in graph.nodes]
    assert targets.count(functional.all_gather_into_tensor.default) == num
    assert targets.count(functional.reduce_scatter_tensor.default) == num
    assert targets.count(functional.wait_tensor.default) == 2 * num
    assert len(micro_pipeline_tp.find_all_gather_patterns(graph)) == num
    assert len(micro_pipeline_tp.find_reduce_scatter_patterns(graph)) == num


@pytest.mark.single
@pytest.mark.skipif(not FULL_PRODUCT, reason="make coverage runs it; below is one pair of linears")
@pytest.mark.parametrize("rows", [1, 2])
def test_inductor_finds_the_gathers_and_scatters_of_a_block_which_are_waited_for_once(forget, rows):
    graphs = Graphs()
    with fake_mesh(MeshShape.parse("tp2")) as mesh:
        model = tiny_model("llama")
        batch = tiny_batch(model, rows=rows, length=12)
        compilation = shardwise.Compile(backend=graphs)
        model = shardwise.parallelize(model, mesh, sequence_parallel=True, compilation=compilation).train()
        model(**batch).loss.backward()
    for found in graphs.found:
        assert_found_by_inductor(found.graph, 2)
    assert len(graphs.found) == 2, "forward and backward"


@pytest.mark.single
@pytest.mark.parametrize("rows", [1, 2])
def test_inductor_finds_the_gathers_and_scatters_of_a_pair_of_linears(forget, rows):
    """They are views of a single row, and copies of several."""
    graphs = Graphs()
    with fake_mesh(MeshShape.parse("tp2")) as mesh:
        group, wide, narrow = mesh.group("tp"), nn.Linear(8, 16), nn.Linear(16, 8, bias=False)

        def region(x):
            joined = collectives.gather_to_region(x, group, dim=1)
            return collectives.scatter_from_region(narrow(torch.relu(wide(joined))), group, dim=1)

        x = torch.randn(rows, 6, 8, requires_grad=True)
        torch.compile(region, backend=graphs, fullgraph=True)(x).sum().backward()
    for found in graphs.found:
        assert_found_by_inductor(found.graph, 1)
    assert len(graphs.found) == 2, "forward and backward"


@pytest.mark.single
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "max-autotun"}, "did you mean 'max-autotune'"),
        ({"mode": "default", "options": {"max_autotune": True}}, "mode 'default' and options"),
    ],
)
def test_choices_that_make_no_sense_are_errors(options, message):
    with pytest.raises(ConfigError, match=message):
        shardwise.Compile(**options)
