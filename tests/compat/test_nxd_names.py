"""Names and values that scripts, and the package's own tests, use although no document lists them."""

from __future__ import annotations

import copy
import functools

import pytest
import torch

import shardwise.compat.neuronx_distributed as nxd
from shardwise.comm.agree import run_in_turns
from shardwise.compat.neuronx_distributed import parallel_layers, parallel_state
from shardwise.compat.neuronx_distributed.modules.qkv_linear import GQAQKVColumnParallelLinear
from shardwise.compat.neuronx_distributed.optimizer import NeuronZero1Optimizer
from shardwise.compat.neuronx_distributed.parallel_layers import grads, layers
from shardwise.compat.neuronx_distributed.trainer import optimizer as nxd_optimizer
from tests.families import tiny_model

pytestmark = pytest.mark.spawn


def used(mesh):
    """What is not as the package has it, by name."""
    wrong = []
    nxd_config = nxd.neuronx_distributed_config(2, optimizer_config={"zero_one_enabled": True})
    wrong += ["pipeline_config"] if nxd_config["pipeline_config"] is not None else []
    masters = {"use_master_weights": True, "use_fp32_grad_acc": True, "use_master_weights_in_ckpt": False}
    wrong += ["mixed_precision_config"] if nxd_config["mixed_precision_config"] != masters else []
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
        build = functools.partial(kind, 6, 8, bias=False, keep_master_weight=True)
        layer = run_in_turns(build, mesh.group(), turn=mesh.rank, num_turns=2, doing="building")  # one rank at a time
        torch.manual_seed(0)
        whole = torch.nn.Linear(6, 8, bias=False).weight
        own = whole.chunk(2, dim)[parallel_state.get_tensor_model_parallel_rank()]
        wrong += [f"{kind.__name__} weight"] if not torch.equal(layer.weight, own) else []
        wrong += [f"{kind.__name__} master_weight"] if not torch.equal(layer.master_weight, whole) else []
        wrong += [f"{kind.__name__} keys"] if set(layer.state_dict()) != {"weight"} else []
        layer.weight.grad = torch.ones_like(layer.weight)
        norm = float(grads.get_grad_norm(layer.parameters()))
        wrong += [f"norm {norm}"] if abs(norm - whole.numel() ** 0.5) > 1e-4 or layer.weight.grad.min() < 1 else []
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
    grouped = GQAQKVColumnParallelLinear(
        6, [8, 2], gather_output=False, kv_size_multiplier=2, num_heads=1, fuse_qkv=False, keep_master_weight=True
    )
    wrong += ["master_weight_q"] if tuple(grouped.master_weight_q.shape) != (8, 6) else []
    wrong += ["master_weight_k"] if not torch.equal(grouped.master_weight_k, grouped.weight_k) else []
    layers.ParallelEmbedding(8, 4, use_cpu_initialization=True, tile_cc=False)
    x = torch.arange(8.0)
    part = parallel_layers.scatter_to_tensor_model_parallel_region(x)
    wrong += ["mappings"] if part.tolist() != x.chunk(2)[mesh.coord("tp")].tolist() else []
    wrong += ["sizes"] if parallel_state.get_tensor_model_parallel_world_size() != 2 else []
    wrong += called(mesh, nxd_config, model, optimizer)
    parallel_layers.destroy_model_parallel()
    parallel_layers.initialize_model_parallel(1)
    wrong += sharded()
    parallel_layers.destroy_model_parallel()
    return wrong


def called(mesh, nxd_config, model, optimizer):
    """What the scripts beside the package call, by name where it is otherwise."""
    wrong = ["init_zero"] if optimizer.optimizer.init_zero() is not None or len(optimizer.params) == 0 else []
    wrong += ["has_checkpoint"] if nxd.has_checkpoint("nowhere") else []
    built = []
    with_buffers = nxd.initialize_parallel_model(
        nxd_config, lambda size: built.append(size) or torch.nn.Linear(size, 2), True, 3
    )
    wrong += ["include_buffers"] if built != [3] or with_buffers.local_module().in_features != 3 else []
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
