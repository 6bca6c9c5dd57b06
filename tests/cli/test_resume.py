"""`shardwise train` goes on where it was ended, as if it had never been."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
import yaml
from safetensors.torch import load_file

from shardwise.cli.training import train
from shardwise.errors import ConfigError, LoadError
from shardwise.ranks.spawn import spawn
from tests.cli.forked import run_forked  # noqa: F401 - a fixture
from tests.cli.test_train import config_of, tree  # noqa: F401 - a fixture

pytestmark = pytest.mark.spawn

SAME = ("step", "loss", "lr", "grad_norm", "tokens", "eval_loss")


@pytest.fixture
def run(tree, tmp_path):  # noqa: F811
    """A run with dropout, evaluation and checkpoints."""
    model = {**tree["model"], "config": {**tree["model"]["config"], "attention_dropout": 0.2}}
    checkpoint = {"dir": str(tmp_path / "checkpoints"), "every": 2, "async_save": True}
    evaluation = {"path": str(tmp_path / "corpus"), "every": 3, "max_batches": 1}
    return {**tree, "model": model, "checkpoint": checkpoint, "evaluation": evaluation, "steps": 7}


def with_values(run, directory, **values):
    """The run with logs and checkpoints of its own."""
    places = {
        "log": {**run["log"], "dir": f"{directory}/logs", "tensorboard": True},
        "checkpoint": {**run["checkpoint"], "dir": f"{directory}/checkpoints"},
        "export": f"{directory}/model",
    }
    return {**run, **places, **values}


def train_rank(run):
    return train(config_of(run))


def lines_of(run):
    lines = (Path(run["log"]["dir"]) / "train.jsonl").read_text().splitlines()
    return [{key: value for key, value in json.loads(line).items() if key in SAME} for line in lines]


def test_a_run_that_was_ended_goes_on_as_if_it_had_not_been(run, tmp_path, run_forked, capfd):  # noqa: F811
    whole = with_values(run, tmp_path / "whole")
    spawn(train_rank, 2, whole)
    ended = with_values(run, tmp_path / "ended")
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(ended))
    log = Path(ended["log"]["dir"]) / "train.jsonl"
    code = run_forked(tmp_path / "run.yaml", log=log, at_first_step=lambda _: os.kill(os.getpid(), signal.SIGUSR1))
    assert code == 128 + signal.SIGUSR1
    assert "continues from there" in capfd.readouterr().out
    done = len(lines_of(ended))
    assert 1 <= done < 7
    with log.open("a") as file:
        file.write('{"step": 99, "loss": 1}\n{"step')  # what a crash might have left
    spawn(train_rank, 2, ended)
    assert lines_of(ended) == lines_of(whole)
    first, second = (load_file(Path(each["export"]) / "model.safetensors") for each in (whole, ended))
    assert all((first[name] == value).all() for name, value in second.items())
    assert len(list((Path(ended["log"]["dir"]) / "tensorboard").iterdir())) == 1
    (crashed := Path(ended["checkpoint"]["dir"]) / f".step-6.{0:032x}.partial").mkdir()
    train(config_of({**ended, "layout": "tp1", "sequence_parallel": False}))  # what is there already is no obstacle
    assert ": step 7 is done, nothing is left to train" in capfd.readouterr().out
    assert lines_of(ended) == lines_of(whole)
    assert not crashed.exists()


def test_another_layout_is_welcome_and_another_run_is_refused(run, tmp_path):
    first = with_values(run, tmp_path / "first", steps=4)
    first["optimizer"] = {"lr": 0.01, "schedule": {"name": "constant"}}
    spawn(train_rank, 2, first)
    other = {**first, "layout": "tp1", "sequence_parallel": False, "steps": 6}
    train(config_of(other))
    assert [line["step"] for line in lines_of(other)] == [1, 2, 3, 4, 5, 6]
    for changed, says in [
        ({"optimizer": {**first["optimizer"], "name": "SGD"}}, "optimizer.name: was 'AdamW', is 'SGD'"),
        ({"seed": 1}, "data.dropout seed: was 0, is 1"),
        ({"model": {**run["model"], "config": {**run["model"]["config"], "rms_norm_eps": 0.1}}}, "model.rms_norm_eps"),
        ({"batch_size": 8}, "batch_size was 4, is 8"),
    ]:
        with pytest.raises((ConfigError, LoadError), match=says):
            train(config_of({**other, "steps": 8, **changed}))
    fresh = {**other, "checkpoint": {**other["checkpoint"], "resume": "never"}, "export": None, "seed": 1, "steps": 2}
    before = sorted(path.name for path in Path(fresh["checkpoint"]["dir"]).iterdir())
    with pytest.raises(ConfigError, match=r"holds checkpoints of another run: step-4, step-6[\s\S]*another directory"):
        train(config_of(fresh))
    assert sorted(path.name for path in Path(fresh["checkpoint"]["dir"]).iterdir()) == before
    fresh["checkpoint"]["dir"] = str(tmp_path / "empty")
    train(config_of(fresh))
    assert [line["step"] for line in lines_of(fresh)] == [1, 2]
