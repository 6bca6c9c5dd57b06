"""transformers' `Trainer`, TRL's trainers and accelerate on split models.

    from shardwise.trainer import Trainer

    Trainer(model="Qwen/Qwen3-0.6B", args=args, train_dataset=rows, layout="fsdp2.tp2").train()

In a loop of one's own with accelerate, `prepare` takes the place of `accelerator.prepare`:

    model, optimizer, loader, scheduler = prepare(accelerator, model, optimizer, loader, scheduler)

Needs accelerate (`pip install -e '.[trainer]'` in a clone). See docs/trainer.md.
"""

from shardwise.accelerate.accelerator import prepare
from shardwise.trainer.adapt import Seq2SeqTrainer, Trainer, adapt

__all__ = ["Seq2SeqTrainer", "Trainer", "adapt", "prepare"]
