"""What ranks of one layout know and do together under a Trainer."""

from __future__ import annotations

import tempfile
import warnings
from pathlib import Path

import peft
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping
from lightning.pytorch.utilities import grad_norm

import shardwise
from shardwise.comm.collectives import all_gather_objects
from shardwise.errors import BatchError, UnsupportedError
from shardwise.lightning import ShardwiseStrategy, ShardwiseTensorBoardLogger, ShardwiseTQDMProgressBar
from shardwise.optim.gradients import gradients_of
from shardwise.parameters.replicas import find_unequal_replicas
from tests.lightning.modules import (
    CLIP,
    Automatic,
    Evaluated,
    Rows,
    loader,
    small_model,
    trainer,
    unsplit_batch,
    unsplit_curve,
)
from tests.oracle import differing

# peft warns of attributes that transformers has renamed
pytestmark = [pytest.mark.spawn, pytest.mark.filterwarnings("ignore::FutureWarning")]


def evaluation(mesh, layout):
    """Validation, test and prediction, and a fit after them."""
    module, run = Evaluated(), trainer(layout, max_steps=2)
    data = loader(mesh.data_size, num_rows=8)
    (validated,) = run.validate(module, data, verbose=False)
    predicted = torch.cat(run.predict(module, data))
    (tested,) = run.test(module, data, verbose=False)
    whole, batches = small_model(), list(loader(num_rows=8))
    with torch.no_grad():
        wanted = sum(float(whole(each["input_ids"], labels=each["labels"]).loss) for each in batches) / 2
        expected = torch.cat([whole(each["input_ids"]).logits.argmax(-1) for each in batches])
    own = expected[mesh.data_rank :: mesh.data_size]
    for found in (validated["val_loss"], tested["val_loss"]):
        assert found == pytest.approx(wanted, abs=1e-5)
    assert validated["val_synced"] == pytest.approx(wanted, abs=1e-5)
    assert torch.equal(predicted, own)
    run.fit(module, loader(mesh.data_size), data)
    assert module.losses == pytest.approx(unsplit_curve("automatic", 1, "", 2)[0], abs=1e-5)


def once(mesh, layout):
    """The bar and the logger write on one rank; all ranks stop together."""
    directory = Path(all_gather_objects(tempfile.mkdtemp(), mesh.group())[0])
    logger = ShardwiseTensorBoardLogger(directory, name="", version="")
    bar = ShardwiseTQDMProgressBar()
    stop = EarlyStopping("train_loss", patience=0, mode="max")
    options = {"logger": logger, "enable_progress_bar": True, "callbacks": [bar, stop]}
    run = trainer(layout, max_epochs=5, log_every_n_steps=1, **options)
    module = Automatic()
    run.fit(module, loader(mesh.data_size))
    assert bar.is_disabled == (mesh.rank != 0)
    assert run.current_epoch == 2
    run.strategy.barrier()
    assert len(list(directory.glob("events*"))) == 1
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # takes as long as a case

    values = [event.value for event in EventAccumulator(str(directory)).Reload().Scalars("train_loss")]
    assert values == pytest.approx(module.losses)


class Exchanging(Automatic):
    def on_train_start(self):
        mesh, strategy = self.trainer.strategy.mesh, self.trainer.strategy
        ranks = torch.arange(mesh.data_size, dtype=torch.float32)
        own = torch.tensor(float(mesh.data_rank))
        assert strategy.reduce(own.clone(), reduce_op="sum") == ranks.sum()
        assert strategy.reduce(own.clone()) == ranks.mean()
        assert strategy.reduce(own.clone(), reduce_op="max") == ranks.max()
        assert strategy.reduce("text") == "text"
        gathered = self.all_gather(own)
        assert torch.equal(gathered, ranks if mesh.data_size > 1 else own)
        leaf = own.clone().requires_grad_()
        (self.all_gather(leaf, sync_grads=True).sum() * 2).backward()
        assert leaf.grad == 2 * mesh.data_size if mesh.data_size > 1 else 2
        assert strategy.broadcast({"rank": mesh.rank}, 1) == {"rank": 1}
        assert strategy.reduce_boolean_decision(mesh.rank == 0, all=False)
        assert not strategy.reduce_boolean_decision(mesh.rank == 0)


def exchange(mesh, layout):
    trainer(layout, max_steps=1).fit(Exchanging(), loader(mesh.data_size))


def uneven_predictions(mesh, layout):
    run = trainer(layout)
    if mesh.data_size == 1:
        assert len(torch.cat(run.predict(Evaluated(), loader(num_rows=5)))) == 5
    else:
        with pytest.raises(BatchError, match="different numbers of batches\n.* data rank 0: 2, data rank 1: 1\n"):
            run.predict(Evaluated(), loader(mesh.data_size, num_rows=5))


class Stream(torch.utils.data.IterableDataset):
    """Rows of which data rank 0 has four, and 1 two more."""

    def __init__(self, data_rank):
        self._num_rows = 4 + 2 * data_rank

    def __iter__(self):
        return (Rows()[row] for row in range(self._num_rows))


def uneven_streams(mesh, layout):
    """All ranks end together, a fit and its validations; predictions are refused."""
    data = torch.utils.data.DataLoader(Stream(mesh.data_rank), batch_size=2)
    module = Evaluated()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer(layout, max_epochs=2).fit(module, data, data)
    assert len(module.losses) == 4 and not find_unequal_replicas(module.model)
    said = [str(each.message) for each in caught if "a data rank has 2 batches and another more" in str(each.message)]
    assert len(said) == 4 * (mesh.rank == 0)
    with pytest.raises(BatchError, match="predictions of which a data rank has 2 batches and another more"):
        trainer(layout).predict(module, data)


class Norms(Automatic):
    def on_before_optimizer_step(self, optimizer):
        grad_norm(self.model, 2)


def norms_of_parts(mesh, layout):
    with pytest.raises(UnsupportedError, match=r"clip_grad_norm_\((self\.)?model, "):
        trainer(layout, max_steps=1).fit(Norms(), loader(mesh.data_size))


class Targetless(Rows):
    """Every other row, and so a data rank, has no targets."""

    def __getitem__(self, row):
        item = super().__getitem__(row)
        return item | {"labels": item["labels"].clone().fill_(-100)} if row % 2 else item


def ranks_without_targets(mesh, layout):
    module = Automatic()
    data = torch.utils.data.DataLoader(Targetless(8), batch_size=4 // mesh.data_size)
    trainer(layout, max_steps=2, use_distributed_sampler=False).fit(module, _of_rank(data, mesh))
    whole = small_model()
    optimizer = module.optimizer(whole.parameters())
    for first, found in zip((0, 4), module.losses, strict=True):
        rows = [Targetless(8)[row] for row in range(first, first + 4)]
        batch = {name: torch.stack([row[name] for row in rows]) for name in ("input_ids", "labels")}
        loss = whole(**batch).loss
        assert float(loss.detach()) == pytest.approx(found, abs=1e-5)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    state = shardwise.full_state_dict(module.model)
    assert not [
        each for name, value in whole.named_parameters() for each in differing(name, state[name], value.detach(), 2e-5)
    ]


def _of_rank(data, mesh):
    sampler = torch.utils.data.DistributedSampler(data.dataset, mesh.data_size, mesh.data_rank, shuffle=False)
    return torch.utils.data.DataLoader(data.dataset, batch_size=data.batch_size, sampler=sampler)


class Scaled(Automatic):
    def on_train_start(self):
        gradients_of(self.model).loss_scale.factor.fill_(2.0**8)


def half_precision(mesh, layout):
    """Losses are scaled, and gradients are not."""
    module = Scaled()
    precision = shardwise.Precision(compute="float16", nonfinite="skip")
    strategy = ShardwiseStrategy(layout, precision=precision)
    options = {"accumulate_grad_batches": 2, "gradient_clip_val": CLIP["norm"]}
    trainer(layout, strategy=strategy, max_steps=4, **options).fit(module, loader(mesh.data_size))
    assert not find_unequal_replicas(module.model)
    wanted = Automatic()
    trainer(layout, max_steps=4, **options).fit(wanted, loader(mesh.data_size))
    assert module.losses == pytest.approx(wanted.losses, abs=2e-2)


def with_adapters():
    torch.manual_seed(1)
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    return peft.get_peft_model(small_model(), config)


class Adapting(Automatic):
    """Trains adapters."""

    def __init__(self):
        super().__init__()
        self.model = with_adapters()

    def configure_optimizers(self):
        return self.optimizer([each for each in self.parameters() if each.requires_grad])


def adapters(mesh, layout):
    """As PEFT trains them unsplit."""
    module, whole = Adapting(), with_adapters().train()
    trainer(layout, max_steps=3, gradient_clip_val=CLIP["norm"]).fit(module, loader(mesh.data_size))
    optimizer = module.optimizer([each for each in whole.parameters() if each.requires_grad])
    for number, found in enumerate(module.losses):
        loss = whole(**unsplit_batch(number)).loss
        assert float(loss.detach()) == pytest.approx(found, abs=1e-5)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(whole.parameters(), CLIP["norm"])
        optimizer.step()
        optimizer.zero_grad()
    state = shardwise.full_state_dict(module.model)
    named = whole.named_parameters()
    assert not [each for name, value in named for each in differing(name, state[name], value.detach(), 2e-5)]


CASES = {
    "pp2": (adapters,),
    "tp2": (evaluation, once, exchange, uneven_predictions, half_precision, norms_of_parts),
    "fsdp2": (
        *(evaluation, once, exchange, uneven_predictions, half_precision),
        *(ranks_without_targets, uneven_streams, norms_of_parts),
    ),
}


def run_case(mesh, layout, case):
    globals()[case](mesh, layout)


@pytest.mark.parametrize(("layout", "case"), [(layout, case.__name__) for layout in CASES for case in CASES[layout]])
def test_ranks_do_together(on_ranks, layout, case):
    on_ranks(run_case)
