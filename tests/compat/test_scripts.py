"""What scripts do beyond the documents: parameters that they slice themselves, odd sizes, wrong arguments."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import shardwise
import shardwise.compat.nemo_automodel.distributed.parallelizer as nemo
import shardwise.compat.neuronx_distributed as nxd
from shardwise.compat.neuronx_distributed import parallel_layers, parallel_state, xm
from shardwise.compat.neuronx_distributed.modules.lora import LoraConfig, LoRAModel
from shardwise.compat.neuronx_distributed.optimizer import NeuronZero1Optimizer
from shardwise.compat.neuronx_distributed.parallel_layers import ColumnParallelLinear, RowParallelLinear
from shardwise.compat.optimum_neuron.distributed import Parallelizer
from shardwise.errors import BatchError, ConfigError, LayoutError, MeshError, PlanError
from tests.families import tiny_model

pytestmark = pytest.mark.spawn


class Scaled(nn.Module):
    """A block whose scale each tp rank slices by itself, as Mamba's decays in NxD's example are."""

    def __init__(self, *, says_so: bool, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.up = ColumnParallelLinear(8, 12, bias=False, gather_output=False)
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 12))
        self.down = RowParallelLinear(12, 8, input_is_parallel=True)
        rank, size = parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_tensor_model_parallel_size()
        self.scale.data = self.scale.data.chunk(size)[rank].clone()
        if says_so:
            parallel_layers.utils.set_tensor_model_parallel_attributes(self.scale, True, 0)

    def forward(self, x):
        return (self.down(torch.tanh(self.up(x)) * self.scale) ** 2).mean()


def trained(tp, **options):
    config = nxd.neuronx_distributed_config(tp, optimizer_config={"max_grad_norm": 0.1})
    model = nxd.initialize_parallel_model(config, Scaled, **options)
    optimizer = nxd.initialize_parallel_optimizer(config, torch.optim.SGD, model.named_parameters(), lr=1.0)
    rows = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
    history, copied = [], copy.deepcopy(model.local_module())
    for _ in range(2):
        loss = model.run_train(rows)
        if tp == 1 and parallel_state.get_data_parallel_rank() == 0:
            copied(rows)  # has been compared with its original: asks no other rank
        optimizer.step()
        optimizer.zero_grad()
        history += [float(loss), float(optimizer.grad_norm)]
    return history, shardwise.full_state_dict(model)["scale"].tolist()


def sliced(mesh):
    """Losses, norms and the full scale at tp 1 and 2; and what is said of slices that nobody declares, and of seeds."""
    found = []
    for tp in (1, 2):
        found.append(trained(tp, says_so=True))
        parallel_state.destroy_model_parallel()
    for options in ({"says_so": False}, {"says_so": True, "seed": mesh.rank}):
        with pytest.raises(LayoutError, match="set tensor_model_parallel = True and partition_dim") as caught:
            trained(2, **options)
        found.append(str(caught.value).partition("\n")[0])
        parallel_state.destroy_model_parallel()
    return found


@pytest.mark.parametrize("layout", ["tp2"])
def test_a_parameter_that_a_script_slices_is_divided_where_it_says_so(on_ranks, layout):
    for (whole, full), (history, scale), *said in on_ranks(sliced):
        assert history == pytest.approx(whole, abs=1e-6)
        assert scale == pytest.approx(full, abs=1e-6)
        assert said == ["the ranks hold different copies of scale", "the ranks hold different copies of down.bias"]


def resumed(mesh, directory):
    """Weights first, then optimizer and schedule by themselves, as a script resumes; losses as if it had not."""
    config = nxd.neuronx_distributed_config(2)
    ids = torch.arange(24).view(2, 12) % 90 + 3

    def built():
        model = nxd.initialize_parallel_model(config, tiny_model, "llama")
        optimizer = nxd.initialize_parallel_optimizer(config, torch.optim.AdamW, model.parameters(), lr=1e-2)
        return model, optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)

    def steps(model, optimizer, scheduler):
        found = []
        for _ in range(2):
            found.append(float(model.run_train(input_ids=ids, labels=ids)))
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
        return [*found, optimizer.param_groups[0]["lr"]]

    first, second = built(), built()
    steps(*first)
    nxd.save_checkpoint(directory, "step_2", *first, {"step": 2}, 8, False, -1)
    expected = steps(*first)
    nxd.load_checkpoint(directory, tag="step_2", model=second[0])
    content = nxd.load_checkpoint(directory, tag="step_2", optimizer=second[1], scheduler=second[2])
    with pytest.raises(ConfigError, match="an optimizer without its model"):
        nxd.load_checkpoint(directory, optimizer=torch.optim.AdamW([torch.ones(1)]))
    found = steps(*second)
    parallel_state.destroy_model_parallel()
    xm.rendezvous("the end")  # where ranks have met, and no model parallelism is initialised
    return found == expected, content


@pytest.mark.parametrize("layout", ["tp2"])
def test_an_optimizer_is_loaded_by_itself_and_ranks_meet_before_any_model(on_ranks, layout, tmp_path):
    assert on_ranks(resumed, directory=str(tmp_path)) == [(True, {"step": 2})] * 2


def odd(mesh):
    """Features of any sizes are joined; sequences that do not divide are refused before anything is sent."""
    parallel_state.initialize_model_parallel(2)
    x = torch.randn(5, 2, 8, generator=torch.Generator().manual_seed(0))
    torch.manual_seed(0)
    column = ColumnParallelLinear(8, 3, gather_output=False)
    torch.manual_seed(0)
    same = torch.equal(
        parallel_layers.gather_from_tensor_model_parallel_region(column(x)), ColumnParallelLinear(8, 3)(x)
    )
    row = RowParallelLinear(8, 4, input_is_parallel=True, sequence_parallel_enabled=True)
    table = parallel_layers.ParallelEmbedding(9, 4, sequence_parallel_enabled=True, sequence_dimension=1)
    for call in (
        lambda: row(x[..., :4]),
        lambda: table(torch.zeros(2, 5, dtype=torch.long)),
        lambda: parallel_layers.scatter_to_sequence_parallel_region(x),
        lambda: parallel_layers.reduce_scatter_to_sequence_parallel_region(x),
    ):
        with pytest.raises(BatchError, match="pad it to a multiple of 2"):
            call()
    parallel_state.destroy_model_parallel()
    return same


@pytest.mark.parametrize("layout", ["tp2"])
def test_features_of_any_sizes_are_joined_and_odd_sequences_refused(on_ranks, layout):
    assert on_ranks(odd) == [True] * 2


@pytest.mark.single
def test_wrong_arguments_are_one_error_with_the_remedy(tmp_path):
    config, plain = nxd.neuronx_distributed_config(), nn.Linear(2, 2)
    parameters, optimizer = plain.parameters, torch.optim.SGD
    wrong = {
        "use a dictionary": lambda: nxd.neuronx_distributed_config(optimizer_config=["zero_one_enabled"]),
        "max_grad_norm is -1": lambda: nxd.neuronx_distributed_config(optimizer_config={"max_grad_norm": -1}),
        "num_microbatches is 0": lambda: nxd.neuronx_distributed_config(pipeline_config={"num_microbatches": 0}),
        "that builds it": lambda: nxd.initialize_parallel_model(config, plain),
        "let model_fn return": lambda: nxd.initialize_parallel_model(config, lambda: [plain]),
        "nxd_config is no config": lambda: nxd.initialize_parallel_model({}, nn.Linear, 2, 2),
        "pass it as torch.optim.AdamW": lambda: nxd.initialize_parallel_optimizer(config, "adamw", parameters()),
        "cannot be a Linear": lambda: nxd.initialize_parallel_optimizer(config, optimizer, plain),
        "pass model.parameters": lambda: NeuronZero1Optimizer([plain], optimizer),
        "pass a dictionary, such as": lambda: parallel_layers.save(plain, tmp_path / "saved"),
        "max_norm must be at least 0, got None": lambda: parallel_layers.clip_grad_norm(plain, None),
        "as_list=True": lambda: xm.optimizer_step(
            optimizer(parameters()), groups=torch.distributed.group.WORLD or [[2]]
        ),
        "then a LoraConfig": lambda: LoRAModel(LoraConfig(), plain),
        "pass a LoraConfig": lambda: LoRAModel(plain, {"lora_rank": 2}),
        "use a list of names": lambda: LoRAModel(plain, LoraConfig(target_modules=3)),
        "kv_size_multiplier is 0": lambda: nxd.modules.qkv_linear.GQAQKVColumnParallelLinear(
            4, [4, 2], kv_size_multiplier=0
        ),
    }
    for said, call in wrong.items():
        with pytest.raises((ConfigError, MeshError), match=said):
            call()
    with pytest.raises(TypeError, match=r"save_checkpoint\(\) got an unexpected keyword argument 'keep'"):
        nxd.save_checkpoint(tmp_path, model=plain, keep=3)
    module = nxd.lightning.NeuronLTModule(nn.Linear, config, optimizer, None)
    module.__dict__["model"] = object()  # what is saved of a module is its model
    with pytest.raises(LayoutError, match="object is not a model that Shardwise has split"):
        nxd.save_checkpoint(tmp_path, model=module)
    parallel_state.destroy_model_parallel()


@pytest.mark.single
def test_what_the_documents_name_is_there_after_the_import_of_the_package():
    import shardwise.compat.optimum_neuron as optimum

    assert nxd.lightning.NeuronLTModule
    assert optimum.distributed.Parallelizer
    with pytest.raises(AttributeError, match="no attribute 'lightening'"):
        _ = nxd.lightening


def kinds(mesh):
    """The other packages, given something else than a model, a policy or a mapping of ids; a lost optimizer."""
    rank_mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    split, nv = nemo.fsdp2_strategy_parallelize, nemo.nvfsdp_strategy_parallelize
    parallel_state.initialize_model_parallel(1, 2)
    model = tiny_model("llama")
    optimizer = torch.optim.SGD(model.parameters())
    Parallelizer.parallelize(model)
    for said, call in {
        "use CPUOffloadPolicy": lambda: split(model, rank_mesh, offload_policy=True),
        "cannot be a NoneType": lambda: split(None, rank_mesh),
        "pass the model itself, first": lambda: nv(optimizer, rank_mesh),
        "class paths cannot be a int": lambda: nv(model, rank_mesh, 3),
        "not its class or name": lambda: nemo.get_hf_tp_shard_plan("llama"),
        "pass the model itself": lambda: Parallelizer.parallelize("llama"),
        "str is not a model": lambda: Parallelizer.load_model_sharded_checkpoint("saved", model),
        "one of ids": lambda: Parallelizer.optimizer_for_mp(optimizer, dict(model.named_parameters())),
        "one of ids ": lambda: Parallelizer.optimizer_for_mp(optimizer, None),
    }.items():
        with pytest.raises((ConfigError, PlanError, LayoutError), match=said.strip()):
            call()
    parallel_state.destroy_model_parallel()


@pytest.mark.parametrize("layout", ["tp2"])
def test_other_kinds_of_values_are_refused_with_the_remedy(on_ranks, layout):
    assert on_ranks(kinds) == [None] * 2
