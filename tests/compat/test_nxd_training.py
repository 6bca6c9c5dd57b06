"""NxD's pipelines, adapters, sharded optimizer and Lightning classes, beside the unsplit model."""

from __future__ import annotations

import copy
import functools
from pathlib import Path

import pytest
import torch
from torch import nn

import shardwise
import shardwise.compat.neuronx_distributed as nxd
from shardwise.compat.neuronx_distributed import parallel_state
from shardwise.compat.neuronx_distributed.modules.lora import LoraConfig, LoRAModel
from shardwise.compat.neuronx_distributed.optimizer import NeuronZero1Optimizer
from shardwise.compat.neuronx_distributed.parallel_layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    move_model_to_device,
)
from shardwise.compat.neuronx_distributed.pipeline import NxDPPModel
from shardwise.errors import ShardwiseError
from tests.compat.test_trainer import batches, rows_of_rank
from tests.families import tiny_model
from tests.oracle import differing

pytestmark = pytest.mark.spawn

CLIPPED = {"max_grad_norm": 0.5}


def train(model, optimizer, steps):
    history = []
    for ids in steps:
        rows = rows_of_rank(ids)
        loss = model.run_train(input_ids=rows, labels=rows)
        optimizer.step()
        optimizer.zero_grad()
        history += [float(loss), float(optimizer.grad_norm)]
    return history


def train_unsplit(model, steps, groups=None):
    parameters = [each for each in model.parameters() if each.requires_grad]
    optimizer, history = torch.optim.SGD(groups or parameters, lr=1e-2), []
    for ids in steps:
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        history += [float(loss.detach()), float(nn.utils.clip_grad_norm_(parameters, 0.5))]
        optimizer.step()
        optimizer.zero_grad()
    return history


def adapters(mesh, base, merged, biases, parts, directory):
    """Three steps at tp2, saved; loaded at tp4 by the config. `base` and `merged` are the three modes."""
    directory = f"{directory}/{base}-{merged}"
    options = {"lora_rank": 4, "lora_alpha": 8, "bias": biases, "target_modules": ["q_proj", "up"]}
    config = LoraConfig(
        enable_lora=True, save_lora_base=base, merge_lora=merged, save_lora_config_adapter=base, **options
    )
    build = functools.partial(tiny_model, "qwen2" if biases == "lora_only" else "llama")
    torch.manual_seed(0)
    whole = LoRAModel(build().train(), config)
    expected = train_unsplit(whole.train(), batches()[:3])
    nxd_config = nxd.neuronx_distributed_config(
        2, optimizer_config=CLIPPED, lora_config=config, sequence_parallel=parts
    )
    torch.manual_seed(0)
    model = nxd.initialize_parallel_model(nxd_config, build)
    optimizer = nxd.initialize_parallel_optimizer(nxd_config, torch.optim.SGD, model.parameters(), lr=1e-2)
    problems = differing("history", torch.tensor(train(model, optimizer, batches()[:3])), torch.tensor(expected), 1e-4)
    nxd.save_checkpoint(directory, "last", model=model, optimizer=optimizer, user_content={"steps": 3})
    trained = shardwise.full_state_dict(model.local_module())
    wanted = {name: value.detach() for name, value in whole.named_parameters()}
    problems += [problem for name, value in wanted.items() for problem in differing(name, trained[name], value, 1e-4)]
    parallel_state.destroy_model_parallel()
    again = LoraConfig(load_lora_from_ckpt=True, lora_save_dir=directory, lora_load_tag="last")
    nxd_config = nxd.neuronx_distributed_config(4, lora_config=again)
    torch.manual_seed(1)
    model = nxd.initialize_parallel_model(nxd_config, build)
    loaded = shardwise.full_state_dict(model.local_module())
    content = nxd.load_checkpoint(directory, "last", model=model)
    parallel_state.destroy_model_parallel()
    problems += [name for name in trained if not torch.equal(trained[name], loaded[name])]
    found = {str(path.relative_to(directory).parent) for path in Path(directory).rglob("adapter_config.json")}
    found |= {str(path.relative_to(directory).parent) for path in Path(directory).rglob("model.safetensors")}
    return problems, content, found


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore:.*is_gradient_checkpointing:FutureWarning")  # peft's
@pytest.mark.parametrize("layout", ["tp4"])
@pytest.mark.parametrize(
    ("base", "merged", "biases", "parts"),
    [(False, False, "lora_only", False), (True, False, "none", True), (True, True, "all", False)],
)
def test_adapters_train_and_are_saved_in_three_modes(on_ranks, layout, base, merged, biases, parts, tmp_path):
    written = {"last/merged"} if merged else {"last/base", "last/base/adapter"} if base else {"lora_adapter"}
    written |= {"last"}  # what the checkpoint itself knows of its adapter
    for problems, content, found in on_ranks(adapters, directory=str(tmp_path), timeout=300.0):
        assert problems == [] and content == {"steps": 3} and found == written


def adapters_in_stages(mesh):
    """Three steps of adapters in two stages, and of the unsplit model."""
    config = LoraConfig(enable_lora=True, lora_rank=4, lora_alpha=8, target_modules=["q_proj", "up"])
    torch.manual_seed(0)
    whole = LoRAModel(tiny_model("llama").train(), config)
    expected = train_unsplit(whole.train(), batches()[:3])
    nxd_config = nxd.neuronx_distributed_config(
        pipeline_parallel_size=2, pipeline_config={"num_microbatches": 2}, optimizer_config=CLIPPED, lora_config=config
    )
    torch.manual_seed(0)
    model = nxd.initialize_parallel_model(nxd_config, tiny_model, "llama")
    optimizer = nxd.initialize_parallel_optimizer(nxd_config, torch.optim.SGD, model.parameters(), lr=1e-2)
    found = train(model, optimizer, batches()[:3])
    parallel_state.destroy_model_parallel()
    return differing("history", torch.tensor(found), torch.tensor(expected), 1e-4)


@pytest.mark.filterwarnings("ignore::UserWarning")  # peft's
@pytest.mark.parametrize("layout", ["pp2"])
def test_adapters_train_in_stages(on_ranks, layout):
    assert on_ranks(adapters_in_stages) == [[], []]


def by_name(model):
    """Groups: the embedding, which the head shares, learns faster."""
    named = list(model.named_parameters(prefix="own"))
    embedding = [value for name, value in named if name == "own.model.embed_tokens.weight"]
    return [{"params": embedding, "lr": 0.1}, {"params": [p for _, p in named if all(p is not e for e in embedding)]}]


def groups_in_stages(mesh):
    """Three steps of a tied model in two stages, each of which groups the copy that it has."""
    whole = tiny_model("llama", tied=True).train()
    expected = train_unsplit(whole, batches()[:3], by_name(whole))
    nxd_config = nxd.neuronx_distributed_config(pipeline_parallel_size=2, optimizer_config=CLIPPED)
    model = nxd.initialize_parallel_model(nxd_config, tiny_model, "llama", tied=True)
    optimizer = nxd.initialize_parallel_optimizer(nxd_config, torch.optim.SGD, by_name(model), lr=1e-2)
    found, state = train(model, optimizer, batches()[:3]), shardwise.full_state_dict(model.local_module())
    parallel_state.destroy_model_parallel()
    problems = differing("history", torch.tensor(found), torch.tensor(expected), 1e-4)
    return problems + [p for n, v in whole.named_parameters() for p in differing(n, state[n], v.detach(), 1e-4)]


@pytest.mark.parametrize("layout", ["tp2"])
def test_stages_group_a_tied_parameter_by_the_name_that_the_unsplit_model_gives_it(on_ranks, layout):
    assert on_ranks(groups_in_stages) == [[], []]


class Small(nn.Module):
    def __init__(self, *, parallel):
        super().__init__()
        self.up = ColumnParallelLinear(8, 12, gather_output=False) if parallel else nn.Linear(8, 12)
        self.down = RowParallelLinear(12, 4, input_is_parallel=True) if parallel else nn.Linear(12, 4)
        self.norm = nn.LayerNorm(4)

    def forward(self, x):
        return self.norm(self.down(torch.relu(self.up(x)))).pow(3).mean()


def zero1(mesh, directory):
    """The guide's groups and a schedule; saved after three steps, loaded into new objects, three more."""
    torch.manual_seed(0)
    whole = Small(parallel=False)
    start = copy.deepcopy(whole.state_dict())
    xs = torch.randn(6, 4, 8)
    optimizer = torch.optim.AdamW(whole.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.7)
    expected, found, held, said, before = [], [], [], "", {}
    for x in xs:
        whole(x).backward()
        expected.append(float(nn.utils.clip_grad_norm_(whole.parameters(), 0.5)))
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    for steps in (slice(0, 3), slice(3, 6)):
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
        model = Small(parallel=True)
        model.load_state_dict(start)
        move_model_to_device(model, "cpu")
        named = list(model.named_parameters())
        groups = [
            {"params": [p for n, p in named if "norm" not in n], "weight_decay": 0.01},
            {"params": [p for n, p in named if "norm" in n], "weight_decay": 0.01},
        ]
        optimizer = NeuronZero1Optimizer(
            groups,
            torch.optim.AdamW,
            lr=1e-2,
            max_norm=0.5,
            pin_layout=False,
            sharding_groups=parallel_state.get_data_parallel_group(as_list=True),
            grad_norm_groups=parallel_state.get_tensor_model_parallel_group(as_list=True),
        )
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.7)
        if steps.start:
            optimizer.load_sharded_state_dict(directory)
            schedule.load_state_dict(before)
        for x in xs[steps]:
            model(rows_of_rank(x)).backward()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            found.append(float(optimizer.grad_norm))
        held.append(len(optimizer.optimizer.optim.state))
        start, before = shardwise.full_state_dict(model), schedule.state_dict()
        if not steps.start:
            optimizer.save_sharded_state_dict(directory)
            try:
                nxd.save_checkpoint(directory, model=model, optimizer=optimizer)
            except ShardwiseError as error:
                said = str(error)
        parallel_state.destroy_model_parallel()
    problems = differing("norms", torch.tensor(found), torch.tensor(expected), 1e-4)
    problems += [p for n, v in whole.state_dict().items() for p in differing(n, start[n], v, 1e-4)]
    return problems, held, said


@pytest.mark.parametrize("layout", ["tp4"])
def test_states_of_the_zero1_optimizer_are_sharded_and_saved_by_name(on_ranks, layout, tmp_path):
    ranks = on_ranks(zero1, directory=str(tmp_path))
    for problems, held, said in ranks:
        assert problems == []
        assert all(number < 6 for number in held), "no rank has the states of all six parameters"
        assert "spread over data ranks" in said
    assert ranks[0][1][0] + ranks[2][1][0] == 6, "both data ranks have them all"
    names = {path.name for path in Path(tmp_path).glob("optim.*")}
    assert names == {f"optim.dp_rank_{dp:02d}.tp_rank_{tp:02d}_pp_rank_00" for dp in (0, 1) for tp in (0, 1)}


def pipelines(mesh):
    """What a pipeline's config says wrongly, and what its model is on each rank."""
    said = {}
    config = functools.partial(nxd.neuronx_distributed_config, pipeline_parallel_size=2)
    wrong = {
        "cut": {"pipeline_cuts": ["model.layer.0"]},
        "last": {"pipeline_cuts": ["model.layers.1"]},
        "number": {"pipeline_cuts": ["model.layers.0"], "virtual_pipeline_size": 2},
        "key": {"num_microbatch": 2},
    }
    for name, pipeline_config in wrong.items():
        try:
            nxd.initialize_parallel_model(config(pipeline_config=pipeline_config), tiny_model, "llama")
        except ShardwiseError as error:
            said[name] = str(error)
    whole = tiny_model("llama")
    model = NxDPPModel(tiny_model("llama"), auto_partition=True, num_microbatches=2)
    ids = batches()[0]
    logits = model.eval().run_eval(input_ids=ids).logits
    problems = differing("logits", logits, whole(input_ids=ids).logits.detach(), 1e-4)
    names = [name for name, _ in model.local_named_parameters()]
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name == "model.norm.weight")  # the first stage has nothing to train
    optimizer = nxd.initialize_parallel_optimizer(model.nxd_config, torch.optim.SGD, model.parameters(), lr=0.1)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.full_like(parameter, 2.0)
    optimizer.step()
    norm = float(optimizer.grad_norm) - 2.0 * whole.model.norm.weight.numel() ** 0.5
    parallel_state.destroy_model_parallel()
    return said, problems, set(names) < {name for name, _ in whole.named_parameters()} and abs(norm) < 1e-4


@pytest.mark.parametrize("layout", ["tp2"])
def test_pipelines_say_what_is_wrong(on_ranks, layout):
    first, second = on_ranks(pipelines)
    assert first == second
    said, problems, is_part = first
    assert problems == [] and is_part
    for name, part in {
        "cut": "did you mean 'model.layers.0'?",
        "last": "the last layer",
        "number": "stages",
        "key": "did you mean 'num_microbatches'?",
    }.items():
        assert part in said[name], said[name]


def adapters_refused(mesh):
    said = []
    model = tiny_model("llama")
    for call in (
        lambda: LoraConfig(bias="lora"),
        lambda: LoraConfig(init_lora_weights="gausian"),
        lambda: LoraConfig(merge_lora=True),
        lambda: LoRAModel(model, LoraConfig(target_modules=["q_prj"])),
    ):
        try:
            call()
        except ShardwiseError as error:
            said.append(str(error).splitlines()[0])
    return said


@pytest.mark.parametrize("layout", ["tp1"])
def test_adapters_say_what_is_wrong(on_ranks, layout):
    ((*said,),) = on_ranks(adapters_refused)
    parts = ["'lora'", "did you mean 'gaussian'?", "without save_lora_base", "did you mean 'q_proj'?"]
    assert len(said) == len(parts) and all(part in text for part, text in zip(parts, said, strict=True)), said


def lightning(mesh, manual, accumulate):
    """A NeuronLTModule by NeuronXLAStrategy: losses, and full weights."""
    from shardwise.compat.neuronx_distributed.lightning import NeuronLTModule, NeuronXLAStrategy
    from tests.lightning.modules import ADAM, loader, small_model, trainer

    class Module(NeuronLTModule):
        losses: list[float]

        def training_step(self, batch, batch_idx):
            batch.pop("row")
            batch["labels"] = batch["input_ids"]
            loss = super().training_step(batch, batch_idx)
            self.losses = [*getattr(self, "losses", []), float(loss.detach())]
            return loss

    nxd_config = nxd.neuronx_distributed_config(2, optimizer_config={"zero_one_enabled": True, "max_grad_norm": 0.2})
    options = {} if manual else {"accumulate_grad_batches": accumulate}
    module = Module(
        small_model,
        nxd_config,
        torch.optim.AdamW,
        None,
        opt_kwargs=ADAM,
        grad_accum_steps=accumulate,
        manual_opt=manual,
    )
    strategy = NeuronXLAStrategy(nxd_config)
    trainer("fsdp2.tp2", strategy=strategy, devices=4, max_steps=3, **options).fit(module, loader(2))
    state = shardwise.full_state_dict(module.local_model)
    parallel_state.destroy_model_parallel()
    return module.losses, state, str(strategy.shape)


@functools.cache
def lightning_unsplit(accumulate):
    from tests.lightning.modules import ADAM, small_model, unsplit_batch

    model, losses = small_model().train(), []
    optimizer = torch.optim.AdamW(model.parameters(), **ADAM)
    for number in range(3 * accumulate):
        ids = unsplit_batch(number)["input_ids"]
        loss = model(input_ids=ids, labels=ids).loss
        (loss / accumulate).backward()
        losses.append(float(loss.detach()))
        if number % accumulate == accumulate - 1:
            nn.utils.clip_grad_norm_(model.parameters(), 0.2)
            optimizer.step()
            optimizer.zero_grad()
    return losses, {name: value.detach() for name, value in model.named_parameters()}


@pytest.mark.parametrize("layout", ["tp4"])
@pytest.mark.parametrize(("manual", "accumulate"), [(True, 2), (False, 1)])
def test_lightnings_classes_train_as_the_unsplit_model(on_ranks, layout, manual, accumulate):
    expected, wanted = lightning_unsplit(accumulate)
    for losses, state, shape in on_ranks(lightning, timeout=300.0):
        assert losses == pytest.approx(expected, abs=1e-4) and shape == "fsdp2.tp2"
        assert [problem for name in state for problem in differing(name, state[name], wanted[name], 1e-4)] == []
