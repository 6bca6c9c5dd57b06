"""The library in one page: a model split over two CPU ranks trains exactly as it does whole.

    python examples/two_ranks.py

On a cluster the body of `train` stays as it is; start the script with torchrun and name a real model.
"""

import torch
from transformers import LlamaConfig

import shardwise
from shardwise.testing.spawn import spawn

CONFIG = LlamaConfig(
    vocab_size=199,  # a vocabulary that does not divide evenly is fine
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
)


def train(layout: str) -> list[tuple[float, float]]:
    """Loss and gradient norm of five steps."""
    history = []
    with shardwise.Mesh.open(layout) as mesh:
        model = shardwise.load(CONFIG, mesh, sequence_parallel=mesh.size("tp") > 1, seed=0).train()
        optimizer = shardwise.build_optimizer(model, torch.optim.AdamW, lr=1e-3)
        step = shardwise.TrainStep(model, mesh, num_microbatches=2)
        ids = torch.randint(CONFIG.vocab_size, (4, 32), generator=torch.Generator().manual_seed(0))
        for _ in range(5):
            result = step({"input_ids": ids, "labels": ids})
            norm = shardwise.clip_grad_norm_(model, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            history.append((float(result.loss), float(norm)))
        if mesh.rank == 0:
            held = sum(parameter.numel() for parameter in model.parameters())
            print(f"{mesh} holds {held:,} parameters")
    return history


def main() -> None:
    (whole,) = spawn(train, 1, "tp1")
    first, second = spawn(train, 2, "tp2")
    assert first == second, "every rank knows the same loss and norm"
    print("\nstep   loss whole   loss tp2     norm whole   norm tp2")
    for number, ((loss, norm), (split_loss, split_norm)) in enumerate(zip(whole, first, strict=True), start=1):
        print(f"{number:>4}   {loss:<10.6f}   {split_loss:<10.6f}   {norm:<10.6f}   {split_norm:<10.6f}")
        assert abs(loss - split_loss) < 1e-4


if __name__ == "__main__":
    main()
