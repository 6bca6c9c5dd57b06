"""How large everything is, and on which device: the real sizes for a card, toy sizes that say nothing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from transformers import LlamaConfig

from shardwise.plan.decision import TokenWork

__all__ = ["FULL", "QUICK", "Setting", "Training"]


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A llama and its batch."""

    hidden: int
    mlp: int
    layers: int
    heads: int
    key_value_heads: int
    vocabulary: int
    rows: int
    length: int

    @property
    def config(self) -> LlamaConfig:
        return LlamaConfig(
            hidden_size=self.hidden,
            intermediate_size=self.mlp,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.key_value_heads,
            vocab_size=self.vocabulary,
            max_position_embeddings=self.length,
            rope_parameters={"rope_type": "default", "rope_theta": 500_000.0},
        )


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Those of every part; steps are those that are measured, after `warmup` others. A curve has no others."""

    lora: Shape
    full: Shape
    pretrain: Shape
    curve: Shape
    warmup: int
    steps: int
    curve_steps: int
    repeats: int


_8B = {"hidden": 4096, "mlp": 14336, "layers": 32, "heads": 32, "key_value_heads": 8, "vocabulary": 128_256}
_1B = {"hidden": 2048, "mlp": 8192, "layers": 16, "heads": 32, "key_value_heads": 8, "vocabulary": 128_256}
_TOY = {
    "hidden": 32,
    "mlp": 64,
    "layers": 2,
    "heads": 4,
    "key_value_heads": 2,
    "vocabulary": 96,
    "rows": 2,
    "length": 16,
}

FULL = Sizes(
    lora=Shape(**_8B, rows=2, length=4096),
    full=Shape(**_8B, rows=2, length=4096),
    pretrain=Shape(**_1B, rows=4, length=4096),
    curve=Shape(**_1B, rows=2, length=4096),
    warmup=4,
    steps=10,
    curve_steps=200,
    repeats=20,
)
QUICK = Sizes(
    lora=Shape(**_TOY),
    full=Shape(**_TOY),
    pretrain=Shape(**_TOY),
    curve=Shape(**_TOY),
    warmup=1,
    steps=1,
    curve_steps=25,
    repeats=1,
)


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What a contender is told.

    Attributes:
        quick: toy sizes, and nothing is compiled for real.
        recomputes: blocks are computed again in backward; for those that ran out of memory.
    """

    device: str
    quick: bool
    recomputes: bool = False

    @property
    def sizes(self) -> Sizes:
        return QUICK if self.quick else FULL

    @property
    def backend(self) -> str:
        """Of torch.compile."""
        return "eager" if self.quick else "inductor"

    def batch(self, shape: Shape) -> dict[str, torch.Tensor]:
        """The same on every call."""
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(shape.vocabulary, (shape.rows, shape.length), generator=generator).to(self.device)
        return {"input_ids": ids, "labels": ids.clone()}

    def learnable(self, shape: Shape, number: int) -> Iterator[dict[str, torch.Tensor]]:
        """So many batches of a Markov chain, on the host, the same on every call: each token is followed by one of
        four, so that a loss begins at the vocabulary's logarithm and can sink to that of 4, and no batch comes twice.
        """
        generator = torch.Generator().manual_seed(0)
        tokens = min(shape.vocabulary, 4096)  # few enough to see each follower a hundred times in 1.6 million tokens
        followers = torch.randint(tokens, (tokens, 4), generator=generator)
        ids = torch.randint(4, (shape.length, number * shape.rows), generator=generator)
        ids[0] = torch.randint(tokens, (number * shape.rows,), generator=generator)
        for before, after in pairwise(ids):
            after.copy_(followers[before, after])
        for rows in ids.t().contiguous().split(shape.rows):
            yield {"input_ids": rows, "labels": rows.clone()}


@dataclass(frozen=True, kw_only=True)
class Training:
    """A contender that trains.

    Attributes:
        run: does so many steps and returns the last one's loss, on the device.
        work: what a token costs; see [Note: model FLOPs].
        notes: what a reader must know.
    """

    run: Any
    work: TokenWork
    notes: str = ""
