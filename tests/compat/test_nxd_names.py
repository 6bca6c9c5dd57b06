"""Names and values that scripts, and the package's own tests, use although no document lists them."""

from __future__ import annotations

import copy
import functools

import pytest
import torch

import shardwise.compat.neuronx_distributed as nxd
from shardwise.comm.agree import run_serially
from shardwise.compat.neuronx_distributed import parallel_layers, parallel_state
from shardwise.compat.neuronx_distributed.modules.qkv_linear import GQAQKVColumnParallelLinear
from shardwise.compat.neuronx_distributed.optimizer import NeuronZero1Optimizer
from shardwise.compat.neuronx_distributed.parallel_layers import layers
from shardwise.compat.neuronx_distributed.trainer import optimizer as nxd_optimizer
from tests.families import tiny_model

pytestmark = pytest.mark.spawn


def used(mesh):
    """What is not as the package has it, by name."""
    wrong = []
    nxd_config = nxd.neuronx_distributed_config(2, optimizer_config={"zero_one_enabled": True})
    wrong += ["pipeline_config"] if nxd_config["pipeline_config"] is not None else []
    model = nxd.initialize_parallel_model(nxd_config, tiny_model, "llama")
    optimizer = nxd.initialize_parallel_optimizer(nxd_config, torch.optim.AdamW, model.parameters(), lr=1e-3)
    wrong += ["NxDModel"] if model.pp_enabled or model.nxd_config != nxd_config else []
    wrong += ["NxDOptimizer"] if not isinstance(optimizer, nxd_optimizer.NxDOptimizer) else []
    wrong += ["nxd_config"] if optimizer.nxd_config != nxd_config or optimizer.grad_norm is not None else []
    loaded = model.load_state_dict(model.state_dict())
    wrong += ["load_state_dict"] if loaded.missing_keys or loaded.unexpected_keys else []
    wrong += [name for name in model.state_dict(prefix="model.") if not name.startswith("model.")]
    parts = {name: value.clone() for name, value in model.local_state_dict().items()}
    with torch.no_grad():
        for value in model.parameters():
            value.zero_()
    model.load_state_dict(parts)  # by rank, as parallel_layers.save and load do
    wrong += [name for name, value in model.state_dict().items() if not torch.equal(value, parts[name])]
    for kind, dim in ((layers.ColumnParallelLinear, 0), (layers.RowParallelLinear, 1)):
        torch.manual_seed(0)
        build = functools.partial(kind, 6, 8, bias=False)
        layer = run_serially(build, mesh.group(), turn=mesh.rank, num_turns=2, doing="building")  # one rank at a time
        torch.manual_seed(0)
        whole = torch.nn.Linear(6, 8, bias=False).weight
        own = whole.chunk(2, dim)[parallel_state.get_tensor_model_parallel_rank()]
        wrong += [f"{kind.__name__} weight"] if not torch.equal(layer.weight, own) else []
        wrong += [f"{kind.__name__} keys"] if set(layer.state_dict()) != {"weight"} else []
    for kept in (
        layers.ColumnParallelLinear(6, 8),
        layers.ParallelEmbedding(8, 4, 2),
        GQAQKVColumnParallelLinear(6, [8, 4], fuse_qkv=False),
    ):
        torch.manual_seed(0)
        kept.reset_parameters()
        before = [each.detach().clone() for each in kept.parameters()]
        with torch.no_grad():
            [each.fill_(7.0) for each in kept.parameters()]
        torch.manual_seed(0)
        kept.reset_parameters()
        same = all(map(torch.equal, before, kept.parameters()))
        wrong += [f"{type(kept).__name__} started again"] if not same else []
    x = torch.arange(8.0)
    part = parallel_layers.scatter_to_tensor_model_parallel_region(x)
    wrong += ["mappings"] if part.tolist() != x.chunk(2)[mesh.coord("tp")].tolist() else []
    wrong += ["has_checkpoint"] if nxd.has_checkpoint("nowhere") else []
    wrong += ["sizes"] if parallel_state.get_tensor_model_parallel_world_size() != 2 else []
    parallel_layers.destroy_model_parallel()
    parallel_layers.initialize_model_parallel(1)
    wrong += sharded()
    parallel_layers.destroy_model_parallel()
    return wrong


def sharded():
    """`NeuronZero1Optimizer` as the package's test uses it, over two data ranks."""
    parameter = torch.nn.Parameter(torch.ones(4))
    other = torch.nn.Parameter(torch.ones(4))
    optimizer = NeuronZero1Optimizer([parameter, other], torch.optim.SGD, lr=0.1, momentum=0.9, grad_clipping=False)
    parameter.grad, other.grad = torch.ones(4), torch.ones(4)
    optimizer.step()
    wrong = ["base_optimizer"] if not isinstance(optimizer.base_optimizer, torch.optim.SGD) else []
    state = copy.deepcopy(optimizer.state_dict())
    state["param_groups"][0]["lr"] = 0.3
    optimizer.load_state_dict(state)
    optimizer.step()
    moved = [1 - 0.1 - 0.3 * 1.9] * 4
    close = torch.allclose(parameter, torch.tensor(moved)) and torch.allclose(other, torch.tensor(moved))
    return wrong if close else [*wrong, f"{parameter.tolist()} after loading"]


@pytest.mark.parametrize("layout", ["tp2"])
def test_names_that_no_document_lists(on_ranks, layout):
    assert on_ranks(used) == [[], []]
