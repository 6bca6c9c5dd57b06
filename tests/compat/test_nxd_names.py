"""Names and values that scripts, and the package's own tests, use although no document lists them."""

from __future__ import annotations

import pytest
import torch

import shardwise.compat.neuronx_distributed as nxd
from shardwise.compat.neuronx_distributed import parallel_layers, parallel_state
from shardwise.compat.neuronx_distributed.parallel_layers import grads, layers
from shardwise.compat.neuronx_distributed.trainer import optimizer as nxd_optimizer
from shardwise.compat.neuronx_distributed.utils import model_utils
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
        layer = kind(6, 8, bias=False, keep_master_weight=True)
        torch.manual_seed(0)
        whole = torch.nn.Linear(6, 8, bias=False).weight
        own = whole.chunk(2, dim)[parallel_state.get_tensor_model_parallel_rank()]
        wrong += [f"{kind.__name__} weight"] if not torch.equal(layer.weight, own) else []
        wrong += [f"{kind.__name__} master_weight"] if not torch.equal(layer.master_weight, whole) else []
        wrong += [f"{kind.__name__} keys"] if set(layer.state_dict()) != {"weight"} else []
        layer.weight.grad = torch.ones_like(layer.weight)
        norm = float(grads.get_grad_norm(layer.parameters()))
        wrong += [f"norm {norm}"] if abs(norm - whole.numel() ** 0.5) > 1e-4 or layer.weight.grad.min() < 1 else []
    layers.ParallelEmbedding(8, 4, use_cpu_initialization=True, tile_cc=False)
    x = torch.arange(8.0)
    part = parallel_layers.scatter_to_tensor_model_parallel_region(x)
    wrong += ["mappings"] if part.tolist() != x.chunk(2)[mesh.coord("tp")].tolist() else []
    wrong += ["sizes"] if parallel_state.get_tensor_model_parallel_world_size() != 2 else []
    parallel_layers.destroy_model_parallel()
    parallel_layers.initialize_model_parallel(1)
    wrong += ["move"] if model_utils.move_model_to_device is not parallel_layers.move_model_to_device else []
    parallel_layers.destroy_model_parallel()
    return wrong


@pytest.mark.parametrize("layout", ["tp2"])
def test_names_that_no_document_lists(on_ranks, layout):
    assert on_ranks(used) == [[], []]
