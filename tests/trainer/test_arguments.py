"""What adapted Trainers take, and what they refuse."""

from __future__ import annotations

import pytest
import torch
import transformers
from torch import nn

import shardwise
from shardwise.errors import ConfigError, UnsupportedError
from shardwise.trainer import Trainer, adapt
from tests.trainer.modules import CONFIGS, Rows, arguments, build, curve

pytestmark = pytest.mark.spawn


class Compared(transformers.Trainer):
    """Takes a reference model before the arguments, as TRL's DPOTrainer does."""

    def __init__(self, model=None, reference=None, args=None, **options):
        super().__init__(model, args, **options)
        self.reference = reference


@pytest.mark.single
@pytest.mark.parametrize("layout", [None, "tp1"])
def test_arguments_by_name_may_follow_others(tmp_path, layout):
    run = adapt(Compared)(build("llama"), args=arguments(tmp_path), layout=layout)
    assert run.reference is None and run.args.output_dir == str(tmp_path)


def fresh_model():
    return transformers.AutoModelForCausalLM.from_config(CONFIGS["llama"]())


@pytest.mark.single
def test_models_of_model_init_are_split(tmp_path):
    """Each training starts with a fresh model, and deals rows by the seed of its arguments."""
    curves = []
    for kind, options in ((transformers.Trainer, {}), (Trainer, {"layout": "tp1"})):
        run = kind(
            args=arguments(tmp_path, max_steps=3), train_dataset=Rows("llama", 8), model_init=fresh_model, **options
        )
        for seed in (42, 1):
            run.args.seed = seed
            run.train()
            curves.append([pytest.approx(each, rel=1e-5) for each in curve(run)])
    assert [each.expected for each in curves[2]] == curves[0] != [each.expected for each in curves[3]] == curves[1]
    with pytest.raises(ConfigError, match="a split model that is not the first argument"):
        Trainer(args=run.args, model_init=lambda: shardwise.parallelize(build("llama"), run._mesh))


class Wrapped(transformers.Trainer):
    """Passes on whatever it is given, as many subclasses do."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)


@pytest.mark.single
def test_arguments_are_seen_through_a_subclass(tmp_path):
    with pytest.raises(UnsupportedError, match="use_liger_kernel=True"):
        adapt(Wrapped)(build("llama"), arguments(tmp_path, use_liger_kernel=True), layout="tp1")


class Scorer(nn.Module):
    """A model without a config."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(10, 3)

    def forward(self, input_ids, labels=None):
        logits = self.linear(input_ids.float())
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def train_scorer(mesh, directory):
    model = shardwise.parallelize(Scorer(), mesh)
    run = Trainer(model, arguments(directory, mesh.data_size, max_steps=4), train_dataset=Rows("bert", 8))
    run.train()
    return curve(run)


@pytest.mark.parametrize("layout", ["fsdp2"])
def test_models_without_a_config_are_trained(on_ranks, tmp_path, layout):
    alone = transformers.Trainer(Scorer(), arguments(tmp_path, max_steps=4), train_dataset=Rows("bert", 8))
    alone.train()
    for found in on_ranks(train_scorer, directory=str(tmp_path)):
        assert [each for pair in found for each in pair] == pytest.approx(
            [each for pair in curve(alone) for each in pair], rel=1e-5
        )
