"""A proof says what it did: what was not compared is no "ok", and outputs that are gone are a fault."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import shardwise
from shardwise.api.verifying import Proof
from shardwise.proof.parity import Report, measure
from shardwise.tiny.models import set_dropout
from tests.families import tiny_batch, tiny_model

pytestmark = pytest.mark.single


def without_logits(model, mesh):
    """A split that computes the same loss and gradients, and returns no logits."""
    model = shardwise.parallelize(model, mesh)

    def drop(module, args, output):
        return type(output)(loss=output.loss)

    model.register_forward_hook(drop)
    return model


def prove(split):
    whole = tiny_model("llama")
    with shardwise.Mesh.open("tp1", device="cpu") as mesh:
        return measure(
            whole,
            tiny_batch(whole),
            mesh,
            split=split,
            step=lambda model, mesh, batch: shardwise.TrainStep(model, mesh)(batch).loss,
            num_steps=3,
        )


def test_outputs_that_only_one_model_returns_are_a_fault():
    assert prove(shardwise.parallelize).passed
    found = prove(without_logits)
    assert not found.passed and "logits" in found.logits.name


def report_of(config, **options):
    proof = Proof(config=config, model_class=shardwise_class(config), layout="tp1", num_steps=3, **options)
    return str(proof.run())


def shardwise_class(config):
    return type(tiny_model(config.model_type))


@pytest.mark.spawn
def test_dropout_that_was_not_tried_is_not_said_to_be_equal():
    dropped = report_of(tiny_model("gpt2").config)
    assert "padding, dropout" in dropped and "draws" in dropped
    plain = report_of(tiny_model("gpt2").config, drops=False)
    assert "padding, dropout" not in plain
    (line,) = (line for line in plain.splitlines() if line.startswith("dropout"))
    assert "ok" not in line.split() and "not tried" in line


def test_integers_are_no_chances_to_drop():
    class Keeps(nn.Module):
        def __init__(self):
            super().__init__()
            self.num_dropped_tokens, self.drop_path = 4, 0.1
            self.dropout = nn.Dropout(0)

    module = Keeps()
    set_dropout(module, 0.2)
    assert (module.num_dropped_tokens, module.drop_path, module.dropout.p) == (4, 0.2, 0.2)


def test_a_report_without_outputs_says_that_none_were_compared():
    class Bare(nn.Module):
        def __init__(self):
            super().__init__()
            self.line = nn.Linear(4, 4)

        def forward(self, x):
            return {"loss": self.line(x).square().mean()}

    with shardwise.Mesh.open("tp1", device="cpu") as mesh:
        found = measure(
            Bare(),
            {"x": torch.ones(2, 4)},
            mesh,
            split=shardwise.parallelize,
            step=lambda model, mesh, batch: backward(model(**batch)["loss"]),
            num_steps=3,
        )
    report = str(Report(subject="a model", layout="tp1", measurements=(found,), seconds=1.0))
    (line,) = (line for line in report.splitlines() if line.startswith("logits"))
    assert "ok" not in line.split() and "not compared" in line


def backward(loss):
    loss.backward()
    return loss.detach()
