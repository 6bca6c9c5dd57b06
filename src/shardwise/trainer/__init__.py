"""transformers' `Trainer`, TRL's trainers and accelerate on split models.

    from shardwise.trainer import Trainer

    Trainer(model="Qwen/Qwen3-0.6B", args=args, train_dataset=rows, layout="fsdp2.tp2").train()

Needs accelerate (`pip install -e '.[trainer]'` in a clone). See docs/trainer.md.
"""

from shardwise.trainer.adapt import Seq2SeqTrainer, Trainer, adapt

__all__ = ["Seq2SeqTrainer", "Trainer", "adapt"]
