"""Checkpoints of adapted Trainers: resumed at another layout, loaded by transformers, left whole by a crash."""

from __future__ import annotations

import os
import random
import signal
from concurrent.futures import Future
from fnmatch import fnmatch
from itertools import zip_longest
from pathlib import Path
from types import SimpleNamespace

import numpy
import peft
import pytest
import torch
import transformers
from transformers.trainer_jit_checkpoint import JITCheckpointCallback

import shardwise
from shardwise.cli.main import main
from shardwise.comm.collectives import all_gather_objects
from shardwise.testing.spawn import spawn
from shardwise.trainer import Trainer
from tests.families import FULL_PRODUCT
from tests.trainer.modules import Rows, arguments, build, curve, split_trainer, unsplit_run

pytestmark = [
    pytest.mark.spawn,
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning"),  # PEFT asks for it
]

RUN = {
    "max_steps": -1,
    "num_train_epochs": 3,
    "eval_strategy": "steps",
    "eval_steps": 3,
    "save_strategy": "steps",
    "save_steps": 3,
    "save_total_limit": 2,
    "load_best_model_at_end": True,
    "metric_for_best_model": "loss",
    "learning_rate": 1e-2,
    "warmup_steps": 2,
}
NUM_STEPS = 12


class StopAt(transformers.TrainerCallback):
    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **others):
        control.should_training_stop = state.global_step == self.step


def run(mesh, directory, stop=0, dropout=0.0):
    """Trains to the end, or from the last checkpoint to the end; returns the log and the best model's state."""
    beside = {"eval_dataset": Rows("llama", 11), "callbacks": [StopAt(stop)]}
    trainer = split_trainer(mesh, "llama", directory, num_rows=14, beside=beside, dropout=dropout, **RUN)
    trainer.train(resume_from_checkpoint=any(Path(directory).glob("checkpoint-*")))
    names = ("step", "loss", "grad_norm", "learning_rate", "eval_loss")
    log = [{name: each[name] for name in names if name in each} for each in trainer.state.log_history]
    state = shardwise.full_state_dict(trainer.model)
    return [each for each in log if len(each) > 1], Path(trainer.state.best_model_checkpoint).name, state


def differing(found, wanted):
    """Entries of two logs that differ."""
    pairs = zip_longest(found, wanted, fillvalue={})
    return [
        (one, other)
        for one, other in pairs
        if one.keys() != other.keys()
        or any(one[name] != pytest.approx(other[name], rel=1e-5, abs=1e-5) for name in one)
    ]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The uninterrupted run, and what it saved."""
    directory = str(tmp_path_factory.mktemp("whole"))
    return spawn(alone, 1, directory)[0], directory


def alone(directory):
    with shardwise.Mesh.open("tp1") as mesh:
        return run(mesh, directory)


@pytest.mark.parametrize(
    ("layout", "later", "stop"),
    [
        *(("tp2", "pp2", 4), ("ddp2", "fsdp2.tp2", 7)),
        *[
            ("pp2", "fsdp2", 8),
            ("fsdp2", "tp2", 7),
            ("pp2", "fsdp2.tp2", 8),
            ("fsdp2.tp2", "ddp2", 5),
            ("ddp2", "fsdp2", 10),
        ]
        * FULL_PRODUCT,
    ],
)
def test_a_run_goes_on_at_another_layout(on_ranks, whole, tmp_path, layout, later, stop):
    (log, best, state), _ = whole
    on_ranks(run, directory=str(tmp_path), layout=layout, stop=stop)
    on_ranks.end()  # and with it its hold on the directory
    for found, own_best, own in on_ranks(run, directory=str(tmp_path), layout=later, stop=0):
        assert not differing(found, log)
        assert own_best == best
        for name, value in state.items():
            torch.testing.assert_close(own[name], value, atol=1e-5, rtol=0, msg=name)
    assert len(list(tmp_path.glob("checkpoint-*"))) == 2


@pytest.mark.parametrize("layout", ["fsdp2"])
def test_dropout_masks_go_on_where_they_were(on_ranks, tmp_path, layout):
    (log, *_), *_ = on_ranks(run, directory=str(tmp_path / "whole"), dropout=0.2)
    on_ranks(run, directory=str(tmp_path / "parts"), dropout=0.2, stop=7)
    for found, *_ in on_ranks(run, directory=str(tmp_path / "parts"), dropout=0.2):
        assert not differing(found, log)


@pytest.mark.parametrize("layout", ["fsdp2.tp2" if FULL_PRODUCT else "fsdp2"])
def test_a_run_of_transformers_own_goes_on(on_ranks, whole, tmp_path, layout):
    (log, _, state), _ = whole
    given = arguments(tmp_path, **RUN)
    beside = {"eval_dataset": Rows("llama", 11), "callbacks": [StopAt(7)]}
    transformers.Trainer(build("llama"), given, train_dataset=Rows("llama", 14), **beside).train()
    for found, _, own in on_ranks(run, directory=str(tmp_path)):
        assert not differing(found[9:], log[9:])  # from step 8 on: their mean of an evaluation is another
        for name, value in state.items():
            torch.testing.assert_close(own[name], value, atol=1e-5, rtol=0, msg=name)


LORA = {"r": 2, "target_modules": ["q_proj"], "lora_dropout": 0.0}
SIX = {"max_steps": 6, "save_strategy": "steps", "save_steps": 3, "learning_rate": 1e-2, "warmup_steps": 2}


def unsplit(adapts, directory):
    model = build("llama").from_pretrained(f"{directory}/base")
    return peft.get_peft_model(model, peft.LoraConfig(**LORA, init_lora_weights=False)) if adapts else model


def six_steps(trainer, model, directory, data_size=1, stop=0, resumed=None):
    """Of six steps those to `stop`, or to the end."""
    given = arguments(directory, data_size, **SIX)
    run = trainer(model, given, train_dataset=Rows("llama", 14), callbacks=[StopAt(stop)])
    run.train(resume_from_checkpoint=resumed)
    return curve(run), {name: value.detach().clone() for name, value in run.model.named_parameters()}


def three_steps(mesh, adapts, directory):
    model = unsplit(adapts, Path(directory).parent)
    model.config.dtype = torch.bfloat16  # as of files that were read in another dtype
    six_steps(Trainer, shardwise.parallelize(model, mesh), directory, mesh.data_size, stop=3)
    return torch.get_rng_state(), random.getstate(), numpy.random.get_state()


@pytest.mark.parametrize(("layout", "adapts"), [("tp2", False), ("fsdp2", True)])
def test_transformers_own_goes_on_from_an_export(on_ranks, tmp_path, layout, adapts):
    build("llama").save_pretrained(tmp_path / "base")
    (states, _) = on_ranks(three_steps, directory=str(tmp_path / "ours"), adapts=adapts)
    (saved,) = (tmp_path / "ours").glob("checkpoint-*")
    assert transformers.AutoConfig.from_pretrained(saved).dtype == torch.float32
    out = tmp_path / "plain"
    assert main(["convert", str(tmp_path / "ours"), "--to", "trainer", str(out)]) == 0
    (log, state), (found, own) = (
        six_steps(transformers.Trainer, unsplit(adapts, tmp_path), tmp_path / "one", resumed=resumed)
        for resumed in (None, str(out))
    )
    assert [each for pair in found for each in pair] == pytest.approx([each for pair in log for each in pair], rel=1e-5)
    for name, value in state.items():
        torch.testing.assert_close(own[name], value, atol=1e-5, rtol=0, msg=name)
    groups, own = (torch.load(each / "optimizer.pt")["param_groups"] for each in (tmp_path / "one/checkpoint-3", out))
    assert [each.keys() for each in own] == [each.keys() for each in groups]
    if layout == "tp2":  # with other data ranks, new random states are drawn
        written = torch.load(out / "rng_state.pth", weights_only=False)
        assert [str(written[name]) for name in ("cpu", "python", "numpy")] == [*map(str, states)]


@pytest.mark.single
def test_a_checkpoint_is_one_of_transformers_too(whole):
    (_, best, state), directory = whole
    loaded = transformers.AutoModelForCausalLM.from_pretrained(Path(directory) / best).state_dict()
    assert all(torch.equal(loaded[name], value) for name, value in state.items())
    assert (Path(directory) / best / "trainer_state.json").exists()
    assert (Path(directory) / best / "training_args.bin").exists()


def save_and_fail(mesh, directory):
    """Rank 0 fails while it writes the Trainer's state."""
    trainer = split_trainer(mesh, "llama", directory, max_steps=2, save_strategy="steps", save_steps=1)
    if mesh.rank == 0:
        write = trainer._save_scaler
        trainer._save_scaler = lambda place: write(place) if trainer.state.global_step < 2 else 1 / 0
    with pytest.raises((ZeroDivisionError, shardwise.ShardwiseError)):
        trainer.train()
    return sorted(each.name for each in Path(directory).glob("checkpoint-*"))


@pytest.mark.parametrize("layout", ["tp2"])
def test_a_save_that_fails_leaves_no_checkpoint(on_ranks, tmp_path, layout):
    assert on_ranks(save_and_fail, directory=str(tmp_path)) == [["checkpoint-1"]] * 2


def save_model_alone(mesh, directory):
    options = {"save_strategy": "steps", "save_steps": 2, "save_only_model": True}
    trainer = split_trainer(mesh, "llama", directory, max_steps=2, **options)
    trainer.train()
    trainer.save_model(f"{directory}/out")
    return shardwise.full_state_dict(trainer.model), all_gather_objects(trainer.state.global_step, mesh.group())


@pytest.mark.parametrize("layout", ["fsdp2.tp2" if FULL_PRODUCT else "fsdp2"])
def test_the_model_alone(on_ranks, tmp_path, layout):
    (state, steps), *others = on_ranks(save_model_alone, directory=str(tmp_path))
    assert steps == [2] * (1 + len(others))
    for place in ("out", "checkpoint-2"):
        loaded = build("llama").from_pretrained(tmp_path / place).state_dict()
        assert all(torch.equal(loaded[name], value) for name, value in state.items())
        assert not (tmp_path / place / "optimizer.pt").exists()


def adapt_alone(mesh, directory):
    """LoRA whose adapters alone are saved: the best one is loaded, and a run goes on from the last one."""
    adapter = peft.LoraConfig(r=2, target_modules=["q_proj"], lora_dropout=0.0)
    options = {**RUN, "save_only_model": True, "learning_rate": 0.5}
    states = []
    for resumed in (None, f"{directory}/checkpoint-12"):
        model = shardwise.load(f"{directory}/base", mesh, adapter=adapter, seed=len(states))
        given = arguments(directory, mesh.data_size, **options)
        beside = {"train_dataset": Rows("llama", 14), "eval_dataset": Rows("llama", 11)}
        trainer = Trainer(model, given, **beside)
        trainer.train(resume_from_checkpoint=resumed)
        states.append(trainer.evaluate()["eval_loss"])
    return states, trainer.state.best_metric


@pytest.mark.parametrize("layout", ["fsdp2"])
def test_adapters_alone_are_the_best_model_and_resume(on_ranks, tmp_path, layout):
    build("llama").save_pretrained(tmp_path / "base")
    for (first, second), best in on_ranks(adapt_alone, directory=str(tmp_path)):
        assert first == pytest.approx(best, abs=1e-6)
        assert second == pytest.approx(best, abs=1e-6), "the best one again, from a run that had nothing left to do"


def push(trainer, model, directory, strategy, data_size=1):
    """What four steps and a save of the model push, by place and message, and how often a repository is made."""
    pushed, made = [], []

    def upload(*, folder_path, commit_message, path_in_repo="", ignore_patterns=(), **others):
        files = {str(each.relative_to(folder_path)) for each in Path(folder_path).rglob("*") if each.is_file()}
        ignored = {each for each in files for pattern in ignore_patterns if fnmatch(each, pattern)}
        pushed.append((path_in_repo, commit_message, files - ignored))
        (done := Future()).set_result(SimpleNamespace())
        return done

    def create(repo, **others):
        made.append(repo)
        return SimpleNamespace(repo_id=repo)

    hub = {"create_repo": create, "upload_folder": upload}
    options = {"push_to_hub": True, "hub_model_id": "own/model", "hub_strategy": strategy}
    options |= {"max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {**hub, "hf_api": lambda: SimpleNamespace(**hub)}.items():
            patch.setattr(transformers.trainer, name, value, raising=False)
        run = trainer(model, arguments(directory, data_size, **options), train_dataset=Rows("llama", 14))
        run.train()
        run.save_model()
    return pushed, made


def push_on_rank(mesh, directory, strategy):
    return push(Trainer, shardwise.parallelize(build("llama"), mesh), directory, strategy, mesh.data_size)


@pytest.mark.parametrize("strategy", ["checkpoint", "every_save", "end"])
@pytest.mark.parametrize("layout", ["fsdp2"])
def test_what_transformers_pushes_is_pushed_once(on_ranks, tmp_path, layout, strategy):
    wanted, made = push(transformers.Trainer, build("llama"), tmp_path / "one", strategy)
    (found, own_made), other = on_ranks(push_on_rank, directory=str(tmp_path / "own"), strategy=strategy)
    assert other == ([], []) and own_made == made == ["own/model"]
    assert [each[:2] for each in found] == [each[:2] for each in wanted]
    of_one_process = {"optimizer.pt", "scheduler.pt", "rng_state.pth"}
    for (place, _, files), (*_, expected) in zip(found, wanted, strict=True):
        assert not expected - files - of_one_process
        assert place or not files - expected - {".lock", "latest"}
    assert not found[-1][2] & {".lock", "latest"}, "what is pushed last, when the run has ended"


class Terminated(transformers.TrainerCallback):
    def on_step_begin(self, args, state, control, **others):
        if state.global_step == 2:
            os.kill(os.getpid(), signal.SIGTERM)


def terminate(layout, directory, resumes):
    """Trains until SIGTERM, which rank 0 notices first, or from there on."""
    with shardwise.Mesh.open(layout) as mesh:
        beside = {} if resumes else {"callbacks": [Terminated()]}
        beside |= {"eval_dataset": Rows("llama", 4)}
        trainer = split_trainer(
            mesh, "llama", directory, enable_jit_checkpoint=True, beside=beside, eval_strategy="epoch"
        )
        for each in trainer.callback_handler.callbacks:
            if isinstance(each, JITCheckpointCallback):
                each.jit_manager.kill_wait = mesh.rank / 4
        trainer.train(resume_from_checkpoint=resumes)
        assert all(each["epoch"].is_integer() for each in trainer.state.log_history if "eval_loss" in each)
        return trainer.state.global_step, curve(trainer)


@pytest.mark.parametrize("layout", ["tp2"])
def test_a_run_that_is_sent_sigterm_saves_and_goes_on(tmp_path, layout):
    """At tp2 all ranks stop at one step, and neither waits for the other."""
    (step, _), (other, _) = spawn(terminate, 2, layout, str(tmp_path), resumes=False, timeout=60.0)
    assert step == other < 20 and [each.name for each in tmp_path.glob("check*")] == [f"checkpoint-{step}"]
    wanted, _ = unsplit_run("llama")
    for end, found in spawn(terminate, 2, layout, str(tmp_path), resumes=True, timeout=60.0):
        assert end == 20
        assert [each for pair in found for each in pair] == pytest.approx(
            [each for pair in wanted for each in pair], rel=1e-5, abs=1e-5
        )
