"""What a model is tried on: a copy of it on the CPU where it is small, whatever device it is on."""

import pytest
from torch import nn

from shardwise.probe.layer_order import find_layer_order
from shardwise.probe.trial import build_tried_model
from tests.families import tiny_model


@pytest.mark.single
def test_a_small_model_is_tried_on_the_cpu(monkeypatch):
    moved, model = [], tiny_model("llama")
    to = nn.Module.to
    monkeypatch.setattr(nn.Module, "to", lambda module, device: moved.append((module, device)) or to(module, device))
    tiny = build_tried_model(model)
    assert moved == [(tiny, "cpu")] and tiny is not model


@pytest.mark.device
def test_a_small_model_on_a_gpu_is_tried():
    model = tiny_model("llama").cuda()
    assert {value.device.type for value in build_tried_model(model).parameters()} == {"cpu"}
    assert find_layer_order(model).calls == ("model.layers.0", "model.layers.1")
    assert {value.device.type for value in model.parameters()} == {"cuda"}, "the model itself stays where it is"
