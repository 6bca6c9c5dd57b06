"""`NxDOptimizer`: what `initialize_parallel_optimizer` returns."""

from shardwise.optim.wrapped_optimizer import CompletingOptimizer as NxDOptimizer

__all__ = ["NxDOptimizer"]
