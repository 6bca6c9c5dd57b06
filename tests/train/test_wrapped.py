"""Parameters are found by identity: models inside of other modules train, and parameters that came in later have a
defined answer.
"""

from __future__ import annotations

import copy

import peft
import pytest
import torch
from torch.nn.utils import prune

import shardwise
from shardwise.errors import UnsupportedError
from tests.families import rows_of, tiny_batch, tiny_model
from tests.oracle import differing, differing_gradients

# peft reads what transformers has renamed.
pytestmark = [pytest.mark.spawn, pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")]

ADAM = {"lr": 1e-3, "eps": 1e-4}


class WithValue(torch.nn.Module):
    """A model and a head of one's own on its hidden states, as for reinforcement learning."""

    def __init__(self, model):
        super().__init__()
        self.held = model
        torch.manual_seed(3)
        self.value = torch.nn.Linear(model.config.hidden_size, 1)

    def forward(self, **batch):
        output = self.held(**batch, output_hidden_states=True)
        return output.loss + self.value(output.hidden_states[-1]).square().mean()


def scaled_layers(model):
    """A parameter of one's own in every layer, on what it puts out."""
    for layer in model.model.layers:
        layer.scale = torch.nn.Parameter(torch.linspace(0.5, 1.5, model.config.hidden_size))

        def scale(layer, args, output):
            return (output[0] * layer.scale, *output[1:]) if isinstance(output, tuple) else output * layer.scale

        torch.nn.Module.register_forward_hook(layer, scale)  # also where it is given a part of the sequence
    return model


def with_lora(model):
    torch.manual_seed(4)
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    return peft.get_peft_model(model, config)


def pruned(model):
    prune.l1_unstructured(model.model.layers[0].self_attn.q_proj, "weight", 0.5)
    return model


def loss_of(model, batch):
    output = model(**batch)
    return output if isinstance(output, torch.Tensor) else output.loss


def train(mesh, layout, change):
    """What differs from the unsplit model, changed in the same way, after three steps of a hand-written loop."""
    full = tiny_model("llama", num_hidden_layers=1, num_key_value_heads=1)
    split = shardwise.parallelize(copy.deepcopy(full), mesh, sequence_parallel=layout.endswith("+sp"))
    full, split = (globals()[change](model) for model in (full, split))
    batch = tiny_batch(full.held if change == "WithValue" else full, rows=4)
    batch["labels"] = batch["input_ids"].clone()
    theirs = torch.optim.AdamW([each for each in full.parameters() if each.requires_grad], **ADAM)
    ours = shardwise.build_optimizer(split, torch.optim.AdamW, **ADAM)
    problems = []
    for _ in range(3):
        loss_of(full, batch).backward()
        loss_of(split, rows_of(batch, mesh)).backward()
        expected = {name: value.grad for name, value in full.named_parameters() if value.grad is not None}
        problems += differing_gradients(shardwise.full_gradients(split), expected)
        norms = torch.nn.utils.clip_grad_norm_(full.parameters(), 0.5), shardwise.clip_grad_norm_(split, 0.5)
        problems += differing("norm", norms[1], norms[0], 1e-5 * float(norms[0]))
        for optimizer in (theirs, ours):
            optimizer.step()
            optimizer.zero_grad()
    found = shardwise.full_state_dict(split)
    for name, value in full.state_dict().items():
        problems += differing(name, found[name], value, 2e-5)
    split.load_state_dict(full.state_dict())
    loaded = shardwise.full_state_dict(split)
    return problems + [name for name, value in full.state_dict().items() if not torch.equal(loaded[name], value)]


CASES = [
    *((layout, "WithValue") for layout in ("tp2", "tp2+sp", "fsdp2", "fsdp2.tp2")),
    *((layout, "scaled_layers") for layout in ("tp2", "tp2+sp", "fsdp2.tp2")),
    ("fsdp2", "with_lora"),
]


@pytest.mark.parametrize(("layout", "change"), CASES)
def test_models_that_were_changed_after_the_split_train_as_unsplit_ones(on_ranks, layout, change):
    assert not any(on_ranks(train, layout=layout.removesuffix("+sp")))


def refuse_change(mesh, change):
    model = shardwise.parallelize(tiny_model("llama", num_hidden_layers=1), mesh)
    wrapped = with_lora(model) if change == "with_lora" else pruned(model)
    with pytest.raises(UnsupportedError) as raised:
        shardwise.build_optimizer(wrapped, torch.optim.AdamW)
    return str(raised.value)


@pytest.mark.parametrize("change", ["with_lora", "pruned"])
@pytest.mark.parametrize("layout", ["tp2"])
def test_what_is_trained_in_place_of_split_parameters_is_refused(on_ranks, layout, change):
    for text in on_ranks(refuse_change):
        assert "model.layers.0.self_attn.q_proj" in text and "which came into the model after it was split" in text


def step_with_a_stranger(mesh):
    model = shardwise.parallelize(tiny_model("llama", num_hidden_layers=1), mesh)
    stranger = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([*model.parameters(), stranger], lr=0.1)
    (model(**tiny_batch(model)).loss + stranger.sum()).backward()
    with pytest.raises(UnsupportedError, match=r"not part of the split model: shapes \(3,\)"):
        optimizer.step()


@pytest.mark.parametrize("layout", ["fsdp2"])
def test_parameters_that_nobody_averages_are_refused(on_ranks, layout):
    on_ranks(step_with_a_stranger)
