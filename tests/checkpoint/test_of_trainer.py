"""Checkpoints that plain Trainer has written, in one process and by accelerate under FSDP, go on in any layout."""

from __future__ import annotations

import functools
import json
import logging
import shutil
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import transformers
from accelerate.utils import fsdp_utils
from peft import LoraConfig, get_peft_model
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp.fully_sharded_data_parallel import StateDictType
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import shardwise
from shardwise.errors import ConfigError, LoadError
from shardwise.ranks.spawn import spawn

pytestmark = pytest.mark.spawn

STEPS, OPTIONS = 6, {"lr": 1e-2, "eps": 1e-6, "weight_decay": 0.1}
SIZES = {"vocab_size": 99, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True}
LAYOUTS = ("tp2", "fsdp2", "pp2")
KINDS = ("llama", "gpt2", "lora", "SHARDED_STATE_DICT", "FULL_STATE_DICT")
"""gpt2: norms that Trainer knows by their class. The last two are of llama, as accelerate writes them."""


def model_of(kind, place):
    torch.manual_seed(0)
    if kind == "gpt2":
        no_dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
        config = transformers.GPT2Config(
            vocab_size=99, n_embd=32, n_layer=2, n_head=4, n_positions=32, bos_token_id=1, eos_token_id=2, **no_dropout
        )
        return transformers.GPT2LMHeadModel(config)
    model = LlamaForCausalLM(LlamaConfig(**SIZES))
    if kind == "lora":
        model.save_pretrained(place / "base")
        return get_peft_model(model, LoraConfig(target_modules=["q_proj", "v_proj"], r=4, init_lora_weights=False))
    return model


def rows():
    ids = torch.randint(0, 99, (4 * STEPS, 16), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    labels[:, 0] = -100  # nobody predicts it, and Trainer counts it
    return [{"input_ids": row, "labels": label} for row, label in zip(ids, labels, strict=True)]


def batch_of(step, rank, size):
    own = rows()[4 * step : 4 * step + 4][rank * 4 // size : (rank + 1) * 4 // size]
    return {name: torch.stack([row[name] for row in own]) for name in own[0]}


def train_with_trainer(kind, place):
    """The losses and the parameters after 6 steps; `checkpoint-3` is in `place`."""
    arguments = TrainingArguments(
        output_dir=str(place),
        per_device_train_batch_size=4,
        max_steps=STEPS,
        save_steps=3,
        learning_rate=OPTIONS["lr"],
        adam_epsilon=OPTIONS["eps"],
        weight_decay=OPTIONS["weight_decay"],
        lr_scheduler_type="linear",
        train_sampling_strategy="sequential",
        logging_steps=1,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
    )
    trainer = Trainer(model_of(kind, place), arguments, train_dataset=rows())
    trainer.train()
    losses = [record["loss"] for record in trainer.state.log_history if "loss" in record]
    return losses, {name: value.detach().clone() for name, value in trainer.model.named_parameters()}


def save_as_accelerate(place):
    """Trains 3 steps with FSDP2, and saves in both formats by accelerate's own functions."""
    fsdp_utils.logger = logging.getLogger(__name__)  # accelerate's needs an Accelerator
    model, rank = model_of("llama", place), dist.get_rank()
    for layer in (*model.model.layers, model):
        fully_shard(layer)
    decayed = set(Trainer.get_decay_parameter_names(None, model))
    named = [*model.named_parameters()]
    groups = [{"params": [each for name, each in named if name in decayed]}]
    groups += [{"params": [each for name, each in named if name not in decayed], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, **OPTIONS)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, falling)
    for number in range(3):
        model(**batch_of(number, rank, 2)).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    for kind in KINDS[-2:]:
        directory = place / kind / "checkpoint-3"
        settings = SimpleNamespace(offload_to_cpu=True, rank0_only=kind == "FULL_STATE_DICT")
        plugin = SimpleNamespace(fsdp_version=2, state_dict_type=StateDictType[kind], state_dict_config=settings)
        plugin.optim_state_dict_config = None
        for save, given in (
            (fsdp_utils.save_fsdp_optimizer, (optimizer, model)),
            (fsdp_utils.save_fsdp_model, (model,)),
        ):
            save(plugin, SimpleNamespace(process_index=rank, num_processes=2), *given, str(directory))
        if rank == 0:
            (directory / "trainer_state.json").write_text(json.dumps({"global_step": 3, "epoch": 0.5}))
            torch.save(scheduler.state_dict(), directory / "scheduler.pt")
            model.config.save_pretrained(directory)
        dist.barrier()


def falling(step):
    return (STEPS - step) / STEPS


def go_on(kind, place, layout, *, is_torchs):
    """Trains the last 3 steps; returns losses and parameters."""
    directory = place / "checkpoint-3"
    with shardwise.Mesh.open(layout) as mesh:
        adapted = {"adapter": directory} if kind == "lora" else {}
        model = shardwise.load(place / "base" if adapted else directory, mesh, **adapted).train()
        decay = lambda name, value: {"weight_decay": 0.0} if value.ndim == 1 else {}  # noqa: E731
        if is_torchs:
            parameters = dict(model.named_parameters())
            groups = [
                {"params": [each], **decay(name, each)} for name, each in parameters.items() if each.requires_grad
            ]
            optimizer = torch.optim.AdamW(groups, **OPTIONS)
        else:
            optimizer = shardwise.build_optimizer(model, torch.optim.AdamW, groups=decay, **OPTIONS)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, falling)
        extra = shardwise.load_checkpoint(directory, optimizer=optimizer, scheduler=scheduler)
        step = shardwise.TrainStep(model, mesh, num_microbatches=mesh.size("pp"))
        losses = []
        for number in range(extra["step"], STEPS):
            losses.append(float(step(batch_of(number, mesh.data_rank, mesh.data_size)).loss))
            shardwise.clip_grad_norm_(model, 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        return losses, shardwise.full_state_dict(model)


def refuse(place):
    """What is no checkpoint for this model or optimizer."""
    directory = place / "llama" / "checkpoint-3"
    with shardwise.Mesh.open("tp2") as mesh:
        model = shardwise.load(directory, mesh)
        build = functools.partial(shardwise.build_optimizer, model)
        with pytest.raises(ConfigError, match="load its weights with shardwise.load"):
            shardwise.load_checkpoint(directory, model=model, optimizer=build(torch.optim.AdamW))
        with pytest.raises(LoadError, match="was no SGD"):
            shardwise.load_checkpoint(directory, optimizer=build(torch.optim.SGD))
        model.get_input_embeddings().requires_grad_(False)
        with pytest.raises(LoadError, match="is of 20 parameters, and the model trains 19"):
            shardwise.load_checkpoint(directory, optimizer=build(torch.optim.AdamW))


def load_parts(place):
    """Only the schedule, with an optimizer of one group; with frozen parts on another stage; without a schedule."""
    directory = place / "llama" / "checkpoint-3"
    with shardwise.Mesh.open("pp2") as mesh:
        model = shardwise.load(directory, mesh)
        optimizer = shardwise.build_optimizer(model, torch.optim.AdamW, **OPTIONS)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, falling)
        shardwise.load_checkpoint(directory, scheduler=scheduler)
        assert scheduler.last_epoch == 3
        model = shardwise.load(directory, mesh)
        for name, value in model.named_parameters():
            value.requires_grad_("layers.0." in name)  # of the first stage alone
        optimizer = shardwise.build_optimizer(model, torch.optim.AdamW, **OPTIONS)
        with pytest.raises(LoadError, match="is of 20 parameters, and the model trains 9"):
            shardwise.load_checkpoint(directory, optimizer=optimizer)
        alone = place / "alone"
        if mesh.rank == 0:
            shutil.copytree(directory, alone)
            (alone / "scheduler.pt").unlink()
        dist.barrier()
        with pytest.raises(LoadError, match="scheduler.pt cannot be read"):
            shardwise.load_checkpoint(alone, scheduler=scheduler)
        ours = place / "ours"
        shardwise.save_checkpoint(ours, model=model, step=1, extra={"mine": 7})
        if mesh.rank == 0:
            shutil.copy(directory / "trainer_state.json", ours)
        dist.barrier()
        assert shardwise.load_checkpoint(ours, model=model) == {"mine": 7, "step": 1}


def on_two_ranks(place):
    with shardwise.Mesh.open("tp2"):
        save_as_accelerate(place)
    refuse(place)
    load_parts(place)
    found = {}
    for kind in KINDS:
        if kind == "FULL_STATE_DICT":  # accelerate saves pickled weights there, and Trainer these
            with shardwise.Mesh.open("tp2") as mesh:
                if mesh.rank == 0:
                    shutil.copy(place / "llama" / "checkpoint-3" / "model.safetensors", place / kind / "checkpoint-3")
                dist.barrier()
        for layout in LAYOUTS:
            found[kind, layout] = go_on(kind, place / kind, layout, is_torchs=layout == "fsdp2")
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """Losses and parameters of Trainer, and those of the ranks that go on."""
    place: Path = tmp_path_factory.mktemp("trainer")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT asks transformers by old names
        expected = {kind: train_with_trainer(kind, place / kind) for kind in KINDS[:3]}
    return expected, spawn(on_two_ranks, 2, place)[0]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", KINDS)
def test_training_goes_on_from_a_checkpoint_of_trainer(found, kind, layout):
    losses, parameters = found[0].get(kind, found[0]["llama"])
    ours, state = found[1][kind, layout]
    torch.testing.assert_close(ours, losses[3:], atol=1e-5, rtol=0)
    for name, value in parameters.items():
        torch.testing.assert_close(state[name], value, atol=1e-5, rtol=0, msg=name)
