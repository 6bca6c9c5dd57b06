"""Distillation: a small llama learns what a larger one predicts.

torchrun --nproc-per-node 2 distillation.py [LAYOUT]

The loss is made of the logits of two models, so the loop is one's own (docs/own-loop.md). The teacher learns first, for
lack of a trained one: load yours with `shardwise.load("path/or/hub-id", mesh)`.
"""

import math
import sys
import sysconfig
from pathlib import Path

import torch
from torch.nn import functional
from transformers import LlamaConfig

import shardwise

LENGTH = 64
SMALL = {"hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 4}
LARGE = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3, "num_attention_heads": 4}


def read(*modules: str) -> torch.Tensor:
    """Returns rows of bytes of Python's own modules, int64 [rows, LENGTH]."""
    library = Path(sysconfig.get_paths()["stdlib"])
    text = b"".join((library / f"{module}.py").read_bytes() for module in modules)
    ids = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    return ids[: len(ids) // LENGTH * LENGTH].view(-1, LENGTH)


def divergence(student: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
    """Returns the mean over all bytes of the teacher's Kullback-Leibler divergence from the student, in nats."""
    student, teacher = (logits.float().log_softmax(-1).flatten(0, 1) for logits in (student, teacher))
    return functional.kl_div(student, teacher, reduction="batchmean", log_target=True)


def average(value: torch.Tensor) -> float:
    """Returns the mean over the ranks."""
    torch.distributed.all_reduce(value := value.detach().clone())
    return float(value) / torch.distributed.get_world_size()


with shardwise.Mesh.open(sys.argv[1] if len(sys.argv) > 1 else "fsdp2") as mesh:
    shared = {"vocab_size": 256, "max_position_embeddings": LENGTH, "bos_token_id": None, "eos_token_id": None}
    teacher = shardwise.load(LlamaConfig(**LARGE, **shared, initializer_range=0.06), mesh).train()
    student = shardwise.load(LlamaConfig(**SMALL, **shared, initializer_range=0.06), mesh).train()
    rows, held_out = read("argparse", "tarfile", "typing"), read("textwrap")[:64]

    def batch(number: int, size: int = 32) -> torch.Tensor:
        """Returns this data rank's rows of a batch."""
        chosen = torch.randperm(len(rows), generator=torch.Generator().manual_seed(number))[:size]
        return rows[chosen].chunk(mesh.data_size)[mesh.data_rank].to(mesh.device)

    optimizer = shardwise.build_optimizer(teacher, torch.optim.AdamW, lr=3e-3)
    step = shardwise.TrainStep(teacher, mesh)
    for number in range(60):
        ids = batch(number)
        step({"input_ids": ids, "labels": ids})
        shardwise.clip_grad_norm_(teacher, 1.0)
        optimizer.step()
        optimizer.zero_grad()

    teacher.eval()
    optimizer = shardwise.build_optimizer(student, torch.optim.AdamW, lr=1e-2)
    own = held_out.chunk(mesh.data_size)[mesh.data_rank].to(mesh.device)
    for number in range(160):
        ids = batch(number)
        with torch.no_grad():
            meant = teacher(input_ids=ids).logits
        loss = divergence(student(input_ids=ids).logits, meant)
        loss.backward()  # when it returns, gradients are averaged over the data ranks
        shardwise.clip_grad_norm_(student, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if number % 40 == 39 and mesh.rank == 0:
            print(f"step {number + 1}  divergence {float(loss.detach()):.4f}")

    student.eval()
    with torch.no_grad():
        meant = teacher(input_ids=own).logits
        found = average(divergence(student(input_ids=own).logits, meant))
        uniform = average(math.log(256) + (meant.softmax(-1) * meant.log_softmax(-1)).sum(-1).mean())
    if mesh.rank == 0:
        print(f"held out: divergence {found:.4f} nats a byte, of a student that knows nothing {uniform:.4f}")
    shardwise.export_pretrained(student, "student")
