"""Deriving a plan: what a model's structure says about how to split it, told by running a tiny model."""
