"""An ordinary LightningModule over two CPU ranks: trained under tensor parallelism, resumed under FSDP2, then adapted.

    python examples/lightning_training.py

Lightning starts the second rank itself; under torchrun, and on a cluster, the script stays as it is.
"""

import tempfile

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from peft import LoraConfig
from torch.utils.data import DataLoader
from transformers import LlamaConfig

from shardwise.lightning import ShardwiseStrategy, ShardwiseTQDMProgressBar

CONFIG = LlamaConfig(
    vocab_size=199,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
)


class Model(pl.LightningModule):
    """Knows nothing of ranks."""

    def __init__(self):
        super().__init__()
        self.model = None

    def configure_model(self):
        if self.model is None:  # called again by validate and predict
            self.model = self.trainer.strategy.load(CONFIG, seed=0)

    def training_step(self, batch, batch_idx):
        loss = self.model(input_ids=batch, labels=batch).loss  # over the rows of all ranks
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.model(input_ids=batch, labels=batch).loss, sync_dist=True)

    test_step = validation_step

    def predict_step(self, batch, batch_idx):
        return self.model(input_ids=batch).logits[:, -1].argmax(-1)

    def configure_optimizers(self):
        return torch.optim.AdamW([each for each in self.parameters() if each.requires_grad], lr=3e-3)


class Adapted(Model):
    """LoRA: only the adapters are trained."""

    def configure_model(self):
        if self.model is None:
            adapter = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
            self.model = self.trainer.strategy.load(CONFIG, adapter=adapter, seed=0)


def build_trainer(layout: str, **options) -> pl.Trainer:
    return pl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=ShardwiseStrategy(layout),
        gradient_clip_val=1.0,
        enable_model_summary=False,
        logger=False,
        enable_checkpointing=any(isinstance(each, ModelCheckpoint) for each in options.get("callbacks", ())),
        enable_progress_bar="callbacks" in options,
        **options,
    )


def main() -> None:
    rows = torch.randint(CONFIG.vocab_size, (16, 32), generator=torch.Generator().manual_seed(0))
    keep = ModelCheckpoint(tempfile.mkdtemp(), save_last=True)
    first = build_trainer("tp2", max_epochs=2, callbacks=[keep, ShardwiseTQDMProgressBar(refresh_rate=4)])
    first.fit(Model(), DataLoader(rows, batch_size=4), DataLoader(rows, batch_size=4))

    model = Model()
    second = build_trainer("fsdp2", max_epochs=4)
    loaders = DataLoader(rows, batch_size=2), DataLoader(rows, batch_size=2)
    second.fit(model, *loaders, ckpt_path=f"{keep.dirpath}/last.ckpt")
    (found,) = second.validate(model, DataLoader(rows, batch_size=2), verbose=False)
    (tested,) = second.test(model, DataLoader(rows, batch_size=2), verbose=False)
    assert tested == found, "the same rows"
    before, after = float(first.callback_metrics["val_loss"]), found["val_loss"]
    predicted = second.predict(model, DataLoader(rows, batch_size=2))
    second.print(f"validation loss {before:.3f} after two epochs under tp2, {after:.3f} after two more under fsdp2")
    second.print(f"rank 0 predicted {sum(map(len, predicted))} of {len(rows)} rows")
    assert after < before

    adapted = Adapted()
    third = build_trainer("tp2", max_epochs=2)
    third.fit(adapted, DataLoader(rows, batch_size=4), DataLoader(rows, batch_size=4))
    trained = sum(each.numel() for each in adapted.parameters() if each.requires_grad)
    third.print(f"LoRA: {trained:,} of this rank's parameters trained, loss {third.callback_metrics['val_loss']:.3f}")


if __name__ == "__main__":
    main()
