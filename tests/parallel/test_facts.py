"""What is read of a model is the same in every process, in the same order: ranks compare it as text."""

from __future__ import annotations

import pytest
import torch
import transformers
from torch import nn
from transformers.pytorch_utils import Conv1D

from shardwise.parallel import facts
from shardwise.plan.structure import outermost_layers

pytestmark = pytest.mark.single


def test_facts_do_not_depend_on_the_order_of_a_set(monkeypatch):
    with torch.device("meta"):
        config = transformers.LlamaConfig(num_hidden_layers=2, vocab_size=301)
        model = transformers.AutoModelForCausalLM.from_config(config)
    names, told = facts.names_read, []
    for order in (sorted, lambda read: sorted(read, reverse=True)):  # as two hash seeds may have it
        monkeypatch.setattr(facts, "names_read", lambda cls, order=order: order(names(cls)))
        told.append(repr(facts.read_facts(model)))
    assert "config.num_hidden_layers" in told[0]
    assert told[0] == told[1]


OPERATIONS = {
    "linear": lambda: nn.Linear(8, 8),
    "transposed": lambda: Conv1D(8, 8),
    "embedding": lambda: nn.Embedding(9, 8),
    "conv": lambda: nn.Conv1d(8, 8, 3),
    "norm": lambda: nn.LayerNorm(8),
    "dict": lambda: nn.ModuleDict({"up": nn.Linear(8, 8)}),
}


class Layer(nn.Module):
    def __init__(self, part):
        super().__init__()
        self.part = part


@pytest.mark.parametrize("operation", OPERATIONS.values(), ids=OPERATIONS.keys())
def test_a_list_of_single_operations_holds_no_layers(operation):
    assert facts.read_facts(Layer(nn.ModuleList([operation(), operation()]))).stacks == ()


def test_layers_that_share_all_their_weights_are_layers():
    shared = nn.Linear(8, 8)
    (stack,) = facts.read_facts(Layer(nn.ModuleList([Layer(shared), Layer(shared), Layer(nn.LayerNorm(8))]))).stacks
    assert stack.items == ("part.0", "part.1"), "what holds no matrix is none"


def test_what_is_in_a_list_inside_of_a_layer_is_in_that_layer():
    stages = nn.ModuleList([Layer(nn.ModuleList([Layer(nn.Linear(8, 8))])), Layer(nn.Linear(8, 8))])
    found = facts.read_facts(Layer(stages))
    assert outermost_layers(found.stacks) == ("part.0", "part.1")
    assert found.layer_of("part.0.part.0.part.weight") == found.layer_of("part.0") == "part.0"
    assert found.layer_of("part") is None


def stacks_of(class_name, **values):
    """Of a transformers model on the meta device: FQN to (number of layers, the layer around)."""
    model_class = getattr(transformers, class_name)
    with torch.device("meta"):
        model = model_class(model_class.config_class(**values))
    found = facts.read_facts(model).stacks
    return {stack.fqn: (len(stack.items), stack.within) for stack in found}


TWO = {"num_hidden_layers": 2}
CASES = {
    # of its lists of embeddings and heads none
    "MusicgenForCausalLM": (TWO, {"model.decoder.layers": (2, "")}),
    "BartModel": ({"encoder_layers": 2, "decoder_layers": 3}, {"encoder.layers": (2, ""), "decoder.layers": (3, "")}),
    # what a layer of it consists of is a list again
    "T5Model": (
        {"num_layers": 1, "num_decoder_layers": 1},
        {
            "encoder.block": (1, ""),
            "encoder.block.0.layer": (2, "encoder.block.0"),
            "decoder.block": (1, ""),
            "decoder.block.0.layer": (3, "decoder.block.0"),
        },
    ),
    "JambaModel": (
        {"num_hidden_layers": 4, "attn_layer_offset": 1, "attn_layer_period": 2, "num_experts": 2},
        {"layers": (4, "")},
    ),
    # one layer, run again and again
    "AlbertModel": (
        TWO,
        {
            "encoder.albert_layer_groups": (1, ""),
            "encoder.albert_layer_groups.0.albert_layers": (1, "encoder.albert_layer_groups.0"),
        },
    ),
    "SwinModel": (
        {"depths": [2, 1], "num_heads": [3, 6]},
        {
            "encoder.layers": (2, ""),
            "encoder.layers.0.blocks": (2, "encoder.layers.0"),
            "encoder.layers.1.blocks": (1, "encoder.layers.1"),
        },
    ),
    "DebertaModel": (TWO, {"encoder.layer": (2, "")}),
    # a list of lists
    "FunnelModel": (
        {"block_sizes": [2, 1], "num_decoder_layers": 1},
        {"encoder.blocks.0": (2, ""), "encoder.blocks.1": (1, ""), "decoder.layers": (1, "")},
    ),
    # its norms are lists, too
    "XLMModel": ({"n_layers": 2}, {"attentions": (2, ""), "ffns": (2, "")}),
}


@pytest.mark.parametrize("class_name", CASES)
def test_stacks_of_layers_are_read_off_the_tree(class_name):
    values, expected = CASES[class_name]
    assert stacks_of(class_name, **values) == expected
