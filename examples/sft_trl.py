"""A script for TRL's SFTTrainer with one changed line: two CPU ranks, beside the same script in one process.

    python examples/sft_trl.py

The changed line is the class. A layout says the rest: every rank reads its part of the weights.
"""

import tempfile
from pathlib import Path
from typing import Any

import trl
from datasets import Dataset
from fine_tuning import CAPITALS, TEMPLATE, ask, make_model
from transformers import AutoTokenizer
from trl import SFTConfig

from shardwise.testing.spawn import spawn
from shardwise.trainer import adapt


def finetune(trainer: type, model: Path, directory: str, rows: int, **options: Any) -> list[float]:
    """The user's script: learns what the assistant says; returns the losses."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = TEMPLATE
    chats = [[*ask(country), {"role": "assistant", "content": capital}] for country, capital in CAPITALS.items()]
    arguments = SFTConfig(
        directory,
        assistant_only_loss=True,
        per_device_train_batch_size=rows,
        num_train_epochs=10,
        learning_rate=3e-3,
        save_strategy="no",
        logging_steps=5,
        bf16=False,  # so that the runs can be compared
        use_cpu=True,
        disable_tqdm=True,
        report_to=[],
    )
    data = Dataset.from_list([{"messages": chat} for chat in chats])
    run = trainer(str(model), args=arguments, train_dataset=data, processing_class=tokenizer, **options)
    run.train()
    return [each["loss"] for each in run.state.log_history if "loss" in each]


def on_a_rank(layout: str, model: Path, directory: str) -> list[float]:
    rows = 1 if layout == "fsdp2" else 2  # of a data rank
    return finetune(adapt(trl.SFTTrainer), model, directory, rows, layout=layout)


def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        model = make_model(Path(directory) / "model")
        alone = finetune(trl.SFTTrainer, model, f"{directory}/one", rows=2)
        print("one process", [f"{value:.4f}" for value in alone])
        for layout in ("tp2", "fsdp2"):
            found, _ = spawn(on_a_rank, 2, layout, model, f"{directory}/{layout}")
            print(layout, [f"{value:.4f}" for value in found])
            assert max(abs(one - other) for one, other in zip(found, alone, strict=True)) < 1e-4


if __name__ == "__main__":
    main()
