"""Parallel layers for hand-written models, and the conversion of such a model to a split one."""
