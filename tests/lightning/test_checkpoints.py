"""A Trainer's checkpoints: written once, in any layout, loaded by any other; the curve goes on."""

from __future__ import annotations

import os
import shutil
import signal

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

import shardwise
from shardwise.errors import LoadError, RankError
from shardwise.ranks.spawn import spawn
from tests.lightning.modules import Automatic, Evaluated, loader, trainer, unsplit_curve

pytestmark = pytest.mark.spawn

STEPS = 6
NAME = "epoch=0-step=6.ckpt"


def fit(mesh, layout, directory, num_steps, ckpt_path=None):
    """The losses of a run that saves every epoch."""
    module = Automatic()
    callback = ModelCheckpoint(directory, every_n_train_steps=6, save_top_k=-1, save_last=True)
    run = trainer(layout, max_steps=num_steps, enable_checkpointing=True, callbacks=[callback])
    run.fit(module, loader(mesh.data_size), ckpt_path=ckpt_path)
    state = shardwise.full_state_dict(module.model, rank0_only=True)
    return module.losses, state


def resume(mesh, directory):
    """A run that is ended after an epoch, and goes on to the end of the third."""
    losses, _ = fit(mesh, "tp2", directory, STEPS)
    rest, state = fit(mesh, "tp2", directory, 18, "last")
    return losses + rest, state


def test_a_run_goes_on_in_another_layout(on_ranks, tmp_path):
    wanted, parameters = unsplit_curve("automatic", 1, None, 18)
    for losses, state in on_ranks(resume, layout="tp2", directory=tmp_path):
        assert losses == pytest.approx(wanted, abs=1e-4)
        for name, value in state.items():
            torch.testing.assert_close(value, parameters[name], atol=2e-5, rtol=0)
    names = {path.name for path in tmp_path.iterdir() if path.is_dir()}
    assert names == {NAME, "epoch=1-step=12.ckpt", "epoch=2-step=18.ckpt", "last.ckpt"}
    for path in set(names) - {NAME}:
        shutil.rmtree(tmp_path / path)
    on_ranks.end()  # they save there until then
    losses, _ = fit(shardwise.Mesh.open("tp1"), "tp1", tmp_path, 18, str(tmp_path / NAME))
    assert losses == pytest.approx(wanted[STEPS:], abs=1e-4)


class Killed(Automatic):
    def on_train_batch_start(self, batch, batch_idx):
        if self.trainer.global_step == 9 and self.trainer.global_rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)


def run_to_the_end(directory, kind):
    """The losses of a job, which goes on from its last checkpoint unless a rank is to be killed."""
    with shardwise.Mesh.open("tp2") as mesh:
        module = kind()
        callback = ModelCheckpoint(directory, every_n_train_steps=6, save_top_k=-1, save_last=True)
        run = trainer("tp2", max_steps=12, enable_checkpointing=True, callbacks=[callback])
        run.fit(module, loader(mesh.data_size), ckpt_path="last" if kind is Automatic else None)
        return module.losses


def test_a_job_of_which_a_rank_was_killed_goes_on_from_its_last_checkpoint(tmp_path):
    with pytest.raises(RankError):
        spawn(run_to_the_end, 2, tmp_path / "saved", Killed)
    wanted, _ = unsplit_curve("automatic", 1, None, 12)
    for losses in spawn(run_to_the_end, 2, tmp_path / "saved", Automatic):
        assert losses == pytest.approx(wanted[6:], abs=1e-4)


def test_weights_alone_and_what_is_no_checkpoint(tmp_path):
    module = Evaluated()
    module.save_hyperparameters({"width": 5})
    run = trainer("tp1", max_steps=2)
    run.fit(module, loader(), loader(num_rows=4))
    run.save_checkpoint(tmp_path / "weights.ckpt", weights_only=True)
    run.save_checkpoint(tmp_path / "all.ckpt")
    (found,) = run.validate(module, loader(num_rows=4), verbose=False)
    for name in ("weights.ckpt", "all.ckpt"):
        (again,) = trainer("tp1").validate(
            Evaluated(), loader(num_rows=4), ckpt_path=str(tmp_path / name), verbose=False
        )
        assert again == found
    assert shardwise.load_checkpoint(tmp_path, "all.ckpt")["hyper_parameters"] == {"width": 5}
    again = Evaluated()  # as docs/lightning.md has it, in place of `load_from_checkpoint`
    shardwise.parallelize(again.model, shardwise.Mesh.open("tp1"))
    shardwise.load_checkpoint(tmp_path, "weights.ckpt", model=again)
    wanted, state = shardwise.full_state_dict(module.model), shardwise.full_state_dict(again.model)
    assert all(torch.equal(state[name], value) for name, value in wanted.items())
    with pytest.raises(KeyError, match="contains only the model"):
        trainer("tp1", max_steps=3).fit(Automatic(), loader(), ckpt_path=str(tmp_path / "weights.ckpt"))
    with pytest.raises(LoadError, match="no checkpoint 'other'"):
        trainer("tp1", max_steps=3).fit(Automatic(), loader(), ckpt_path=str(tmp_path / "other"))
    torch.save({}, tmp_path / "file.ckpt")
    with pytest.raises(LoadError, match=r"is a file(.|\n)*of another strategy"):
        trainer("tp1").validate(Evaluated(), loader(num_rows=4), ckpt_path=str(tmp_path / "file.ckpt"))
    run.strategy.remove_checkpoint(tmp_path / "all.ckpt")
    assert not (tmp_path / "all.ckpt").exists()
