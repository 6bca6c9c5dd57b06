"""NxD's training functions: the sample of its document end to end, and hand-written models through the same."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import shardwise
import shardwise.compat.neuronx_distributed as nxd
from shardwise.compat.neuronx_distributed import parallel_state
from shardwise.compat.neuronx_distributed.parallel_layers import ColumnParallelLinear
from shardwise.errors import ConfigError, MeshError, ShardwiseError
from tests.compat.test_parallel_layers import Block, Model, full_state
from tests.families import tiny_model
from tests.oracle import differing

pytestmark = pytest.mark.spawn

ZERO = {"zero_one_enabled": True, "grad_clipping": True, "max_grad_norm": 0.5}


def rows_of_rank(ids):
    return ids.chunk(parallel_state.get_data_parallel_size())[parallel_state.get_data_parallel_rank()]


def batches():
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(3, 96, (4, 12), generator=generator) for _ in range(10)]


def expected_history(whole, loss_of, steps, optimizer_class):
    """Losses and norms of the unsplit model, clipped at 0.5, and its weights."""
    optimizer, history = optimizer_class(whole.parameters(), lr=1e-3), []
    for ids in steps:
        loss = loss_of(whole, ids)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(whole.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        history.append((float(loss.detach()), float(norm)))
    return history


def sample(mesh, directory):
    """The document's sample: config, model, optimizer with ZeRO-1; three steps, save; three more at other degrees."""
    whole = tiny_model("llama").train()
    expected = expected_history(
        copy.deepcopy(whole), lambda model, ids: model(input_ids=ids, labels=ids).loss, batches()[:6], torch.optim.AdamW
    )
    found, contents = [], []
    for tp, steps in ((2, slice(0, 3)), (4, slice(3, 6))):
        nxd_config = nxd.neuronx_distributed_config(
            tensor_parallel_size=tp,
            optimizer_config=ZERO,
            sequence_parallel=tp == 4,
            activation_checkpoint_config="full" if tp == 2 else None,
        )
        model = nxd.initialize_parallel_model(nxd_config, tiny_model, "llama", seed=0 if tp == 2 else 1)
        optimizer = nxd.initialize_parallel_optimizer(nxd_config, torch.optim.AdamW, model.parameters(), lr=1e-3)
        scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)
        if tp == 4:
            contents.append(nxd.load_checkpoint(directory, 5, model=model, optimizer=optimizer, scheduler=scheduler))
        for ids in batches()[steps]:
            rows = rows_of_rank(ids)
            loss = model.run_train(input_ids=rows, labels=rows)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            found.append((float(loss), float(optimizer.grad_norm)))
        if tp == 2:
            nxd.save_checkpoint(
                directory,
                tag=5,  # as scripts that count do
                nxd_config=nxd_config,
                model=model,
                optimizer=optimizer,
                scheduler=scheduler,
                user_content={"total_steps": 3},
                num_kept_ckpts=1,
            )
        names = [name for name, _ in model.named_parameters()]
        contents.append(
            (names == [name for name, _ in whole.named_parameters()], str(model.dtype), model.config.model_type)
        )
        parallel_state.destroy_model_parallel()
    return [
        problem
        for step, (mine, theirs) in enumerate(zip(found, expected, strict=True))
        for problem in differing(f"step {step}", torch.tensor(mine), torch.tensor(theirs), 5e-5)
    ], contents


@pytest.mark.parametrize("layout", ["tp4"])
def test_the_documents_sample_continues_at_other_degrees(on_ranks, layout, tmp_path):
    known = (True, "torch.float32", "llama")
    for problems, contents in on_ranks(sample, directory=str(tmp_path)):
        assert problems == []
        assert contents == [known, {"total_steps": 3}, known]


def by_hand(mesh, tp, zero, recomputed, directory):
    """A model with parallel layers: three steps, saved, loaded at other degrees."""
    torch.manual_seed(0)
    whole = Model(False, fused=True, copies=1)
    state, steps = full_state(whole, fused=True), [ids % 37 for ids in batches()[:3]]
    expected = expected_history(
        copy.deepcopy(whole), lambda model, ids: model(ids, ids.roll(-1, 1)), steps, torch.optim.SGD
    )

    def build():
        tp = parallel_state.get_tensor_parallel_size()
        model = Model(True, fused=True, copies=max(1, tp // 2))
        model.load_state_dict(state)
        return model

    options = {"optimizer_config": {"zero_one_enabled": zero, "max_grad_norm": 0.5}}
    nxd_config = nxd.neuronx_distributed_config(
        tp, activation_checkpoint_config=Block if recomputed else None, **options
    )
    model = nxd.initialize_parallel_model(nxd_config, build)
    optimizer = nxd.initialize_parallel_optimizer(nxd_config, torch.optim.SGD, model.parameters(), lr=1e-3)
    norms = []
    for ids in steps:
        rows = rows_of_rank(ids)
        model.run_train(rows, rows.roll(-1, 1))
        optimizer.step()
        optimizer.zero_grad()
        norms.append(float(optimizer.grad_norm))
    trained = shardwise.full_state_dict(model)
    nxd.save_checkpoint(directory, "last", model=model, optimizer=optimizer)
    parallel_state.destroy_model_parallel()
    nxd_config = nxd.neuronx_distributed_config(4 // tp, **options)
    again = nxd.initialize_parallel_model(nxd_config, build)
    nxd.load_checkpoint(directory, "last", model=again)
    loaded = shardwise.full_state_dict(again)
    parallel_state.destroy_model_parallel()
    problems = differing("norms", torch.tensor(norms), torch.tensor([norm for _, norm in expected]), 1e-4)
    return problems + [name for name in trained if not torch.equal(trained[name], loaded[name])]


@pytest.mark.parametrize("layout", ["tp4"])
@pytest.mark.parametrize(("tp", "zero", "recomputed"), [(2, True, True), (4, False, False)])
def test_hand_written_models_and_their_checkpoints(on_ranks, layout, tp, zero, recomputed, tmp_path):
    assert on_ranks(by_hand, directory=str(tmp_path)) == [[]] * 4


def halve(module):
    for each in module.parameters(recurse=False):
        nn.init.constant_(each, 0.5)


def with_parallel_head():
    """A model of transformers whose head a script has replaced by a parallel layer."""
    model = type(tiny_model("llama"))(tiny_model("llama").config)
    model.lm_head = ColumnParallelLinear(64, 96, bias=False, gather_output=True)
    return model


def refusals(mesh):
    found = {}
    for name, call in {
        "key": lambda: nxd.neuronx_distributed_config(optimizer_config={"zero_one_enable": True}),
        "pipeline key": lambda: nxd.neuronx_distributed_config(pipeline_config={"num_microbatch": 2}),
        "factor": lambda: nxd.neuronx_distributed_config(model_init_config={"sequential_move_factor": 0}),
    }.items():
        try:
            call()
        except ConfigError as error:
            found[name] = str(error)
    given = {"max_grad_norm": 2.0}
    config = nxd.neuronx_distributed_config(2, optimizer_config=given)
    found["config"] = (given, config["optimizer_config"], config["model_init_config"]["sequential_move_factor"])
    try:
        nxd.neuronx_distributed_config(1)
    except MeshError as error:
        found["sizes"] = str(error)
    for name, call in {
        "checkpointing": lambda: nxd.initialize_parallel_model(
            nxd.neuronx_distributed_config(2, activation_checkpoint_config="ful"), tiny_model, "llama"
        ),
        "class": lambda: nxd.initialize_parallel_model(
            nxd.neuronx_distributed_config(2, activation_checkpoint_config=nn.Conv2d(1, 1, 1)), tiny_model, "llama"
        ),
        "lora": lambda: nxd.initialize_parallel_model(
            nxd.neuronx_distributed_config(2, lora_config=object()), tiny_model, "llama"
        ),
        "no model": lambda: nxd.save_checkpoint("x"),
        "no parameters": lambda: nxd.initialize_parallel_optimizer(config, torch.optim.SGD, [], lr=0.1),
        "nothing saved": lambda: nxd.load_checkpoint("/nowhere/at/all"),
    }.items():
        try:
            call()
        except ShardwiseError as error:
            found[name] = str(error)
    options = {"meta_device_init": True, "param_init_fn": halve}
    filled = nxd.initialize_parallel_model(
        nxd.neuronx_distributed_config(2, model_init_config=options),
        lambda: type(tiny_model("llama"))(tiny_model("llama").config),
    )
    found["filled"] = {float(value) for each in filled.parameters() for value in each.detach().unique()}
    found["buffers"] = torch.equal(*(each.model.rotary_emb.inv_freq for each in (filled, tiny_model("llama"))))
    meta = nxd.neuronx_distributed_config(2, model_init_config={"meta_device_init": True, "sequential_move_factor": 1})
    torch.manual_seed(0)
    model = nxd.initialize_parallel_model(meta, lambda: type(tiny_model("llama"))(tiny_model("llama").config))
    found["meta"] = all(not each.is_meta for each in model.parameters())
    replaced = nxd.initialize_parallel_model(meta, with_parallel_head)
    head = replaced.lm_head.weight.detach()
    found["replaced"] = tuple(head.shape), float(head.std()) > 0
    try:
        model.run_train(torch.ones(1, 3, dtype=torch.long))
    except ShardwiseError as error:
        found["no loss"] = str(error)
    found["eval"] = tuple(model.run_eval({"input_ids": torch.ones(1, 3, dtype=torch.long)}).logits.shape)
    parallel_state.destroy_model_parallel()
    return found


@pytest.mark.parametrize("layout", ["tp2"])
def test_what_is_refused_and_the_small_print(on_ranks, layout):
    first, second = on_ranks(refusals)
    assert first == second
    assert first["config"][0] == {"max_grad_norm": 2.0}, "the user's dictionary stays as it is"
    assert first["config"][1:] == ({"zero_one_enabled": False, "grad_clipping": True, "max_grad_norm": 2.0}, 11)
    assert first["replaced"] == ((48, 64), True)
    assert first["meta"] and first["eval"] == (1, 3, 96)
    assert first["filled"] == {0.5} and first["buffers"]
    expected = {
        "key": "did you mean 'zero_one_enabled'?",
        "pipeline key": "did you mean 'num_microbatches'?",
        "checkpointing": "has no ful",
        "factor": "sequential_move_factor is 0",
        "sizes": "tensor_parallel_size 1 and pipeline_parallel_size 1 on tp2",
        "class": "has no Conv2d",
        "lora": "lora_config",
        "no model": "nothing to save",
        "no parameters": "no parameter that is trained",
        "nothing saved": "/nowhere/at/all",
        "no loss": "which is no loss",
    }
    for name, part in expected.items():
        assert part in first[name], (name, first[name])
