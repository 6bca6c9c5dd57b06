"""From gradients to updated parameters: sums over ranks, norms and clipping, optimizers."""
