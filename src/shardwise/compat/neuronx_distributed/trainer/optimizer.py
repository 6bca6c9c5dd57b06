"""`NxDOptimizer`: what `initialize_parallel_optimizer` returns."""

from shardwise.compat.optimizers.wrapped import CompletingOptimizer as NxDOptimizer

__all__ = ["NxDOptimizer"]
