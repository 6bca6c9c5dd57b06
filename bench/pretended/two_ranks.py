"""Two ranks on the card that is not there: what they hold at most, and where the host waits in ten steps.

    python bench/pretended_card.py python bench/pretended/two_ranks.py [LAYOUT ...]

Values are not computed, so that no optimizer can be tried before it is used; collectives go over gloo, whose own
waiting is no call of CUDA and is not seen.
"""

from __future__ import annotations

import itertools
import sys
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from transformers import LlamaConfig

import shardwise
from shardwise.api.describing import describe
from shardwise.ranks.spawn import spawn
from shardwise.train.loop import TrainingComponents, run_loop
from shardwise.train.run_config import OptimizerConfig

ROWS, LENGTH, NUM_STEPS = 4, 512, 10
SIZES = {
    "vocab_size": 32000, "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 4,
    "num_attention_heads": 8, "num_key_value_heads": 4,
}  # fmt: skip
BF16, FP16 = (shardwise.Precision(compute=dtype, nonfinite="skip") for dtype in ("bfloat16", "float16"))
SGD = {"optimizer_class": torch.optim.SGD, "momentum": 0.9}
CASES: list[tuple[str, str, dict[str, Any], dict[str, Any]]] = [
    ("bf16, AdamW", "tp1", {"precision": BF16}, {}),
    ("float16, AdamW", "tp1", {"precision": FP16}, {}),
    ("float16, SGD with momentum", "tp1", {"precision": FP16}, SGD),
    ("bf16, RMSprop (unfused)", "tp1", {"precision": BF16}, {"optimizer_class": torch.optim.RMSprop}),
    ("sp, bf16, AdamW", "tp2", {"precision": BF16, "sequence_parallel": True}, {}),
    ("bf16, AdamW", "fsdp2", {"precision": BF16}, {}),
    ("float16, AdamW", "fsdp2", {"precision": FP16}, {}),
    ("bf16, AdamW, 2 microbatches", "pp2", {"precision": BF16}, {}),
]


def train(layout: str, split: dict[str, Any], optimizer: dict[str, Any]) -> tuple[float, Counter[str]]:
    """The most MiB held in ten steps without a line of the log between them, and the places that waited."""
    with shardwise.Mesh.open(layout, device="cuda:0", backend=None if layout == "tp1" else "gloo") as mesh:
        model = shardwise.load(LlamaConfig(**SIZES), mesh, **split).train()
        rows = ROWS // mesh.data_size
        ids = torch.zeros(rows, LENGTH, dtype=torch.long)
        build: Callable[..., Any] = shardwise.build_optimizer
        with mock.patch("shardwise.optim.optimizer.check_optimizer"):
            chosen = build(model, **{"optimizer_class": torch.optim.AdamW, "lr": 1e-3, **optimizer})
        parts = TrainingComponents(
            step=shardwise.TrainStep(model, mesh, num_microbatches=2 if mesh.size("pp") > 1 else 1),
            clip=lambda norm: shardwise.clip_grad_norm_(model, norm),
            optimizer=chosen,
            batches=itertools.repeat({"input_ids": ids, "labels": ids}),
            device=mesh.device,
            nonfinite="skipped",
        )
        with mock.patch("shardwise.optim.optimizer.check_optimizer"):
            run_loop(parts, num_steps=1, settings=OptimizerConfig())
            torch.cuda.reset_peak_memory_stats()
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                torch.cuda.set_sync_debug_mode("warn")
                run_loop(parts, num_steps=1 + NUM_STEPS, num_done=1, settings=OptimizerConfig(), report_every=99)
                torch.cuda.set_sync_debug_mode("default")
        waits = [each for each in caught if "called a synchronizing" in str(each.message)]
        places = Counter(f"{each.filename.rpartition('/')[2]}:{each.lineno}" for each in waits)
        return torch.cuda.max_memory_allocated() / 2**20, places


def main() -> None:
    for name, layout, split, optimizer in CASES:
        if layout not in (sys.argv[1:] or [layout]):
            continue
        found = spawn(train, 1 if layout == "tp1" else 2, layout, split, optimizer)
        text = str(
            describe(LlamaConfig(**SIZES), layout, batch=(ROWS // (2 if layout == "fsdp2" else 1), LENGTH), **split)
        )
        planned = [line for line in text.splitlines() if "peak of a step" in line or "rank keeps" in line]
        print(layout, name, found, *planned, sep=" | ", flush=True)


if __name__ == "__main__":
    main()
