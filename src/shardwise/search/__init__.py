"""Deriving a plan: what a model's structure says about how to split it, learnt by running a tiny model."""
