"""Parallel layers for models written by hand, and how such a model becomes a split one."""
