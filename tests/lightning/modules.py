"""A small model as users of Lightning would write it, its rows, and the curve of the unsplit model."""

from __future__ import annotations

import functools

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from shardwise.lightning import ShardwiseStrategy
from tests.families import tiny_model

GLOBAL_ROWS = 4
NUM_ROWS = 24
LENGTH = 9
CLIP = {"norm": 0.2, "value": 2e-3}
ADAM = {"lr": 1e-3, "eps": 1e-4}


class Rows(Dataset):
    """Random tokens, with fewer targets in some rows than in others."""

    def __init__(self, num_rows=NUM_ROWS):
        self._num_rows = num_rows

    def __len__(self):
        return self._num_rows

    def __getitem__(self, row):
        ids = torch.randint(3, 96, (LENGTH,), generator=torch.Generator().manual_seed(row))
        labels = ids.clone()
        labels[: row % 7] = -100
        return {"input_ids": ids, "labels": labels, "row": torch.tensor(row)}


def small_model():
    """One key/value head, which tp ranks share, and norms in heads, whose gradients are partial."""
    return tiny_model("qwen3", num_hidden_layers=2, num_key_value_heads=1)


class Automatic(pl.LightningModule):
    """An ordinary module: it knows nothing of ranks."""

    def __init__(self, optimizer=None):
        super().__init__()
        self.model = small_model()
        self.optimizer = optimizer or functools.partial(torch.optim.AdamW, **ADAM)
        self.losses, self.rows = [], []

    def loss(self, batch):
        self.rows += batch.pop("row").tolist()
        loss = self.model(**batch).loss
        self.losses.append(float(loss.detach()))
        return loss

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self):
        return self.optimizer(self.parameters())


class Evaluated(Automatic):
    """Validates, tests and predicts too."""

    def validation_step(self, batch, batch_idx):
        loss = self.model(input_ids=batch["input_ids"], labels=batch["labels"]).loss
        self.log("val_loss", loss)
        self.log("val_synced", loss, sync_dist=True)

    test_step = validation_step

    def predict_step(self, batch, batch_idx):
        return self.model(input_ids=batch["input_ids"]).logits.argmax(-1)


class Manual(Automatic):
    """Accumulates, clips and steps by itself."""

    def __init__(self, accumulate, clip):
        super().__init__()
        self.automatic_optimization = False
        self.accumulate, self.clip = accumulate, clip

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        self.manual_backward(self.loss(batch) / self.accumulate)
        if (batch_idx + 1) % self.accumulate == 0:
            if self.clip:
                self.clip_gradients(optimizer, CLIP[self.clip], self.clip)
            optimizer.step()
            optimizer.zero_grad()


def loader(data_size=1, num_rows=NUM_ROWS, **options):
    return DataLoader(Rows(num_rows), batch_size=GLOBAL_ROWS // data_size, **options)


def trainer(layout, **options):
    quiet = {"logger": False, "enable_checkpointing": False, "enable_model_summary": False}
    quiet |= {"enable_progress_bar": False, "max_epochs": -1, "accelerator": "cpu", "num_sanity_val_steps": 0}
    strategy = ShardwiseStrategy(layout.removesuffix("+sp"), sequence_parallel=layout.endswith("+sp"))
    options.setdefault("strategy", strategy)
    return pl.Trainer(**{"devices": strategy.shape.world_size} | quiet | options)


@functools.cache
def unsplit_batch(number):
    """The rows of a training batch on all ranks: Lightning shuffles them anew in every epoch."""
    epoch, at = divmod(number * GLOBAL_ROWS, NUM_ROWS)
    sampler = DistributedSampler(Rows(), num_replicas=1, rank=0, shuffle=True, seed=0)
    sampler.set_epoch(epoch)
    rows = [Rows()[row] for row in list(sampler)[at : at + GLOBAL_ROWS]]
    return {name: torch.stack([row[name] for row in rows]) for name in ("input_ids", "labels")}


@functools.cache
def unsplit_curve(mode, accumulate, clip, num_steps):
    """The losses of every batch with the plain model in a plain loop, and its parameters afterwards."""
    model = small_model().train()
    optimizer = torch.optim.AdamW(model.parameters(), **ADAM)
    losses = []
    for step in range(num_steps):
        window = [unsplit_batch(step * accumulate + number) for number in range(accumulate)]
        counts = [int((batch["labels"][:, 1:] != -100).sum()) for batch in window]
        for batch, count in zip(window, counts, strict=True):
            loss = model(**batch).loss
            losses.append(float(loss.detach()))
            (loss * (count / sum(counts) if mode == "automatic" else 1 / accumulate)).backward()
        if clip == "norm":
            torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP[clip])
        elif clip == "value":
            torch.nn.utils.clip_grad_value_(model.parameters(), CLIP[clip])
        optimizer.step()
        optimizer.zero_grad()
    return losses, {name: value.detach() for name, value in model.named_parameters()}
