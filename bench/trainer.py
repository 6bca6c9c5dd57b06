"""Processor time of a step of `shardwise.trainer.Trainer` beside a `TrainStep` on the same rows, on CPU ranks.

    python bench/trainer.py [--layout tp2] [--rounds 5]

Both run forward, backward, clipping and an AdamW step of one model, in turns. Prints the median of the ratios.
"""

import argparse
import statistics
import tempfile
import time
from typing import Any

import torch
import transformers

import shardwise
from shardwise.testing.spawn import spawn
from shardwise.trainer import Trainer

STEPS, ROWS, LENGTH = 10, 8, 128
CONFIG = transformers.LlamaConfig(
    vocab_size=4000, hidden_size=256, intermediate_size=768, num_hidden_layers=4, num_attention_heads=8
)


def measure(layout: str, rounds: int, directory: str) -> list[float]:
    """Returns the ratio of processor times of each round, of this rank."""
    ratios = []
    with shardwise.Mesh.open(layout) as mesh:
        ids = torch.randint(4000, (STEPS * ROWS, LENGTH), generator=torch.Generator().manual_seed(0))
        rows = [{"input_ids": each, "labels": each} for each in ids]
        model = shardwise.load(CONFIG, mesh).train()
        arguments = transformers.TrainingArguments(
            directory,
            per_device_train_batch_size=ROWS // mesh.data_size,
            max_steps=STEPS,
            save_strategy="no",
            logging_steps=STEPS,
            use_cpu=True,
            disable_tqdm=True,
            report_to=[],
        )
        step = shardwise.TrainStep(model, mesh, num_microbatches=mesh.size("pp"))
        optimizer = shardwise.build_optimizer(model, torch.optim.AdamW, lr=5e-5)

        def own_loop() -> None:
            for number in range(STEPS):
                part = ids[number * ROWS : (number + 1) * ROWS].chunk(mesh.data_size)[mesh.data_rank]
                step({"input_ids": part, "labels": part})
                shardwise.clip_grad_norm_(model, 1.0)
                optimizer.step()
                optimizer.zero_grad()

        for _ in range(rounds + 1):
            trainer: Any = Trainer(model, arguments, train_dataset=rows)
            times = []
            for run in (own_loop, trainer.train):
                start = time.process_time()
                run()
                times.append(time.process_time() - start)
            ratios.append(times[1] / times[0])
    return ratios[1:]


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layout", default="tp2")
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    size = shardwise.MeshShape.parse(given.layout).world_size
    with tempfile.TemporaryDirectory() as directory:
        found = spawn(measure, size, given.layout, given.rounds, directory, timeout=900.0)
    ratios = [ratio for each in found for ratio in each]
    print(f"{given.layout}: Trainer / TrainStep, processor time: {statistics.median(ratios):.3f}")
    print(f"  {len(ratios)} ratios from {min(ratios):.3f} to {max(ratios):.3f}")


if __name__ == "__main__":
    main()
