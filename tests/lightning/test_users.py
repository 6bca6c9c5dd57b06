"""What users do with a Trainer besides training: each is right, or one clear error. In one process."""

from __future__ import annotations

import inspect

import pytest
import torch
from lightning.pytorch.callbacks import Callback, EMAWeightAveraging, StochasticWeightAveraging
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.tuner import Tuner

from shardwise.errors import UnsupportedError
from shardwise.lightning import ShardwiseStrategy
from shardwise.lightning.models import check_callbacks
from shardwise.plan.options import ParallelSpec
from shardwise.topology.shape import MeshShape
from tests.lightning.modules import ADAM, Automatic, Evaluated, loader, small_model, trainer, unsplit_batch

pytestmark = pytest.mark.single


def test_every_option_of_a_split_is_named_in_the_signature():
    # LightningCLI and editors read names and types there.
    assert inspect.signature(ShardwiseStrategy).parameters.keys() >= vars(ParallelSpec()).keys()


class Beside(Automatic):
    """Another model beside its own: a teacher, frozen or not, before or behind it."""

    def __init__(self, *, is_frozen=True, is_first=False):
        super().__init__()
        teacher = small_model().requires_grad_(not is_frozen)
        if is_first:
            self.model, self.student = teacher, self.model
        else:
            self.teacher = teacher

    def training_step(self, batch, batch_idx):
        batch.pop("row")
        with torch.no_grad():
            wanted = self.teacher(input_ids=batch["input_ids"]).logits.softmax(-1)
        output = self.model(**batch)
        self.losses.append(float(output.loss.detach()))
        distance = (output.logits.softmax(-1) - wanted).square().mean()
        return output.loss + distance


@pytest.mark.filterwarnings("ignore:Found .* module.* in eval mode")
def test_a_frozen_model_may_be_beside_the_one_that_is_trained(tmp_path):
    module = Beside()
    run = trainer("tp1", max_steps=2)
    run.fit(module, loader())
    assert module.losses[0] == pytest.approx(float(small_model()(**unsplit_batch(0)).loss.detach()), abs=1e-5)
    run.save_checkpoint(tmp_path / "two.ckpt")
    again = Beside()
    trainer("tp1", max_steps=2).fit(again, loader(), ckpt_path=str(tmp_path / "two.ckpt"))
    for name, value in module.model.named_parameters():
        assert torch.equal(value, again.model.get_parameter(name)), name
    assert all(
        torch.equal(value, small_model().get_parameter(name)) for name, value in again.teacher.named_parameters()
    )


def test_several_models_that_are_trained_are_refused():
    with pytest.raises(UnsupportedError, match="Beside trains model, teacher of the split models model, teacher"):
        trainer("tp1", max_steps=1).fit(Beside(is_frozen=False), loader())
    with pytest.raises(UnsupportedError, match="Beside trains student of the split models model, student"):
        trainer("tp1", max_steps=1).fit(Beside(is_first=True), loader())


class TwoOptimizers(Automatic):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.seen = []

    def training_step(self, batch, batch_idx):
        self.seen.append({name: batch[name].clone() for name in ("input_ids", "labels")})
        self.manual_backward(self.loss(batch))
        for optimizer in self.optimizers():
            optimizer.step()
            optimizer.zero_grad()

    def configure_optimizers(self):
        head = [value for name, value in self.named_parameters() if "lm_head" in name]
        rest = [value for name, value in self.named_parameters() if "lm_head" not in name]
        return torch.optim.AdamW(rest, **ADAM), torch.optim.SGD(head, lr=0.1)


def test_two_optimizers_step_by_hand_and_go_on_from_a_checkpoint(tmp_path):
    """Lightning counts a step of each: three batches, and three more."""
    module, again = TwoOptimizers(), TwoOptimizers()
    run = trainer("tp1", max_steps=6)
    run.fit(module, loader())
    run.save_checkpoint(tmp_path / "two.ckpt")
    trainer("tp1", max_steps=12).fit(again, loader(), ckpt_path=str(tmp_path / "two.ckpt"))
    assert len(module.losses) == len(again.losses) == 3
    model = small_model().train()
    head = [value for name, value in model.named_parameters() if "lm_head" in name]
    rest = [value for name, value in model.named_parameters() if "lm_head" not in name]
    optimizers = torch.optim.AdamW(rest, **ADAM), torch.optim.SGD(head, lr=0.1)
    for batch, found in zip(module.seen + again.seen, module.losses + again.losses, strict=True):
        loss = model(**batch).loss
        assert float(loss.detach()) == pytest.approx(found, abs=1e-5)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


class Recording(Callback):
    """The names of the callbacks that were called."""

    def __init__(self):
        self.names = []


def _recorder(name):
    def record(self, *args, **options):
        self.names.append(name)

    return record


for _name in dir(Callback):
    if _name.startswith("on_") or _name in ("setup", "teardown"):
        setattr(Recording, _name, _recorder(_name))


@pytest.mark.filterwarnings("ignore:Found .* module.* in eval mode")
def test_callbacks_come_in_the_order_of_lightnings_own_strategies():
    """Of a validation before a fit, two fits and a test."""
    orders = []
    for strategy in (ShardwiseStrategy("tp1"), SingleDeviceStrategy("cpu")):
        record, module = Recording(), Evaluated()
        run = trainer("tp1", strategy=strategy, devices=1, max_steps=2, callbacks=[record])
        run.validate(module, loader(num_rows=4), verbose=False)
        run.fit(module, loader(num_rows=8), loader(num_rows=4))
        run.fit_loop.epoch_loop.max_steps = 4
        run.fit(module, loader(num_rows=8), loader(num_rows=4))
        run.test(module, loader(num_rows=4), verbose=False)
        orders.append(record.names)
    assert orders[0] == orders[1]
    assert orders[0].count("on_train_batch_end") == 4


@pytest.mark.parametrize("callback", [StochasticWeightAveraging(1e-3), EMAWeightAveraging()])
def test_averages_of_copies_of_the_unsplit_module_are_refused_where_ranks_hold_parts(callback):
    check_callbacks([callback], MeshShape.parse("tp1"))
    with pytest.raises(UnsupportedError, match=f"callback {type(callback).__name__} over fsdp2"):
        check_callbacks([callback], MeshShape.parse("fsdp2"))


def test_a_learning_rate_is_looked_for_and_the_run_begins_where_it_was(tmp_path):
    class Tuned(Automatic):
        lr = 1e-3

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=self.lr)

    module = Tuned()
    run = trainer("tp1", max_steps=2, enable_checkpointing=True, default_root_dir=tmp_path, callbacks=[])
    found = Tuner(run).lr_find(module, loader(), num_training=4)
    assert len(found.results["loss"]) == 4 and not list(tmp_path.glob("*lr_find*"))
    module.losses.clear()
    run.fit(module, loader())
    assert module.losses[0] == pytest.approx(float(small_model()(**unsplit_batch(0)).loss.detach()), abs=1e-5)
