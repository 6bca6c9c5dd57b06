"""DPO (arXiv 2305.18290) in a loop of one's own.

torchrun --nproc-per-node 2 dpo.py [LAYOUT]

The policy is a model with an adapter, and the reference is the same model with the adapter off, so one model is held.
The pairs are lines of Python's own library: those with "double quotes" are preferred to the same with 'single quotes'.
"""

import re
import sys
import sysconfig
from pathlib import Path

import peft
import torch
from torch.nn import functional
from transformers import LlamaConfig

import shardwise

BETA = 0.1


def pairs() -> tuple[torch.Tensor, torch.Tensor]:
    """Returns lines as bytes, preferred and not, int64 [pairs, length]; 0 fills up."""
    library = Path(sysconfig.get_paths()["stdlib"])
    text = "".join((library / f"{name}.py").read_text("utf-8") for name in ("argparse", "tarfile", "typing"))
    lines = [line.strip() for line in text.splitlines() if re.fullmatch(r"[ -~]*'\w+'[ -~]*", line) and '"' not in line]
    rejected = [line[:48] for line in lines if "'" in line[:48]][:320]
    sides = ([line.replace("'", '"') for line in rejected], rejected)
    return tuple(torch.tensor([list(line.encode().ljust(48, b"\0")) for line in side]) for side in sides)


def log_likelihood(model: torch.nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """Returns the sum of the log-likelihoods of each row's bytes after the first, float32 [rows]."""
    logits = model(input_ids=ids, attention_mask=(ids != 0).long()).logits[:, :-1].float()
    found = logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
    return (found * (ids[:, 1:] != 0)).sum(-1)


def margins(model: torch.nn.Module, chosen: torch.Tensor, rejected: torch.Tensor) -> torch.Tensor:
    """Returns by how much more than the reference the policy prefers the chosen line, float32 [pairs]."""
    ids = torch.cat([chosen, rejected])
    with torch.no_grad(), model.disable_adapter():
        reference = log_likelihood(model, ids)
    ratios = (log_likelihood(model, ids) - reference).chunk(2)
    return BETA * (ratios[0] - ratios[1])


with shardwise.Mesh.open(sys.argv[1] if len(sys.argv) > 1 else "tp2") as mesh:
    config = LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=64, initializer_range=0.1, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    adapter = peft.LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
    model = shardwise.load(config, mesh, adapter=adapter).train()  # a path or hub id, for a model that has learned
    optimizer = shardwise.build_optimizer(model, torch.optim.AdamW, lr=3e-3)
    chosen, rejected = (side.to(mesh.device) for side in pairs())
    for number in range(60):
        rows = torch.randperm(256, generator=torch.Generator().manual_seed(number))[:16]
        own = rows.chunk(mesh.data_size)[mesh.data_rank]  # tp ranks compute the same rows
        loss = -functional.logsigmoid(margins(model, chosen[own], rejected[own])).mean()
        loss.backward()
        shardwise.clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if number % 20 == 19 and mesh.rank == 0:
            print(f"step {number + 1}  loss {float(loss.detach()):.4f}")

    model.eval()
    with torch.no_grad():
        held_out = margins(model, chosen[256:], rejected[256:])
    if mesh.rank == 0:
        accuracy = float((held_out > 0).float().mean())
        print(f"held out: accuracy {accuracy:.4f}, mean margin {float(held_out.mean()):.4f}")
    shardwise.export_pretrained(model, "policy")
