"""A script for TRL's DPOTrainer with one changed line: two CPU ranks, beside the same script in one process.

    python examples/dpo_trl.py

The reference model is loaded as the policy is: every rank reads its part.
"""

import tempfile
from pathlib import Path
from typing import Any

import trl
from datasets import Dataset
from fine_tuning import CAPITALS, make_model
from transformers import AutoTokenizer
from trl import DPOConfig

from shardwise.testing.spawn import spawn
from shardwise.trainer import adapt


def prefer(trainer: type, model: Path, directory: str, rows: int, **options: Any) -> list[tuple[float, float]]:
    """The user's script: prefers a country's capital to another's; returns losses and margins of the rewards."""
    capitals = list(CAPITALS.values())
    pairs = [
        {"prompt": f"The capital of {country} is ", "chosen": capital, "rejected": capitals[number - 1]}
        for number, (country, capital) in enumerate(CAPITALS.items())
    ]
    arguments = DPOConfig(
        directory,
        per_device_train_batch_size=rows,
        num_train_epochs=10,
        learning_rate=1e-3,
        save_strategy="no",
        logging_steps=5,
        bf16=False,  # so that the runs can be compared
        use_cpu=True,
        disable_tqdm=True,
        report_to=[],
    )
    tokenizer = AutoTokenizer.from_pretrained(model)
    data = Dataset.from_list(pairs)
    run = trainer(str(model), args=arguments, train_dataset=data, processing_class=tokenizer, **options)
    run.train()
    return [(each["loss"], each["rewards/margins"]) for each in run.state.log_history if "loss" in each]


def on_a_rank(layout: str, model: Path, directory: str) -> list[tuple[float, float]]:
    rows = 1 if layout == "fsdp2" else 2  # of a data rank
    return prefer(adapt(trl.DPOTrainer), model, directory, rows, layout=layout)


def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        model = make_model(Path(directory) / "model")
        alone = prefer(trl.DPOTrainer, model, f"{directory}/one", rows=2)
        print("one process", [f"{loss:.4f} {margin:.3f}" for loss, margin in alone])
        for layout in ("tp2", "fsdp2"):
            found, _ = spawn(on_a_rank, 2, layout, model, f"{directory}/{layout}")
            print(layout, [f"{loss:.4f} {margin:.3f}" for loss, margin in found])
            assert max(abs(one[0] - other[0]) for one, other in zip(found, alone, strict=True)) < 1e-4


if __name__ == "__main__":
    main()
