"""A script for transformers' Trainer with one changed line: two CPU ranks, beside the same script in one process.

    python examples/finetune_trainer.py

The changed line is the import. A model that Shardwise has split says the rest.
"""

import tempfile

import torch
import transformers
from torch.utils.data import Dataset
from transformers import BertConfig, BertForSequenceClassification, TrainingArguments

import shardwise
from shardwise.testing.spawn import spawn
from shardwise.trainer import Trainer  # was: from transformers import Trainer

CONFIG = BertConfig(
    vocab_size=99,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    hidden_dropout_prob=0.0,  # so that the runs can be compared
    attention_probs_dropout_prob=0.0,
)


class Reviews(Dataset):
    """Rows of token ids; the class says whether the first is odd."""

    def __init__(self, seed: int, number: int) -> None:
        self.ids = torch.randint(5, 99, (number, 12), generator=torch.Generator().manual_seed(seed))

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, row: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.ids[row], "labels": self.ids[row, 0] % 2}


def accuracy(prediction: transformers.EvalPrediction) -> dict[str, float]:
    return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}


def finetune(trainer: type, model: torch.nn.Module, directory: str, rows: int) -> list[float]:
    """The user's script; returns the losses, and what the evaluation measured."""
    arguments = TrainingArguments(
        directory,
        per_device_train_batch_size=rows,
        per_device_eval_batch_size=rows,
        num_train_epochs=2,
        learning_rate=3e-3,
        eval_strategy="epoch",
        save_strategy="epoch",
        load_best_model_at_end=True,
        logging_steps=5,
        use_cpu=True,
        disable_tqdm=True,
        report_to=[],
    )
    data = {"train_dataset": Reviews(0, 203), "eval_dataset": Reviews(1, 51), "compute_metrics": accuracy}
    run = trainer(model, arguments, **data)
    run.train()
    found = run.evaluate()
    losses = [each["loss"] for each in run.state.log_history if "loss" in each]
    return [*losses, found["eval_loss"], found["eval_accuracy"]]


def on_a_rank(layout: str, directory: str) -> list[float]:
    with shardwise.Mesh.open(layout) as mesh:
        torch.manual_seed(0)
        model = shardwise.parallelize(BertForSequenceClassification(CONFIG), mesh)  # or shardwise.load(path, mesh)
        return finetune(Trainer, model, directory, rows=16 // mesh.data_size)


def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        torch.manual_seed(0)
        alone = finetune(transformers.Trainer, BertForSequenceClassification(CONFIG), f"{directory}/one", rows=16)
        print("one process", [f"{value:.4f}" for value in alone])
        for layout in ("tp2", "fsdp2"):
            found, _ = spawn(on_a_rank, 2, layout, f"{directory}/{layout}")
            print(layout, [f"{value:.4f}" for value in found])
            assert max(abs(one - other) for one, other in zip(found[:-2], alone[:-2], strict=True)) < 1e-4
            assert found[-1] == alone[-1], "the same accuracy"


if __name__ == "__main__":
    main()
