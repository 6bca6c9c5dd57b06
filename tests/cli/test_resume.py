"""`shardwise train` goes on where it was ended, as if it had never been."""

from __future__ import annotations

import importlib
import json
import os
import signal
from pathlib import Path
from typing import ClassVar

import pytest
import torch
import yaml
from accelerate import tracking
from accelerate.tracking import GeneralTracker, on_main_process
from safetensors.torch import load_file

import shardwise
from shardwise.checkpoint.trainer_files import trained_names
from shardwise.cli import training
from shardwise.cli.models import make_optimizer
from shardwise.cli.run_checkpoints import check_saved
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


def write_as_trainer(run):
    """Writes what Trainer would have saved beside the weights that a run has exported."""
    with shardwise.Mesh.open("tp1") as mesh:
        model = shardwise.load(run["export"], mesh)
        parameters = dict(model.named_parameters())
        groups = [{"params": [parameters[name] for name in group]} for group in trained_names(model)]
        optimizer = torch.optim.AdamW(groups)
        extra = shardwise.load_checkpoint(run["checkpoint"]["dir"], model=model, optimizer=optimizer)
        torch.save(optimizer.state_dict(), f"{run['export']}/optimizer.pt")
    state = {"global_step": extra["step"], "epoch": 0.1}
    Path(run["export"], "trainer_state.json").write_text(json.dumps(state))


def test_a_run_goes_on_from_the_optimizer_of_trainer(run, tree, tmp_path):  # noqa: F811
    run = {**run, "model": tree["model"], "optimizer": {"lr": 0.01, "schedule": {"name": "constant"}}}
    whole, part = (with_values(run, tmp_path / name, steps=steps) for name, steps in (("whole", 5), ("part", 3)))
    for each in (whole, part):
        spawn(train_rank, 2, each)
    write_as_trainer(part)
    state = f"{part['log']['dir']}/data_state.json"
    own = {"model": {"path": part["export"]}, "data": {**run["data"], "state": state}, "steps": 5}
    later = with_values(run, tmp_path / "later", **own, optimizer={**run["optimizer"], "state": part["export"]})
    spawn(train_rank, 2, later)
    assert [line["step"] for line in lines_of(later)] == [4, 5]
    for found, expected in zip(lines_of(later), lines_of(whole)[3:], strict=True):
        assert found["loss"] == pytest.approx(expected["loss"], abs=1e-5) and found["lr"] == expected["lr"]
    weights = (load_file(f"{each['export']}/model.safetensors") for each in (later, whole))
    torch.testing.assert_close(*weights, atol=1e-5, rtol=0)


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


def train_on_a_disk_of_its_own(run):
    if os.environ["RANK"] == "1":
        is_dir = Path.is_dir
        Path.is_dir = lambda path: path.parent.name != "ended" and "checkpoints" not in path.parts and is_dir(path)
    with pytest.raises(LoadError, match="rank 1 does not see the checkpoint's directory"):
        train(config_of(run))


def test_a_disk_that_is_not_shared_is_an_error_before_the_first_step(run, tmp_path):
    spawn(train_on_a_disk_of_its_own, 2, with_values(run, tmp_path / "ended"))
    assert not (tmp_path / "ended" / "logs" / "train.jsonl").exists()


def test_another_layout_is_welcome_and_another_run_is_refused(run, tmp_path):
    first = with_values(run, tmp_path / "first", steps=4)
    first["optimizer"] = {"lr": 0.01, "schedule": {"name": "constant"}}
    spawn(train_rank, 2, first)
    other = {**first, "layout": "tp1", "sequence_parallel": False, "steps": 6}
    train(config_of(other))
    assert [line["step"] for line in lines_of(other)] == [1, 2, 3, 4, 5, 6]
    for changed, says in [
        ({"optimizer": {**first["optimizer"], "name": "SGD"}}, "optimizer.name: was 'AdamW', is 'SGD'"),
        ({"seed": 1}, "seed: was 0, is 1"),
        ({"model": {**run["model"], "config": {**run["model"]["config"], "rms_norm_eps": 0.1}}}, "model.rms_norm_eps"),
        ({"batch_size": 8}, "batch_size: was 4, is 8"),
    ]:
        with pytest.raises((ConfigError, LoadError), match=says):
            train(config_of({**other, "steps": 8, **changed}))
        if "model" not in changed:
            with pytest.raises(ConfigError, match=says):  # before the data is read
                check_saved(config_of({**other, "steps": 8, **changed}))
    check_saved(config_of({**other, "steps": 8}))
    fresh = {**other, "checkpoint": {**other["checkpoint"], "resume": "never"}, "export": None, "seed": 1, "steps": 2}
    before = sorted(path.name for path in Path(fresh["checkpoint"]["dir"]).iterdir())
    with pytest.raises(ConfigError, match=r"holds checkpoints of another run: step-4, step-6[\s\S]*another directory"):
        train(config_of(fresh))
    assert sorted(path.name for path in Path(fresh["checkpoint"]["dir"]).iterdir()) == before
    fresh["checkpoint"]["dir"] = str(tmp_path / "empty")
    train(config_of(fresh))
    assert [line["step"] for line in lines_of(fresh)] == [1, 2]


def test_a_run_goes_on_with_what_may_change(run, tmp_path, capfd):
    plain = {**run, "layout": "tp1", "sequence_parallel": False, "export": None, "evaluation": {}}
    first = with_values(plain, tmp_path / "first", steps=2, export=None)
    first["optimizer"] = {"lr": 0.01, "weight_decay": 0.1, "schedule": {"name": "constant"}}
    train(config_of(first))
    optimizer = {**first["optimizer"], "lr": 0.002, "weight_decay": 0.0}
    other = {**first, "steps": 3, "optimizer": optimizer, "batch_size": 8}
    with pytest.raises(ConfigError, match=r"checkpoint.change=\[optimizer.lr, optimizer.weight_decay, batch_size\]"):
        train(config_of(other))
    other["checkpoint"] = {**first["checkpoint"], "change": ["optimizer", "batch_size"]}
    made = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training, "make_optimizer", lambda *args: made.append(make_optimizer(*args)) or made[-1])
        train(config_of(other))
    out = capfd.readouterr().out
    assert "change  optimizer.lr: was 0.01, is 0.002" in out and "change  steps: was 2, is 3" in out
    assert [line["lr"] for line in lines_of(other)] == [0.01, 0.01, 0.002]
    assert made[0].param_groups[0]["weight_decay"] == 0.0
    state = json.loads((Path(other["log"]["dir"]) / "data_state.json").read_text())
    assert state["num_batches_read"] == 2, "one of 8 rows behind two of 4"
    (tmp_path / "more").mkdir()
    (tmp_path / "more/a.txt").write_text("other text " * 500)
    fresh = {**other, "steps": 4, "data": {**other["data"], "path": str(tmp_path / "more")}}
    fresh["checkpoint"] = {**other["checkpoint"], "change": ["data"]}
    train(config_of(fresh))
    assert "change  data: was" in capfd.readouterr().out
    assert json.loads((Path(fresh["log"]["dir"]) / "data_state.json").read_text())["num_batches_read"] == 1


def test_a_group_goes_on_with_the_rate_that_it_is_given(run, tmp_path):
    first = {**run, "layout": "tp1", "sequence_parallel": False, "evaluation": {}, "steps": 1}
    first = with_values(first, tmp_path, steps=1, export=None)
    group = {"params": "**.embed_tokens.*", "lr": 1e-3}
    first["optimizer"] = {"lr": 0.01, "groups": [group], "schedule": {"name": "constant"}}
    train(config_of(first))
    made = []
    for changed, rates in (({"groups": [{**group, "lr": 1e-8}]}, {0.01, 1e-8}), ({"lr": 0.1}, {0.1, 1e-8})):
        first["optimizer"] = {**first["optimizer"], **changed}
        first |= {"steps": first["steps"] + 1, "checkpoint": {**first["checkpoint"], "change": ["optimizer"]}}
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(training, "make_optimizer", lambda *args: made.append(make_optimizer(*args)) or made[-1])
            train(config_of(first))
        assert sorted(group["lr"] for group in made[-1].param_groups) == pytest.approx(sorted(rates))


def test_passes_over_the_data_are_steps(run, tmp_path, capfd):
    plain = {**run, "layout": "tp1", "sequence_parallel": False, "evaluation": {}, "epochs": 0.5}
    del plain["steps"]
    plain["optimizer"] = {"schedule": {"name": "linear", "warmup_steps": 1}}
    record = train(config_of(with_values(plain, tmp_path / "whole", export=None)))
    out = capfd.readouterr().out
    num_rows = int(out.partition(" rows of ")[0].rpartition(", ")[2].replace(",", ""))
    assert record.step == round(0.5 * num_rows / 4) and record.lr == pytest.approx(0.1 * 3e-4)
    plain["optimizer"]["schedule"]["warmup_steps"] = 10_000
    with pytest.raises(ConfigError, match="optimizer.schedule.warmup_steps: is 10000"):
        train(config_of(with_values(plain, tmp_path / "warm", export=None)))


@pytest.mark.parametrize(
    "place",
    [
        *("checkpoint-2/trainer_state.json", "last.ckpt", "step_4/.metadata", "checkpoint/step-4/.metadata"),
        *("global_step4/mp_rank_00_model_states.pt", "iter_4/mp_rank_00/model_optim_rng.pt", "epoch_4.pth"),
    ],
)
def test_checkpoints_of_other_systems_are_not_written_into(run, tmp_path, place):
    mine = with_values({**run, "layout": "tp1", "sequence_parallel": False}, tmp_path)
    (file := Path(mine["checkpoint"]["dir"]) / place).parent.mkdir(parents=True)
    file.touch()
    with pytest.raises(ConfigError, match=r"another system.*name another directory$"):
        train(config_of(mine))
    (file.parent / "config.json").touch()
    with pytest.raises(ConfigError, match=rf"another system[\s\S]*model.path={file.parent}"):
        train(config_of(mine))


class Counter:
    """A callback of one's own."""

    seen: ClassVar[list] = []

    def report(self, record):
        self.seen.append((record.step, record.loss))

    def close(self):
        self.seen.append("closed")


def test_records_go_to_trackers_and_callbacks(run, tmp_path, monkeypatch):
    class Kept(GeneralTracker):
        name, requires_logging_directory, calls = "kept", True, []

        def __init__(self, run_name, logging_dir, **_):
            super().__init__()
            self.calls.append((run_name, logging_dir))

        @property
        def tracker(self):
            return None

        @on_main_process
        def store_init_configuration(self, values):
            self.calls.append(values)

        @on_main_process
        def log(self, values, step=None, **_):
            self.calls.append((step, values))

        def finish(self):
            self.calls.append("finished")

    monkeypatch.setattr(tracking, "LOGGER_TYPE_TO_CLASS", {"kept": Kept})
    monkeypatch.setattr(tracking, "get_available_trackers", lambda: ["kept"])
    mine = with_values({**run, "layout": "tp1", "sequence_parallel": False}, tmp_path, steps=2, export=None)
    mine["log"] |= {"to": ["kept"], "project": "mine", "callbacks": ["tests.cli.test_resume:Counter"]}
    train(config_of(mine))
    assert Kept.calls[0] == ("mine", mine["log"]["dir"]) and Kept.calls[-1] == "finished"
    assert Kept.calls[1]["optimizer.lr"] == 3e-4 or Kept.calls[1]["optimizer.lr"] == mine["optimizer"]["lr"]
    losses = [line["loss"] for line in lines_of(mine)]
    assert [(step, values["train/loss"]) for step, values in Kept.calls[2:-1]] == [*enumerate(losses, 1)]
    counter = importlib.import_module("tests.cli.test_resume").Counter
    assert counter.seen == [*enumerate(losses, 1), "closed"]
