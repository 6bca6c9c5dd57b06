"""What a Trainer asks of the strategy, in one process: the same code as on many ranks."""

from __future__ import annotations

import io
from contextlib import redirect_stderr

import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import shardwise
from shardwise.errors import ConfigError, LayoutError, MeshError, UnsupportedError
from shardwise.lightning import (
    ShardwisePrecision,
    ShardwiseRichProgressBar,
    ShardwiseStrategy,
    ShardwiseTensorBoardLogger,
    ShardwiseTQDMProgressBar,
)
from shardwise.parameters.registry import registry_of
from tests.lightning.modules import ADAM, Automatic, Evaluated, Manual, loader, small_model, trainer, unsplit_batch

pytestmark = pytest.mark.single


def unsplit_loss(model, num_rows):
    """Of every batch that is not shuffled, and its rows."""
    with torch.no_grad():
        return [float(model(batch["input_ids"], labels=batch["labels"]).loss) for batch in loader(num_rows=num_rows)]


def test_evaluation_is_that_of_the_unsplit_model():
    module, wanted = Evaluated(), unsplit_loss(small_model(), 8)
    run = trainer("tp1")
    (found,) = run.validate(module, loader(num_rows=8), verbose=False)
    assert found["val_loss"] == pytest.approx(sum(wanted) / 2, abs=1e-5)
    (found,) = run.test(module, loader(num_rows=8), verbose=False)
    assert found["val_loss"] == pytest.approx(sum(wanted) / 2, abs=1e-5)
    predicted = torch.cat(run.predict(module, loader(num_rows=8)))
    inputs = torch.cat([batch["input_ids"] for batch in loader(num_rows=8)])
    with torch.no_grad():
        assert torch.equal(predicted, small_model()(inputs).logits.argmax(-1))


def test_a_fit_goes_on_where_the_last_one_stopped_and_evaluates_in_between():
    module = Evaluated()
    run = trainer("tp1", max_steps=3, limit_val_batches=1, val_check_interval=1)
    run.fit(module, loader(), loader())
    assert module.model.training
    registry = registry_of(module.model)
    trainer("tp1", max_steps=2).fit(module, loader(), loader())
    assert registry_of(module.model) is registry, "it was not split again"
    assert len(module.losses) == 5
    assert module.losses[4] < module.losses[1]


def test_early_stopping_by_the_loss_of_all_ranks():
    module = Evaluated(lambda parameters: torch.optim.SGD(parameters, lr=0.0))
    run = trainer("tp1", callbacks=[EarlyStopping("val_loss", patience=1)], max_epochs=10)
    run.fit(module, loader(num_rows=4), loader(num_rows=4))
    assert run.current_epoch == 2


@pytest.mark.parametrize("bar", [ShardwiseTQDMProgressBar, ShardwiseRichProgressBar])
def test_bars_show_the_loss(bar):
    shown = io.StringIO()
    module = Automatic()
    module.log = lambda *args, **options: None
    callback = bar(refresh_rate=1)
    with redirect_stderr(shown):
        run = trainer("tp1", max_steps=2, enable_progress_bar=True, callbacks=[callback])
        metrics = []
        callback.on_train_batch_end = _spy(callback, callback.on_train_batch_end, run, metrics)
        run.fit(module, loader())
    assert metrics == pytest.approx(module.losses)


def _spy(callback, ends, run, metrics):
    def on_train_batch_end(*args):
        metrics.append(callback.get_metrics(run, run.lightning_module)["loss"])
        return ends(*args)

    return on_train_batch_end


def test_the_logger_writes_the_loss(tmp_path):
    module = Automatic()
    run = trainer(
        "tp1", max_steps=3, log_every_n_steps=1, logger=ShardwiseTensorBoardLogger(tmp_path, name="", version="")
    )
    run.fit(module, loader())
    events = EventAccumulator(str(tmp_path)).Reload().Scalars("train_loss")
    assert [event.value for event in events] == pytest.approx(module.losses)


class ManualStepping(Manual):
    """The step does what the strategy would: it must not be done twice."""

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        batch.pop("row")
        result = shardwise.TrainStep(self.model, self.trainer.strategy.mesh, num_microbatches=2)(batch)
        self.losses.append(float(result.loss))
        optimizer.step()
        optimizer.zero_grad()


def test_a_train_step_may_step_by_hand_and_windows_cut_short_weigh_as_in_one():
    """Four batches of a window of three and one of one, against steps on the same rows."""
    module = Automatic()
    trainer("tp1", max_epochs=1, accumulate_grad_batches=3).fit(module, loader(num_rows=16))
    model = small_model()
    with shardwise.Mesh.open("tp1") as mesh:
        split = shardwise.parallelize(model, mesh).train()
        optimizer = torch.optim.AdamW(split.parameters(), **ADAM)
        order = [torch.tensor(module.rows[first : first + 12]) for first in (0, 12)]
        for rows in order:
            batch = {name: torch.stack([value[name] for value in map(_row, rows)]) for name in ("input_ids", "labels")}
            shardwise.TrainStep(split, mesh)(batch)
            optimizer.step()
            optimizer.zero_grad()
    for name, value in split.named_parameters():
        torch.testing.assert_close(module.model.get_parameter(name), value, atol=2e-6, rtol=0)
    stepped = ManualStepping(1, None)
    trainer("tp1", max_steps=2).fit(stepped, loader())
    assert stepped.losses[0] == pytest.approx(float(small_model()(**unsplit_batch(0)).loss.detach()), abs=1e-5)


def _row(number):
    return loader(num_rows=24).dataset[int(number)]


@pytest.mark.parametrize(("layout", "devices"), [("tp2", 1), ("fsdp2.tp2", 2), ("tp1", 2)])
def test_a_layout_must_fit_the_devices(layout, devices):
    ranks = shardwise.MeshShape.parse(layout).world_size
    with pytest.raises(MeshError, match=rf"devices={devices}(.|\n)*Trainer\(devices={ranks}, num_nodes=1\)"):
        trainer(layout, strategy=ShardwiseStrategy(layout), devices=devices)


class Empty(Automatic):
    def __init__(self):
        super().__init__()
        self.model = torch.nn.Linear(2, 2)


class ByHand(Automatic):
    """Loads as without a strategy's options."""

    def configure_model(self):
        if not hasattr(self.model, "_shardwise_registry"):
            shardwise.parallelize(self.model, self.trainer.strategy.mesh)


def test_models_that_the_strategy_cannot_train_are_refused():
    with pytest.raises(ConfigError, match="Empty holds no transformers model"):
        trainer("tp1", max_steps=1).fit(Empty(), loader())
    trainer("tp1", max_steps=1).fit(ByHand(), loader())
    strategy = ShardwiseStrategy("tp1", recompute=shardwise.Recompute(mode="full"))
    with pytest.raises(ConfigError, match=r"recompute=Recompute(.|\n)*strategy\.load"):
        trainer("tp1", strategy=strategy, max_steps=1).fit(ByHand(), loader())
    with pytest.raises(MeshError, match="there is no mesh yet"):
        _ = ShardwiseStrategy("tp1").mesh
    module = ByHand()
    with shardwise.Mesh.open("tp1") as mesh:
        shardwise.parallelize(module.model, mesh)
    registry_of(module.model).mesh.shape = shardwise.MeshShape.parse("tp2")
    with pytest.raises(LayoutError, match="split over tp2, and the strategy's layout is tp1"):
        trainer("tp1", max_steps=1).fit(module, loader())


def test_precision_flags_are_ours():
    module = Automatic()
    trainer("tp1", max_steps=2, precision="bf16-mixed").fit(module, loader())
    assert registry_of(module.model).precision == shardwise.Precision()
    assert module.model.lm_head.weight.dtype == torch.float32
    plugin = ShardwisePrecision(shardwise.Precision(params="float64", compute="float64", reduce="float64"))
    run = trainer("tp1", max_steps=1, plugins=[plugin])
    run.fit(module := Automatic(), loader())
    assert module.model.lm_head.weight.dtype == torch.float64
    with pytest.raises(UnsupportedError, match=r"HalfPrecision \(16-true\)"):
        trainer("tp1", precision="16-true")
    strategy = ShardwiseStrategy("tp1", precision=shardwise.Precision(nonfinite="skip"))
    with pytest.raises(ConfigError, match="two precisions"):
        trainer("tp1", strategy=strategy, precision="bf16-mixed")


def test_manual_optimization_may_not_be_given_clipping():
    with pytest.raises(MisconfigurationException):
        trainer("tp1", max_steps=1, gradient_clip_val=1.0).fit(Manual(1, None), loader())
